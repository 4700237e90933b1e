"""A run on token files and blends goes on with the samples that would have come, and with no others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.gates import sampled
from helpers.plans import plan as plan_of
from shardproof import Layout, Trainer
from shardproof.backend.data.megatron_index import write_index
from shardproof.core.base.errors import PlanError


@pytest.fixture
def data(tmp_path):
    """A blend of a token file of thirty documents, whose second pass the third step begins, and a text."""
    lengths = np.arange(5, 35)
    rng = np.random.default_rng(3)
    rng.integers(0, 250, lengths.sum(), dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    with (tmp_path / "tokens.idx").open("wb") as file:
        write_index(file, np.dtype("<u2"), lengths, np.arange(len(lengths) + 1))
    (tmp_path / "text.txt").write_text("a text to learn from, and more of it. " * 20)
    return f"0.75 {tmp_path}/tokens 0.25 {tmp_path}/text.txt"


def losses(plan, *, resume=False):
    return Trainer(plan, transport="memory", resume=resume).fit().losses


@sampled("kind", ["packed", "padded"], on_push=1)
def test_a_run_on_a_blend_goes_on_under_another_layout_with_the_bits_of_an_undisturbed_one(data, kind, tmp_path):
    settings = {"data": data, "split": "80,20", kind: True, "ignore_token": 0, "samples": 12, "sequence": 16}
    whole = losses(plan_of(**settings, steps=3))
    for steps, layout in ((1, Layout(tp=2)), (3, Layout(dp=2, zero=1))):
        plan = plan_of(layout, **settings, steps=steps, folder=str(tmp_path / "run"))
        found = losses(plan, resume=steps > 1)
        assert list(found) == list(whole[steps - len(found) : steps])


def test_a_run_does_not_go_on_with_other_token_files_or_weights(data, tmp_path):
    plan = plan_of(data=data, steps=1, folder=str(tmp_path / "run"))
    losses(plan)

    def resumed(**train):
        changed = replace(plan, train=replace(plan.train, steps=2, **train))
        return losses(replace(changed, checkpoint=replace(plan.checkpoint, every=5)), resume=True)

    for other in (data.replace("0.75", "0.5"), f"{tmp_path}/tokens"):
        with pytest.raises(
            PlanError, match=r"on token files of \d+ tokens with SHA-256 .* so other samples would follow"
        ):
            resumed(data=other)
    with pytest.raises(PlanError, match="so other samples would follow"):
        resumed(split="50,50")
    for end in (".bin", ".idx"):
        (tmp_path / f"tokens{end}").rename(tmp_path / f"moved{end}")
    assert len(resumed(data=data.replace("tokens", "moved").replace("0.75", "3").replace("0.25", "1"))) == 1
