"""Ledgers of two runs are compared after the fact: any two layouts, with the kind of every difference, and
rounding distinguished from faults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardproof import Plan, Trainer
from shardproof.core.base.digest import keys_of
from shardproof.core.base.errors import DivergedError
from shardproof.core.commands.cli import main
from shardproof.core.plan.train import Checkpoint
from shardproof.verify.causes.against import compare_saved
from shardproof.verify.ledger.file import read_ledger
from shardproof.verify.ledger.ledger import HELD_OUT, NO_STEP
from shardproof.verify.run.record import ledger_observers

PLAN = """
[model]
preset = "tiny-gpt"
num_layers = 2
hidden_size = 24
num_heads = 6
num_kv_heads = 3
head_dim = 4
ffn_hidden_size = 48
[layout]
{layout}
[batch]
global = 6
sequence = 16
[precision]
dtype = "fp32"
[numerics]
mode = "{mode}"
[optimizer]
clip_grad_norm = 0.5
[train]
steps = 2
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of the ledger of a run over threads, each layout trained once."""
    root, runs = tmp_path_factory.mktemp("ledgers"), {}

    def folder(layout: str, mode: str = "exact") -> Path:
        if (layout, mode) not in runs:
            path = root / str(len(runs))
            plan = Plan.from_toml(PLAN.format(layout=layout, mode=mode))
            Trainer(plan, transport="memory", observer=ledger_observers(plan, str(path))).fit()
            runs[layout, mode] = path
        return runs[layout, mode]

    return folder


def test_a_run_that_ends_early_leaves_all_that_it_saw(tmp_path: Path) -> None:
    text = PLAN.format(layout="tp = 3", mode="fast").replace("clip_grad_norm = 0.5", "clip_grad_norm = 0.0")
    plan = Plan.from_toml(f"{text}learning_rate = 1e30\n")
    with pytest.raises(DivergedError):
        Trainer(plan, transport="memory", observer=ledger_observers(plan, str(tmp_path / "ledger"))).fit()
    held_out = [key for key in read_ledger(tmp_path / "ledger").run.pieces if key.phase == HELD_OUT]
    whole, last = ({(key.tensor, key.sample) for key in held_out if key.step == step} for step in (NO_STEP, 0))
    assert last == whole


def test_two_layouts_of_one_problem_have_equal_ledgers(
    saved: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = saved("tp = 3\ndp = 2"), saved("pp = 2\ndp = 3")
    assert main(["verify", str(one), "--against", str(other), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["bitwise"], report["tensors_different"], report["findings"]) == (True, True, 0, [])
    assert report["steps"] == 2 and report["tensors_compared"] > 200 and len(report["losses"]) == 2


def test_a_resumed_run_is_compared_from_the_state_on_that_it_loaded(saved: Callable[..., Path], tmp_path: Path) -> None:
    """It goes on after the first of two steps under another layout; a moment that was loaded wrongly is named
    before anything it spoils."""

    def train(layout: str, steps: int, **choices: object) -> None:
        plan = Plan.from_toml(PLAN.format(layout=layout, mode="exact"))
        plan = replace(
            plan, train=replace(plan.train, steps=steps), checkpoint=Checkpoint(str(tmp_path / "checkpoints"))
        )
        observer = ledger_observers(plan, str(tmp_path / "resumed")) if choices else None
        Trainer(plan, transport="memory", observer=observer, **choices).fit()

    train("pp = 2", 1)
    train("dp = 3", 2, resume=True)
    right = read_ledger(saved("tp = 3\ndp = 2"))
    found = compare_saved(read_ledger(tmp_path / "resumed"), right)
    assert found.ok and found.report["tensors_different"] == 0, found.text
    assert 100 < found.report["tensors_compared"] < len(right.run.pieces)
    name = "layers.0.mlp.norm.weight.exp_avg"
    wrong = spoiled(tmp_path / "resumed", tmp_path / "wrong", other_bits(0, "optimizer state", name))
    first = compare_saved(read_ledger(wrong), right).report["first_divergence"]
    assert (first["step"], first["phase"], first["tensor"], first["ranks"]) == (1, "optimizer state", name, [1])


def test_fast_numerics_are_explained_by_the_order_of_sums(saved: Callable[..., Path]) -> None:
    found = compare_saved(read_ledger(saved("tp = 3", "fast")), read_ledger(saved("tp = 3\ndp = 2")))
    assert found.ok and not found.report["bitwise"]
    assert found.report["tensors_explained"] == found.report["tensors_different"] > 100
    assert [finding.rule for finding in found.findings] == ["order-of-sums"]


def spoiled(folder: Path, target: Path, change: Callable[[list], list | None], rank: int = 1) -> Path:
    """A copy of a ledger in which the lines of one rank are changed."""
    shutil.copytree(folder, target)
    path = target / f"rank-{rank}.jsonl"
    header, *lines = path.read_text().splitlines()
    changed = [change(json.loads(line)) for line in lines]
    path.write_text("\n".join([header, *(json.dumps(line) for line in changed if line is not None), ""]))
    return target


def other_bits(*chosen: object) -> Callable[[list], list]:
    """Changes the digest and doubles the sums of the tensor `(step, phase, name)`."""

    def change(line: list) -> list:
        if tuple(line[:3]) == chosen:
            line[6:8], line[9] = ["ab" * 16, "cd" * 8], [2 * each for each in line[9]]
        return line

    return change


def test_the_first_difference_along_the_dataflow_is_named_with_rank_action_and_kind(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    name = "layers.1.mlp.down.weight"
    changes = [other_bits(1, "weight", name), other_bits(0, "gradient", name)]
    wrong = spoiled(saved("tp = 3\ndp = 2"), tmp_path / "wrong", lambda line: changes[0](changes[1](line)), rank=4)
    found = compare_saved(read_ledger(wrong), read_ledger(saved("pp = 2\ndp = 3")))
    first = found.report["first_divergence"]
    assert not found.ok
    assert (first["step"], first["phase"], first["tensor"], first["action"]) == (1, "gradient", name, "0REDUCE_GRAD")
    assert (first["ranks"], first["class"]) == ([4], "other values")  # a third of the tensor is doubled
    same_cut = compare_saved(read_ledger(wrong), read_ledger(saved("tp = 3\ndp = 2"))).report["first_divergence"]
    assert (same_cut["ranks"], same_cut["class"]) == ([4], "doubled")


def test_a_lost_tensor_and_half_a_line_at_the_end_are_distinguished(saved: Callable[..., Path], tmp_path: Path) -> None:
    lost = spoiled(saved("tp = 3"), tmp_path / "lost", lambda line: None if line[1] == "gradient" else line)
    rules = [
        finding.rule for finding in compare_saved(read_ledger(lost), read_ledger(saved("pp = 2\ndp = 3"))).findings
    ]
    assert rules[0] == "tensor-incomplete"
    with (lost / "rank-0.jsonl").open("a") as file:
        file.write('[1,"weight","lay')  # the rank was killed here
    assert read_ledger(lost).run.pieces


def test_other_problems_and_other_machines_are_said_first(saved: Callable[..., Path]) -> None:
    one, other = read_ledger(saved("tp = 3\ndp = 2")), read_ledger(saved("pp = 2\ndp = 3"))
    problem = replace(other, plan=replace(other.plan, train=replace(other.plan.train, seed=7)))
    (finding,) = compare_saved(one, problem).findings
    assert finding.rule == "other-problem" and finding.what == "train.seed is 1234 and was 7."
    machine = replace(other, environments=({**other.environments[0], "kernels": "AVX2"},))
    found = compare_saved(one, machine)
    assert (
        found.ok
        and not found.report["bitwise"]
        and found.findings[0].rule == "other-machine"
        and "kernels" in found.findings[0].what
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{one}"], "is one ledger, and two are compared. Give the other one by --against"),
        (["{one}", "--against", "{empty}"], "has no ledger"),
        (["{one}", "--against", "{one}", "--dynamic"], "--dynamic belongs to a plan"),
        (["{torn}", "--against", "{one}"], "rank-2.jsonl is not there"),
        (["{broken}", "--against", "{one}"], "is no file of a ledger, or broken"),
    ],
)
def test_what_is_no_pair_of_ledgers_ends_with_2_and_says_what_to_do(
    saved: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    one, empty, torn, broken = saved("tp = 3\ndp = 2"), tmp_path / "empty", tmp_path / "torn", tmp_path / "broken"
    empty.mkdir()
    for copy in (torn, broken):
        shutil.copytree(one, copy)
    (torn / "rank-2.jsonl").unlink()
    (broken / "rank-0.jsonl").write_text("{}\n")
    places = {"one": one, "empty": empty, "torn": torn, "broken": broken}
    assert main(["verify", *(each.format(**places) for each in arguments)]) == 2
    assert words in capsys.readouterr().err


def test_a_folder_with_something_in_it_is_no_place_for_a_ledger(
    saved: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--model", "tiny-gpt", "--ledger", str(saved("tp = 3\ndp = 2"))]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_gather_and_a_recomputation_are_named_in_saved_ledgers_too(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    more = '\n[schedule]\nmax_active_stages = 1\n[recompute]\nmode = "full"'
    run, right = saved(f"dp = 3\nzero = 3{more}"), read_ledger(saved("tp = 3\ndp = 2"))
    found, back = compare_saved(read_ledger(run), right), compare_saved(right, read_ledger(run))
    assert found.ok and back.ok and found.report["tensors_compared"] == len(right.run.pieces)
    for phase, name, action in (
        ("gathered weight", "layers.1.mlp.down.weight", "0UNSHARD"),
        ("recomputed activation", "layers.1.mlp", "0B0"),
    ):
        wrong = spoiled(run, tmp_path / phase, other_bits(1, phase, name))
        first = compare_saved(read_ledger(wrong), right).report["first_divergence"]
        assert (first["step"], first["phase"], first["tensor"], first["action"]) == (2, phase, name, action)
        assert (first["ranks"], first["class"]) == ([1], "doubled")


def test_a_flipped_bit_of_a_cut_weight_is_found_by_digests(saved: Callable[..., Path], tmp_path: Path) -> None:
    """The digest of one element more by 2^bit times its key; all sums off by as much."""
    name, shape, element, bit = "layers.0.mlp.up.weight", (48, 24), (40, 3), 14
    keys = [int(lane[0]) for lane in keys_of(np.array([element[0] * shape[1] + element[1]], dtype=np.uint64))]

    def change(line: list) -> list:
        if tuple(line[:3]) == (1, "weight", name):
            assert tuple(line[4]) == shape
            lanes = [(int(line[6][16 * lane : 16 * lane + 16], 16) + (keys[lane] << bit)) % 2**64 for lane in range(2)]
            line[6:8], line[9] = [f"{lanes[0]:016x}{lanes[1]:016x}", "cd" * 8], [each + 1e-6 for each in line[9]]
        return line

    wrong = read_ledger(spoiled(saved("tp = 3\ndp = 2"), tmp_path / "flipped", change, rank=5))
    for reference in (saved("tp = 3\ndp = 2"), saved("pp = 2\ndp = 3")):
        first = compare_saved(wrong, read_ledger(reference)).report["first_divergence"]
        assert (first["ranks"], first["class"]) == ([5], "bit flip")
        assert first["words"] == f"one bit of 1 element flipped (bit {bit} of fp32, at {list(element)})"
