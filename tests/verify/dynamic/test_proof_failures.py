"""A proof that cannot be made: ranks fail by a defect of ours, which ends with 3, or GPUs are not here."""

from __future__ import annotations

import pytest
import torch

from shardproof.core.base.errors import PlanError, RankDefect
from shardproof.core.commands.cli import main
from shardproof.core.plan.plan import Plan
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.run import proof_run

PLAN = """
[model]
preset = "tiny-gpt"
[layout]
pp = 2
[batch]
global = 2
sequence = 8
[precision]
dtype = "fp32"
[numerics]
mode = "exact"
"""
WORDS = "rank 1 failed: IndexError: pop from empty list, in 1F1 (step 1, microbatch 1) at layers."


def defective_prove_rank(transport, job):
    """A proof in which rank 1 pops from an empty list of ours in its second forward."""
    if transport.global_rank == 1:
        recorder = transport.recorder
        recorder.enabled = True
        broken = "def product(*_, **__):\n    if str(recorder.scope[0]) == '1F1': nodes.pop()\n"
        known = {"__name__": "shardproof.backend.defective", "recorder": recorder, "nodes": []}
        exec(compile(broken, "/shardproof/backend/defective.py", "exec"), known)
        recorder.product = known["product"]
    return (job.scenario or proof_run.train_steps)(transport, job)


@pytest.fixture(autouse=True)
def defective(monkeypatch):
    monkeypatch.setattr(proof_run, "prove_rank", defective_prove_rank)


def test_a_defect_in_a_rank_of_a_proof_is_no_finding_and_ends_with_3(tmp_path, capsys):
    file = tmp_path / "plan.toml"
    file.write_text(PLAN)
    assert main(["verify", str(file), "--dynamic", "--transport", "memory", "--json"]) == 3
    captured = capsys.readouterr()
    assert captured.out == "" and f"shardproof verify: {WORDS}" in captured.err
    assert "This is a defect of shardproof: please report it" in captured.err


def test_prove_raises_what_the_command_says():
    with pytest.raises(RankDefect) as caught:
        prove(Plan.from_toml(PLAN), transport="memory")
    assert str(caught.value).startswith(WORDS) and caught.value.global_rank == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize(
    ("transport", "device", "message"),
    [
        (None, "cuda", "1 CUDA devices are needed"),
        ("nccl", None, "2 CUDA devices are needed"),
        ("gloo", "cuda", "gloo moves tensors of the processor"),
        ("nccl", "cpu", "NCCL moves tensors of GPUs"),
    ],
)
def test_a_proof_on_gpus_that_are_not_here_is_the_users_matter(transport, device, message) -> None:
    with pytest.raises(PlanError, match=message):
        prove(Plan.from_toml(PLAN), transport=transport, device=device)
