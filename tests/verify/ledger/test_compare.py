"""Differences come in dataflow order, with the ranks that hold them and how the values relate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import parameters
from shardproof.verify.causes.first_cause import explain
from shardproof.verify.ledger.compare import _covers, compare
from shardproof.verify.ledger.ledger import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GRADIENT,
    OPTIMIZER,
    SCALAR,
    WEIGHT,
    Key,
    LedgerWriter,
    RunLedger,
)

MODEL = ModelSpec("tiny", 2, 4, 8, 2, 2, 2, 16, 8)
SHAPES = {parameter.name: parameter.shape for parameter in parameters(MODEL)}
BLOCKS = ("embedding", "layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp", "head")
DOWN = "layers.1.mlp.down.weight"


class Samples:
    first_sample, tokens, step, lengths = 0, torch.zeros(1, 3), 0, None


def full(name: str) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(len(name)).normal(size=SHAPES[name]).astype(np.float32))


def write(
    writer: LedgerWriter,
    tp_rank: int,
    tp: int,
    spoil: Callable[[Key, torch.Tensor], torch.Tensor] = lambda key, tensor: tensor,
) -> None:
    """What a trainer would report in one step; `spoil` changes tensors on the way."""
    for block in BLOCKS:
        writer.activation(block, Samples(), (slice(0, 3),), spoil(Key(0, ACTIVATION, block, 0), torch.ones(1, 3, 4)))
    for block in reversed(BLOCKS):
        gradient = spoil(Key(0, ACTIVATION_GRADIENT, block, 0), torch.ones(1, 3, 4))
        writer._samples(ACTIVATION_GRADIENT, block, Samples(), (slice(0, 3),), gradient)
    writer.scalar("loss", float(spoil(Key(0, SCALAR, "loss"), torch.tensor(2.0))))
    writer.scalar("grad_norm", float(spoil(Key(0, SCALAR, "grad_norm"), torch.tensor(3.0))))
    for parameter in parameters(MODEL):
        slices = [slice(0, size) for size in parameter.shape]
        if parameter.cut is not None:
            dim = parameter.cut[0]
            length = parameter.shape[dim] // tp
            slices[dim] = slice(tp_rank * length, (tp_rank + 1) * length)
        shard = full(parameter.name)[tuple(slices)]
        writer.gradient(parameter.name, slices, spoil(Key(0, GRADIENT, parameter.name), shard))
        moments = {"exp_avg": spoil(Key(0, OPTIMIZER, parameter.name), shard), "exp_avg_sq": shard}
        writer.optimizer_state(parameter.name, slices, moments)
        writer.weight(parameter.name, slices, spoil(Key(0, WEIGHT, parameter.name), shard))


def run_with(
    spoiled: dict[int, dict[Key, Callable[[torch.Tensor], torch.Tensor]]],
    tmp_path: Path | None = None,
    tp: int = 2,
    replicas: int = 1,
) -> RunLedger:
    writers = []
    for rank in range(tp * replicas):
        faults = spoiled.get(rank, {})
        captured = (
            frozenset(key for rank_faults in spoiled.values() for key in rank_faults) if tmp_path else frozenset()
        )
        writer = LedgerWriter(rank, SHAPES, captured, tmp_path)
        write(
            writer, rank % tp, tp, lambda key, tensor, faults=faults: faults[key](tensor) if key in faults else tensor
        )
        writers.append(writer)
    return RunLedger.merge(writer.finish() for writer in writers)


def reference(capture: frozenset[Key] = frozenset(), tmp_path: Path | None = None) -> RunLedger:
    if tmp_path is not None:
        tmp_path.mkdir()
    writer = LedgerWriter(0, SHAPES, capture, tmp_path)
    write(writer, 0, 1)
    return RunLedger.merge([writer.finish()])


def test_two_replicas_of_two_shards_equal_one_device() -> None:
    assert compare(reference(), run_with({}, replicas=2), SHAPES) == []


def test_differences_come_forward_loss_backward_norm_optimizer_weights() -> None:
    keys = [
        Key(0, ACTIVATION, "layers.0.mlp", 0),
        Key(0, ACTIVATION, "head", 0),
        Key(0, SCALAR, "loss"),
        Key(0, ACTIVATION_GRADIENT, "layers.1.mlp", 0),
        Key(0, ACTIVATION_GRADIENT, "layers.1.attention", 0),
        Key(0, GRADIENT, DOWN),
        Key(0, GRADIENT, "layers.1.mlp.norm.weight"),
        Key(0, GRADIENT, "layers.0.mlp.up.weight"),
        Key(0, SCALAR, "grad_norm"),
        Key(0, WEIGHT, "embedding.tokens.weight"),
        Key(0, WEIGHT, DOWN),
    ]
    spoiled = {key: lambda tensor: tensor + 1 for key in keys}
    found = compare(reference(), run_with({0: spoiled}), SHAPES)
    assert [difference.key for difference in found] == keys


def test_a_replica_that_differs_is_named_among_six_ranks(tmp_path: Path) -> None:
    key = Key(0, GRADIENT, DOWN)
    run = run_with({3: {key: lambda tensor: tensor * 2}}, tmp_path, replicas=3)
    (found,) = compare(reference(), run, SHAPES)
    found = explain(found, reference(frozenset({key}), tmp_path / "reference"), run)
    assert found.global_ranks == (3,)
    assert found.values is not None and found.values.elements_different == found.values.num_elements == 16
    assert found.values.index == (0, 4), "the index is that of the full tensor"


def test_one_replicated_activation_names_its_rank_at_once() -> None:
    run = run_with({1: {Key(0, ACTIVATION, "layers.0.mlp", 0): lambda tensor: tensor + 1}}, tp=2)
    (found,) = compare(reference(), run, SHAPES)
    assert found.global_ranks == (1,)


def test_a_tensor_that_no_rank_recorded_is_missing_and_one_too_many_is_extra() -> None:
    complete = reference()
    key = Key(0, WEIGHT, DOWN)
    without = RunLedger({k: v for k, v in complete.pieces.items() if k != key})
    assert [(d.key, d.problem) for d in compare(complete, without, SHAPES)] == [(key, "missing")]
    assert [(d.key, d.problem) for d in compare(without, complete, SHAPES)] == [(key, "extra")]


def test_a_shard_that_no_rank_holds_leaves_the_tensor_incomplete() -> None:
    complete = run_with({})
    key = Key(0, WEIGHT, DOWN)
    torn = RunLedger({**complete.pieces, key: complete.pieces[key][:1]})
    assert [(d.key, d.problem) for d in compare(reference(), torn, SHAPES)] == [(key, "incomplete")]


def test_a_second_run_with_the_right_bits_leaves_no_rank_to_blame(tmp_path: Path) -> None:
    key = Key(0, GRADIENT, DOWN)
    (found,) = compare(reference(), run_with({1: {key: lambda tensor: -tensor}}), SHAPES)
    assert (
        explain(
            found, reference(frozenset({key}), tmp_path / "reference"), run_with({0: {key: lambda t: t}}, tmp_path)
        ).global_ranks
        == ()
    )


def test_ranks_that_hold_copies_of_a_tensor_may_cut_it_otherwise_among_their_copies():
    thirds, halves = [((0, 4),), ((4, 8),), ((8, 12),)], [((0, 6),), ((6, 12),)]
    assert sorted(map(sorted, _covers(sorted(thirds + halves)))) == [sorted(thirds), sorted(halves)]
    shared = [((0, 3),), ((3, 8),), ((8, 12),)]
    assert all(sum(hi - lo for ((lo, hi),) in cover) == 12 for cover in _covers(sorted({*thirds, *shared})))
    assert _covers([((0, 4),), ((5, 12),)]) == [[((0, 4),), ((5, 12),)]]
