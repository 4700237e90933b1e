"""What a run has twice is compared with itself: weights that were gathered, and activations
that were computed again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import parameters
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, ScheduleChoice
from shardproof.verify.ledger.compare import action_of, compare
from shardproof.verify.ledger.duplicates import as_two_runs
from shardproof.verify.ledger.ledger import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GATHERED,
    GRADIENT,
    RECOMPUTED,
    WEIGHT,
    Key,
    LedgerWriter,
    RunLedger,
)

MODEL = ModelSpec("tiny", 2, 4, 8, 2, 2, 2, 16, 8)
SHAPES = {parameter.name: parameter.shape for parameter in parameters(MODEL)}
NORM, DOWN = "layers.1.mlp.norm.weight", "layers.1.mlp.down.weight"
HALVES = (slice(0, 2), slice(2, 4))


class Samples:
    first_sample, tokens, step, lengths = 0, torch.zeros(1, 3), 0, None


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def gathering(
    stale: int | None = None, step: int = 1, capture: frozenset[Key] = frozenset(), folder: Path | None = None
) -> RunLedger:
    """Two copies that bring halves of a norm's weight together; `stale` gets the other's half of a step before."""
    writers = [LedgerWriter(rank, SHAPES, capture, folder, step=step) for rank in range(2)]
    for rank, writer in enumerate(writers):
        writer.brought(NORM, (HALVES[rank],), values(step, 4)[HALVES[rank]])
        whole = values(step, 4)
        if rank == stale:
            whole[HALVES[1 - rank]] = values(step - 1, 4)[HALVES[1 - rank]]
        writer.gathered(NORM, (slice(0, 4),), whole)
    return RunLedger.merge(writer.finish() for writer in writers)


def computing(again: dict[str, torch.Tensor], order: tuple[str, ...] = ("layers.0", "layers.1")) -> RunLedger:
    """A rank of its own heads and one that has others, each with an activation of every layer, forward and again."""
    writers = [LedgerWriter(rank, SHAPES) for rank in range(2)]
    for rank, writer in enumerate(writers):
        for layer in order:
            writer.activation(f"{layer}.mlp", Samples(), (slice(0, 3),), values(7, 1, 3, 4))
            writer.recomputed(f"{layer}.attention.core", Samples(), None, values(rank, 1, 2, 3, 2))
            writer.activation(f"{layer}.output", Samples(), (slice(0, 3),), values(8, 1, 3, 4))
        for layer in reversed(order):
            core, mlp = again.get(f"{layer}.attention.core"), again.get(f"{layer}.mlp")
            spoils = rank == 1
            writer.recomputed(
                f"{layer}.attention.core",
                Samples(),
                None,
                core if spoils and core is not None else values(rank, 1, 2, 3, 2),
            )
            writer.recomputed(
                f"{layer}.mlp", Samples(), (slice(0, 3),), mlp if spoils and mlp is not None else values(7, 1, 3, 4)
            )
    return RunLedger.merge(writer.finish() for writer in writers)


def test_gathered_weights_are_what_was_brought() -> None:
    assert compare(RunLedger({}), gathering(), SHAPES) == []
    (found,) = compare(RunLedger({}), gathering(stale=0), SHAPES)
    assert (found.key, found.problem, found.global_ranks) == (Key(1, GATHERED, NORM), "differs", (0,))


def test_a_gather_is_no_activation_and_comes_before_all_that_uses_it() -> None:
    wrong, later = gathering(stale=0), Key(1, GRADIENT, DOWN)
    reference = RunLedger({later: gathering().pieces[Key(1, GATHERED, NORM)]})
    assert [each.key.phase for each in compare(reference, wrong, SHAPES)] == [GATHERED, GRADIENT]
    plan = Plan(
        MODEL,
        cluster_preset("this-host", 2),
        Layout(dp=2, zero=3),
        Batch(2, 1, 3),
        schedule=ScheduleChoice(max_active_stages=1),
    )
    assert str(action_of(plan, Key(1, GATHERED, NORM), 0)) == "0UNSHARD"
    assert str(action_of(plan, Key(1, RECOMPUTED, "layers.1.mlp", 1), 1)) == "0B0"


def test_a_reference_that_has_gathered_is_one_like_any_other() -> None:
    assert compare(gathering(), RunLedger({}), SHAPES) == []
    assert (
        compare(
            computing({}), RunLedger({k: v for k, v in computing({}).pieces.items() if k.phase != RECOMPUTED}), SHAPES
        )
        == []
    )


def test_what_a_rank_computes_again_is_what_it_was() -> None:
    clean = computing({})
    assert compare(clean, clean, SHAPES) == []
    (found,) = compare(clean, computing({"layers.0.attention.core": values(5, 1, 2, 3, 2)}), SHAPES)
    assert (found.key, found.global_ranks) == (Key(0, RECOMPUTED, "layers.0.attention.core", 0), (1,))
    (found,) = compare(clean, computing({"layers.1.mlp": values(5, 1, 3, 4)}), SHAPES)
    assert (found.key, found.global_ranks) == (Key(0, RECOMPUTED, "layers.1.mlp", 0), (1,))


def test_recomputation_comes_before_gradients_and_the_last_layer_first() -> None:
    spoiled = {name: values(5, 1, 3, 4) for name in ("layers.0.mlp", "layers.1.mlp")}
    spoiled["layers.1.attention.core"] = values(6, 1, 2, 3, 2)
    clean, wrong = computing({}), computing(spoiled)
    gradient = Key(0, ACTIVATION_GRADIENT, "layers.1.mlp", 0)
    reference = RunLedger({**clean.pieces, gradient: clean.pieces[Key(0, ACTIVATION, "layers.1.mlp", 0)]})
    wrong = RunLedger({**wrong.pieces, gradient: wrong.pieces[Key(0, ACTIVATION, "layers.1.output", 0)]})
    names = [(each.key.phase, each.key.tensor) for each in compare(reference, wrong, SHAPES)]
    assert names == [
        (RECOMPUTED, "layers.1.mlp"),
        (RECOMPUTED, "layers.1.attention.core"),
        (RECOMPUTED, "layers.0.mlp"),
        (ACTIVATION_GRADIENT, "layers.1.mlp"),
    ]


def test_gathered_weights_are_judged_by_those_of_one_device_in_the_format_of_layers(tmp_path: Path) -> None:
    key, captured = Key(1, GATHERED, NORM), frozenset(Key(step, WEIGHT, NORM) for step in (-1, 0))
    one = LedgerWriter(0, SHAPES, captured, tmp_path)
    for step in (-1, 0):
        one.begin_step(step)
        one.weight(NORM, (slice(0, 4),), values(step + 1, 4))
    right, _ = as_two_runs(key, RunLedger.merge([one.finish()]), gathering(stale=0), 0, dtype="bf16", folder=tmp_path)
    now, before = (right.pieces[key._replace(step=step)][0].load() for step in (1, 0))
    assert np.array_equal(now, values(1, 4).bfloat16().float().numpy())
    assert np.array_equal(before, values(0, 4).bfloat16().float().numpy())
