"""The ledger writer hears torch tensors and keeps digests under layout-free names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shardproof.core.base.digest import add, digest
from shardproof.verify.ledger.ledger import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GRADIENT,
    OPTIMIZER,
    WEIGHT,
    Key,
    LedgerWriter,
    RunLedger,
)
from shardproof.verify.ledger.stored import store_values


@dataclass(frozen=True)
class Samples:
    first_sample: int
    tokens: torch.Tensor
    step: int | None = 0
    lengths: None = None


def test_each_sample_of_a_microbatch_is_a_tensor_of_its_own() -> None:
    hidden = torch.randn(2, 3, 4)
    writer = LedgerWriter(0, {})
    writer.begin_step(5)
    writer.activation("layers.0.mlp", Samples(6, torch.zeros(2, 3)), (slice(0, 3),), hidden)
    assert [key for key, _ in writer.finish().entries] == [
        Key(5, ACTIVATION, "layers.0.mlp", 6),
        Key(5, ACTIVATION, "layers.0.mlp", 7),
    ]
    assert writer.finish().entries[1][1].digest == digest(hidden[1].numpy())


def test_the_gradient_of_an_activation_is_seen_when_backward_reaches_it() -> None:
    leaf = torch.randn(1, 2, requires_grad=True)
    writer = LedgerWriter(0, {})
    hidden = leaf * 3
    writer.activation("layers.0.mlp", Samples(0, torch.zeros(1, 2)), (slice(0, 2),), hidden)
    (hidden * 2).sum().backward()
    key, piece = writer.finish().entries[-1]
    assert key == Key(0, ACTIVATION_GRADIENT, "layers.0.mlp", 0)
    assert piece.digest == digest(np.array([2.0, 2.0], dtype=np.float32))


def test_tokens_that_three_ranks_hold_assemble_to_the_digest_of_the_sample() -> None:
    hidden, pieces = torch.randn(2, 7, 4), []
    for rank, (lo, hi) in enumerate([(0, 4), (4, 6), (6, 7)]):
        writer = LedgerWriter(rank, {})
        writer.activation("layers.0.mlp", Samples(0, torch.zeros(2, 7)), (slice(lo, hi),), hidden[:, lo:hi])
        pieces += [piece for key, piece in writer.finish().entries if key.sample == 1]
    assert [piece.region for piece in pieces] == [((0, 4), (0, 4)), ((4, 6), (0, 4)), ((6, 7), (0, 4))]
    assert add(piece.digest for piece in pieces) == digest(hidden[1].numpy())


def test_shards_of_three_ranks_assemble_to_the_digest_of_the_full_tensor() -> None:
    full = torch.randn(7, 5)
    writers = [LedgerWriter(rank, {"w": (7, 5)}) for rank in range(3)]
    for writer, (lo, hi) in zip(writers, ((0, 3), (3, 5), (5, 7)), strict=True):
        writer.weight("w", (slice(lo, hi), slice(None)), full[lo:hi])
    run = RunLedger.merge(writer.finish() for writer in writers)
    assert add(piece.digest for piece in run.pieces[Key(0, WEIGHT, "w")]) == digest(full.numpy())


def test_only_captured_tensors_leave_a_file(tmp_path: Path) -> None:
    writer = LedgerWriter(2, {"w": (4,), "v": (4,)}, frozenset({Key(0, GRADIENT, "w")}), tmp_path)
    writer.gradient("w", (slice(1, 3),), torch.tensor([1.0, 2.0]))
    writer.gradient("v", (slice(0, 4),), torch.ones(4))
    assert len(list(tmp_path.iterdir())) == 1
    assert writer.finish().entries[0][1].load().tolist() == [1.0, 2.0]


def test_both_moments_are_tensors_and_scalars_keep_their_value() -> None:
    writer = LedgerWriter(0, {"w": (2,)})
    writer.scalar("loss", 1.25)
    writer.optimizer_state("w", (slice(0, 2),), {"exp_avg": torch.ones(2), "exp_avg_sq": torch.zeros(2)})
    run = RunLedger.merge([writer.finish()])
    assert run.scalars("loss") == [1.25]
    assert [key.tensor for key in run.pieces if key.phase == OPTIMIZER] == ["w.exp_avg", "w.exp_avg_sq"]


def test_tensors_kept_in_one_file_are_distinguished(tmp_path: Path) -> None:
    first, second, number = (
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.ones(0, np.float32),
        np.asarray(2.5, np.float32),
    )
    retained = [store_values(tmp_path / "values", each) for each in (first, second, number)]
    for each, values in zip(retained, (first, second, number), strict=True):
        assert each.load().shape == values.shape and np.array_equal(each.load(), values)
