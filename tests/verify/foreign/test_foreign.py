"""Ledgers of other stacks: the recorder's entries against values taken by hand, real runs over gloo right and
wrong, and known bugs."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardproof
from helpers.gates import sampled
from shardproof import Recorder
from shardproof.core.base.digest import digest
from shardproof.core.base.errors import PlanError
from shardproof.verify.causes.against import Comparison
from shardproof.verify.causes.norms import Squares, Suspects, explained_by_squares
from shardproof.verify.cli import VERIFY
from shardproof.verify.foreign import Slice
from shardproof.verify.foreign.compare import compare_recorded
from shardproof.verify.ledger.file import read_ledger
from shardproof.verify.ledger.ledger import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GRADIENT,
    OPTIMIZER,
    SCALAR,
    WEIGHT,
    Key,
)

EXAMPLES = Path(shardproof.__file__).parent / "examples" / "foreign"
FOLDERS = (EXAMPLES, EXAMPLES / "megatron_7452")


def unsynchronised(module: Any) -> None:
    """FSDP2 was asked to keep gradients for itself, as between microbatches, and not to exchange them again."""
    whole = module.fully_shard

    def fully_shard(*args: Any, **kwargs: Any) -> Any:
        sharded = whole(*args, **kwargs)
        sharded.set_requires_gradient_sync(False)
        return sharded

    module.fully_shard = fully_shard


def same_samples(module: Any) -> None:
    """Every data-parallel rank reads the samples of rank 0."""
    first = module.tiny.batch

    class Same:
        def __init__(self, held: torch.Tensor) -> None:
            self.held = held

        def __getitem__(self, own: slice) -> torch.Tensor:
            return self.held[: own.stop - own.start]

    module.tiny.batch = lambda step: tuple(map(Same, first(step)))


def own_seed(module: Any) -> None:
    """The rank in the middle draws one weight from a seed of its own."""
    recorder = module.Recorder

    def late(folder: str, stage: Any, *args: Any, **kwargs: Any) -> Recorder:
        if torch.distributed.get_rank() == 1:
            nn.init.normal_(stage.submod.layers["1"].up.weight, generator=torch.Generator().manual_seed(7))
        return recorder(folder, stage, *args, **kwargs)

    module.Recorder = late


def unscaled_microbatches(module: Any) -> None:
    """The pipeline adds the gradients of microbatches up and does not divide by their number."""
    schedule = module.Schedule1F1B
    module.Schedule1F1B = lambda *args, **kwargs: schedule(*args, **kwargs, scale_grads=False)


FAULTS = {each.__name__: each for each in (unsynchronised, same_samples, own_seed, unscaled_microbatches)}


def run_rank(transport: Any, runs: list[tuple[str, dict[str, Any], str | None]]) -> None:
    """Runs examples one after the other on the ranks of torch's default group: a module, the arguments
    of its `main`, a fault."""
    transport.open_default_group()
    sys.path[:0] = map(str, FOLDERS)
    try:
        for name, arguments, fault in runs:
            for old in [
                old for old, module in sys.modules.items() if str(EXAMPLES) in str(getattr(module, "__file__", ""))
            ]:
                del sys.modules[old]  # faults are patched into modules
            module = importlib.import_module(name)
            if fault is not None:
                FAULTS[fault](module)
            module.main(**arguments)
    finally:
        del sys.path[: len(FOLDERS)]


def compared(run: Path, right: Path) -> Comparison:
    """What `verify RUN --against RIGHT` finds."""
    return compare_recorded(read_ledger(run), read_ledger(right))


# real runs of other stacks


@pytest.fixture(scope="module")
def stacks(workers, tmp_path_factory) -> Path:
    """Ledgers of the small transformer on one device, in one batch and in four microbatches, and of three
    stacks on three ranks."""
    folder = tmp_path_factory.mktemp("stacks")
    alone = [("tiny", {"microbatches": 1}, "right"), ("tiny", {"microbatches": 4, "exact": True}, "right4")]
    three = [
        ("fsdp2", None, "fsdp2"),
        ("fsdp2", "unsynchronised", "fsdp2-kept"),
        ("fsdp2", "same_samples", "fsdp2-same"),
        ("tensor_parallel", None, "tp"),
    ]
    pipelines = [("pipelining", None, "pp"), ("pipelining", "own_seed", "pp-seed")]
    pipelines += [("pipelining", "unscaled_microbatches", "pp-unscaled")]
    workers(1).run(run_rank, [(name, {**given, "folder": str(folder / to)}, None) for name, given, to in alone])
    jobs = [(name, {"folder": str(folder / to)}, fault) for name, fault, to in three]
    jobs += [(name, {"folder": str(folder / to), "exact": True}, fault) for name, fault, to in pipelines]
    workers(3).run(run_rank, jobs)
    return folder


@sampled("stack", ["fsdp2", "tp"], on_push=1)
def test_stacks_that_cut_unevenly_differ_from_one_device_by_rounding(stacks, stack):
    found = compared(stacks / stack, stacks / "right")
    assert found.ok, found.text
    assert not found.report["bitwise"]
    assert found.report["relative_tolerance"] == 1e-4
    assert found.report["tensors_compared"] > 1500
    assert found.report["losses"] == pytest.approx(read_ledger(stacks / "right").run.scalars("loss"), rel=1e-6)


def test_torch_pipelining_has_the_bits_of_one_device_that_takes_the_same_microbatches(stacks):
    found = compared(stacks / "pp", stacks / "right4")
    assert found.ok, found.text
    assert found.report["bitwise"]
    assert found.report["tensors_different"] == 0
    phases = {ACTIVATION, ACTIVATION_GRADIENT, GRADIENT, OPTIMIZER, WEIGHT, SCALAR}
    assert phases <= {key.phase for key in read_ledger(stacks / "pp").run.pieces}


WRONG_STACKS = {
    "fsdp2-kept": ("right", (GRADIENT, "head.weight", None), "missing", set(), "no rank of the run"),
    "fsdp2-same": ("right", (ACTIVATION, "embedding", 4), "permuted", {1}, "the values of sample 0"),
    "pp-seed": ("right4", (WEIGHT, "layers.1.up.weight", None), "other values", {1}, "off by"),
    "pp-unscaled": ("right4", (GRADIENT, "head.weight", None), "scaled", {2}, "times 4"),
}


@pytest.mark.parametrize("stack", WRONG_STACKS)
def test_the_first_cause_in_another_stack_is_named(stacks, stack):
    right, place, kind, ranks, words = WRONG_STACKS[stack]
    found = compared(stacks / stack, stacks / right)
    first = found.report["first_divergence"]
    assert not found.ok
    assert (first["phase"], first["tensor"], first["sample"]) == place
    assert (first["step"], first["class"], set(first["ranks"])) == (0 if stack == "pp-seed" else 1, kind, ranks)
    assert words in first["words"]


def test_the_command_line_compares_them(stacks, capsys):
    from shardproof.core.commands.cli import main

    assert main(["verify", str(stacks / "fsdp2"), "--against", str(stacks / "right")]) == 0
    assert "a convention and no bound" in capsys.readouterr().out
    assert main([VERIFY.name, str(stacks / "fsdp2-same"), "--against", str(stacks / "right"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first_divergence"]["rank"] == 1


# the bugs of Megatron-LM#7452

KNOWN_BUGS = {
    "label_smoothing": (3, (ACTIVATION, "loss", 0), "other values", {0, 1, 2}, "off by"),
    "gathered_logits": (
        3,
        (ACTIVATION, "loss", 0),
        "other values",
        {0, 1, 2},
        ("plus 1.09861 everywhere, which is log(3)"),
    ),
    "token_counts": (4, (ACTIVATION_GRADIENT, "model.1", 0), "scaled", {0}, "times 15/14"),
    "recompute_group": (4, (ACTIVATION, "second.0", 0), "other values", {0, 2}, "when it was computed again"),
    "sink_norm": (
        3,
        (SCALAR, "grad_norm", None),
        "missing",
        {0, 1, 2},
        ("of the squares of sink only those that rank 0 holds are counted"),
    ),
    "out_norm": (3, (GRADIENT, "norm.weight", None), "missing", {0, 1, 2}, "add up to the right values"),
}


@pytest.fixture(scope="module")
def bugs(workers, tmp_path_factory) -> Path:
    """Ledgers of every known bug, fixed and not, and on one device, which cannot have it."""
    folder = tmp_path_factory.mktemp("bugs")
    for size in sorted({1} | {each[0] for each in KNOWN_BUGS.values()}):
        names = [name for name, each in KNOWN_BUGS.items() if size in (1, each[0])]
        workers(size).run(
            run_rank,
            [
                (name, {"folder": str(folder / f"{name}-{fixed}-{size}"), "fixed": fixed}, None)
                for name in names
                for fixed in ((False,) if size == 1 else (False, True))
            ],
        )
    return folder


@pytest.mark.parametrize("name", KNOWN_BUGS)
def test_the_first_cause_of_a_known_bug_is_named_and_its_fix_has_none(bugs, name):
    size, place, kind, ranks, words = KNOWN_BUGS[name]
    right = bugs / f"{name}-False-1"
    fixed = compared(bugs / f"{name}-True-{size}", right)
    assert fixed.ok, fixed.text
    found = compared(bugs / f"{name}-False-{size}", right)
    first = found.report["first_divergence"]
    assert (first["phase"], first["tensor"], first["sample"]) == place, found.text
    assert (first["step"], first["class"], set(first["ranks"])) == (1, kind, ranks)
    assert words in first["words"]


# what the recorder writes


class Twice(nn.Module):
    """Calls one layer twice and gives back a tensor and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """[samples, 3]."""
        hidden = self.layer(self.layer(x))
        return {"hidden": hidden, "loss": hidden.square().mean()}


def test_entries_are_the_values_of_the_loop_by_step_and_sample(tmp_path):
    torch.manual_seed(0)
    model = Twice()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    expected: dict[tuple[Any, ...], torch.Tensor] = {}
    with Recorder(tmp_path / "run", model, optimizer, first_sample=10) as recorder:
        for step in range(2):
            for first in (10, 20):
                if first > 10:
                    recorder.samples(first)
                x = torch.randn(3, 3, requires_grad=True)
                found = model(x)
                found["hidden"].retain_grad()
                found["loss"].backward()
                for sample in range(3):
                    expected[step, ACTIVATION, "model.hidden", first + sample] = found["hidden"][sample]
                    expected[step, ACTIVATION_GRADIENT, "model.hidden", first + sample] = found["hidden"].grad[sample]
                expected[step, ACTIVATION, "model.loss", first] = found["loss"]
            with torch.no_grad():
                model(torch.randn(5, 3))
            expected[step, GRADIENT, "layer.bias", None] = model.layer.bias.grad.clone()
            recorder.gradients()
            model.layer.bias.grad *= 3  # as clipping would
            recorder.scalar("loss", found["loss"])
            optimizer.step()
            optimizer.zero_grad()
            expected[step, WEIGHT, "layer.weight", None] = model.layer.weight.detach().clone()
            expected[step, OPTIMIZER, "layer.bias.exp_avg", None] = optimizer.state[model.layer.bias]["exp_avg"].clone()
    pieces = read_ledger(tmp_path / "run").run.pieces
    for key, values in expected.items():
        (piece,) = pieces[Key(*key)]
        assert piece.shape == tuple(values.shape)
        assert piece.digest == digest(np.atleast_1d(values.detach().numpy())), key
    assert {key.sample for key in pieces if key.tensor == "layer"} == {10, 11, 12, 20, 21, 22}
    assert {key.step for key in pieces if key.tensor == "layer#2"} == {0, 1}
    assert [each.summary.largest for key, (each,) in pieces.items() if key.tensor == "learning_rate"] == [0.5, 0.5]


def test_parts_names_and_scaled_losses_are_as_the_user_says(tmp_path):
    whole, part = nn.Linear(4, 6, bias=False), nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        part.weight.copy_(whole.weight[2:4])
    x = torch.randn(2, 5, 4)
    with Recorder(tmp_path / "whole", nn.Sequential(whole)):
        nn.Sequential(whole)(x).sum().backward()
    right = nn.Sequential(whole)
    with Recorder(tmp_path / "right", right) as recorder:
        right(x).square().mean().backward()
        recorder.gradients()
    wrapped = nn.Sequential(nn.Sequential(part))
    cuts = {"0": [Slice(-1, 2, 6)], "*.weight": [Slice(0, 2, 6)]}
    names = {"0.0": "0", "0.0.weight": "0.weight"}.get
    with Recorder(tmp_path / "part", wrapped, cuts=cuts, names=names, loss_scale=3, sample_dim=1) as recorder:
        (3 * wrapped(x.transpose(0, 1)).square().mean()).backward()
        recorder.gradients()
    pieces = read_ledger(tmp_path / "part").run.pieces
    assert {key.tensor for key in pieces} == {"0", "0.weight", "unit roundoff"}
    expected = read_ledger(tmp_path / "right").run.pieces
    for key in (Key(0, ACTIVATION, "0", 1), Key(0, GRADIENT, "0.weight")):
        (piece,), (other,) = pieces[key], expected[key]
        assert piece.shape == other.shape
        assert piece.region != other.region
    (gradient,) = pieces[Key(0, ACTIVATION_GRADIENT, "0", 1)]
    values = (2 * whole(x)[1, :, 2:4] / 20).detach().numpy()
    assert gradient.summary.largest == pytest.approx(np.abs(values).max(), rel=1e-6)


def test_wrappers_do_not_show_in_names(tmp_path):
    class Wrapper(nn.Module):
        """As DistributedDataParallel."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    model = Wrapper(nn.Sequential(nn.Linear(3, 3), Wrapper(nn.Linear(3, 3))))
    with Recorder(tmp_path / "run", model) as recorder:
        model.module[0](torch.zeros(1, 3))  # no call of the model: no microbatch
        model(torch.zeros(1, 3)).sum().backward()
        recorder.gradients()
    pieces = read_ledger(tmp_path / "run").run.pieces
    assert {key.tensor for key in pieces if key.phase == ACTIVATION} == {"0", "1", "model"}
    assert {key.tensor for key in pieces if key.phase == GRADIENT} == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert all(len(found) == 1 for found in pieces.values())


@pytest.mark.parametrize(("reentrant", "again"), [(True, {"layers", "layers.0", "layers.1"}), (False, {"layers.0"})])
def test_what_a_checkpoint_computes_again_is_a_second_piece_of_the_same_tensor(tmp_path, reentrant, again):
    """torch's newer checkpoints stop as soon as they have what backward needs, before the last module is done."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=reentrant)

    model = Model()
    with Recorder(tmp_path / "run", model):
        for _ in range(2):
            model(torch.randn(1, 3, requires_grad=True)).sum().backward()
    pieces = read_ledger(tmp_path / "run").run.pieces
    for sample in range(2):
        seen = {name: pieces[Key(0, ACTIVATION, name, sample)] for name in ("layers", "layers.0", "layers.1")}
        assert {name for name, found in seen.items() if len(found) == 2} == again
        assert all(len({piece.digest for piece in found}) == 1 for found in seen.values())


def test_a_gradient_that_is_rounding_alone_and_a_lower_format_are_no_fault_and_a_wrong_rate_is(tmp_path):
    """Softmax does not see the bias of the keys: its gradient is noise, which Adam turns into steps of full size."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        tiny = importlib.import_module("tiny")
    finally:
        sys.path.remove(str(EXAMPLES))

    def train(to: str, *, dtype: torch.dtype = torch.float32, rate: float = 3e-3, chunks: int = 1) -> Path:
        net = tiny.model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
        with Recorder(tmp_path / to, net, optimizer), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            for step in range(2):
                for tokens, targets in zip(*(each.chunk(chunks) for each in tiny.batch(step)), strict=True):
                    (tiny.loss_of(net(tokens), targets) / chunks).backward()
                optimizer.step()
                optimizer.zero_grad()
        return tmp_path / to

    right = train("right")
    chunked = compared(train("chunked", chunks=6), right)
    assert chunked.ok, chunked.text
    assert chunked.report["tensors_different"] > 100
    low = compared(train("bf16", dtype=torch.bfloat16), right)
    assert low.ok, low.text
    assert low.report["relative_tolerance"] == 4e-2
    (tmp_path / "two").mkdir()
    for rank, run in enumerate((right, tmp_path / "chunked")):  # two copies, apart by rounding
        lines = (run / "rank-0.jsonl").read_text().split("\n", 1)
        header = {**json.loads(lines[0]), "rank": rank, "world_size": 2}
        (tmp_path / "two" / f"rank-{rank}.jsonl").write_text(f"{json.dumps(header)}\n{lines[1]}")
    assert compared(right, tmp_path / "two").ok
    assert compared(tmp_path / "two", right).ok
    wrong = (tmp_path / "two" / "rank-1.jsonl").read_text().split("\n")
    rows = [i for i, line in enumerate(wrong) if line.startswith('[0,"gradient","')]
    names = [json.loads(wrong[i])[2] for i in rows]
    here, there = (rows[names.index(f"layers.1.attention.{each}.weight")] for each in ("query", "value"))
    wrong[here] = wrong[there].replace("value", "query")
    (tmp_path / "two" / "rank-1.jsonl").write_text("\n".join(wrong))
    (finding, *_) = compared(tmp_path / "two", right).findings
    assert finding.where.endswith(
        "rank 1, backward and the reduction of gradients, gradient layers.1.attention.query.weight"
    )
    assert (finding.rank, finding.tensor) == (1, "layers.1.attention.query.weight")
    assert (finding.hint or "").startswith("The replica on rank 0 is right.")
    first = compared(train("rate", rate=6e-3), right).report["first_divergence"]
    assert (first["tensor"], first["class"], first["words"]) == (
        "learning_rate",
        "doubled",
        ("0.006, which is 2 of 0.003"),
    )


def test_a_recorder_says_what_to_do_about_wrong_input(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3))
    with Recorder(tmp_path / "run", model) as recorder:
        with pytest.raises(PlanError, match="was not called in this step"):
            recorder.activation("probabilities", torch.zeros(1, 3))
        model(torch.zeros(1, 3))
        recorder.activation("probabilities", torch.ones(1, 3))
    assert Key(0, ACTIVATION, "probabilities", 0) in read_ledger(tmp_path / "run").run.pieces
    with pytest.raises(PlanError, match=r"rank-0\.jsonl\. Give a new folder"):
        Recorder(tmp_path / "run", model)
    with pytest.raises(PlanError, match="are both called 'same'"):
        Recorder(tmp_path / "same", model, names=lambda name: "same")
    compiled = nn.Linear(3, 3)
    compiled.compile(backend="eager")
    with pytest.raises(PlanError, match="module 0 is compiled"):
        Recorder(tmp_path / "compiled", nn.Sequential(compiled))
    with (
        pytest.raises(PlanError, match=r"does not fit 0, of which this rank has \[1, 3\]. Mend `cuts`"),
        Recorder(tmp_path / "other", model, cuts={"0": [Slice(1, 2, 4)]}),
    ):
        model(torch.zeros(1, 3))


def test_tensors_of_one_side_are_reported(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3)
    for name, hidden in (("one", None), ("other", "1")):
        with Recorder(
            tmp_path / name, model, optimizer, names=lambda each, hidden=hidden: None if each == hidden else each
        ) as recorder:
            model(x).sum().backward()
            recorder.gradients()
            optimizer.zero_grad()
    found = compared(tmp_path / "other", tmp_path / "one")
    assert found.ok
    (finding,) = [each for each in found.findings if each.rule == "not-compared"]
    assert "of the reference (1, activation gradient 1)" in finding.what
    with Recorder(tmp_path / "nothing", model, names=lambda each: None) as recorder:
        recorder.scalar("loss", model(x).mean())
    (finding, *_) = compared(tmp_path / "nothing", tmp_path / "nothing").findings
    assert (finding.rule, finding.severity) == ("nothing-compared", "error")
    lines = (tmp_path / "other" / "rank-0.jsonl").read_text().splitlines()
    (tmp_path / "other" / "rank-0.jsonl").write_text(
        "\n".join(line for line in lines if '"gradient","0.bias"' not in line) + "\n"
    )
    first = compared(tmp_path / "other", tmp_path / "one").report["first_divergence"]
    assert (first["tensor"], first["problem"], first["class"]) == ("0.bias", "missing", "missing")


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((1, 1, 1, 1), "None"),
        ((1, 1, 1, 0), "of the squares of b.*.w only those that rank 0 holds are counted"),
        ((1, 1, 0, 0), "the squares of b.*.w are not counted"),
        ((2, 1, 1, 1), "the squares of a are counted twice"),
        ((1, 3, 1, 1), "the squares of c are counted 3 times"),
        ((0.5, 0.5, 0.5, 0.5), "the squares of all parameters are counted 1/2 times"),
        ((1.37, 1, 1, 1), "None"),
    ],
)
def test_what_a_norm_counts_is_found_by_squares(counts, words):
    """Both ranks hold parameter a, rank 1 holds c, and each has a part of b of two layers."""
    first, second = ((0, 1),), ((1, 2),)
    parts = {
        "a": [(0, ((0, 2),), 2.17), (1, ((0, 2),), 2.17)],
        "c": [(1, ((0, 2),), 3.31)],
        "b.0.w": [(0, first, 0.29), (1, second, 0.13)],
        "b.1.w": [(0, first, 0.41), (1, second, 0.19)],
    }
    known = Squares({"a": 2.17, "c": 3.31, "b.0.w": 0.29 + 0.13, "b.1.w": 0.41 + 0.19}, parts)
    squares = (2.17, 3.31, 0.29 + 0.41, 0.13 + 0.19)
    found = math.sqrt(np.dot(counts, squares))
    reported = explained_by_squares(math.sqrt(sum(squares)), found, known, Suspects.by_name(known))
    assert words == "None" if reported is None else reported[1] == words
