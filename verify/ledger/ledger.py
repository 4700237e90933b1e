"""The ledger: what one run computed, as summaries under names that no layout changes. numpy only.

Each rank keeps a `LedgerWriter`, which the trainer calls as its observer, and hands back a `RankLedger` of small
numbers, or writes them to a file as they come (`ledger_file`). Values themselves are kept only when asked for
(`capture`), in one file per rank (`stored`) in a folder that the caller owns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...core.base.digest import Digest, Region, digest, full_region
from .stored import StoredValues, store_values
from .summary import NUM_SUMS, Summary, summarize

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATION = "activation"
ACTIVATION_GRADIENT = "activation gradient"
HELD_OUT = "held-out activation"
"""Of a held-out batch, seen after the step (`NO_STEP`: before the first) that its key names."""
GRADIENT = "gradient"
OPTIMIZER = "optimizer state"
WEIGHT = "weight"
RECOMPUTED = "recomputed activation"
"""What a backward has computed again: of an activation that a rank has shown, or of a tensor of its own
that it shows forward, too."""
BROUGHT = "weight to gather"
GATHERED = "gathered weight"
"""What ranks bring to an UNSHARD of a step, and what each has got."""
SCALAR = "scalar"


SQUARE = "square of gradient"
"""The kind of a ledger's entries in which each rank gives the squared norm of its part of a gradient, in
the largest magnitude."""

NO_STEP = -1


class Key(NamedTuple):
    """One canonical tensor of one step. `sample` is the global index of a sequence in the step's
    batch, for activations."""

    step: int
    phase: str
    tensor: str
    sample: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a tensor that one rank saw: its region of `shape`, its summary, and its values where they were kept.

    `stored` is where the values lie, or the value itself for a scalar.
    """

    global_rank: int
    shape: tuple[int, ...]
    region: Region
    summary: Summary
    stored: StoredValues | float | None = None

    @property
    def digest(self) -> Digest:
        """What is equal exactly when all bits are."""
        return self.summary.digest

    def load(self) -> np.ndarray:
        """The values, in the shape of the region. Only for scalars and captured tensors."""
        assert self.stored is not None, "the values of this piece were not captured"
        return (
            self.stored.load() if isinstance(self.stored, StoredValues) else np.asarray(self.stored, dtype=np.float64)
        )


@dataclass(frozen=True)
class RankLedger:
    """Everything one rank saw, in the order it saw it."""

    entries: tuple[tuple[Key, Piece], ...]


@dataclass(frozen=True)
class RunLedger:
    """All ranks' pieces of every tensor. Keys stand in the order in which the lowest rank that has them saw them."""

    pieces: Mapping[Key, tuple[Piece, ...]]

    @classmethod
    def merge(cls, ranks: Iterable[RankLedger]) -> RunLedger:
        """One ledger from the ledgers of all ranks, lowest rank first."""
        pieces: dict[Key, list[Piece]] = {}
        for ledger in ranks:
            for key, piece in ledger.entries:
                pieces.setdefault(key, []).append(piece)
        return cls({key: tuple(found) for key, found in pieces.items()})

    def as_far_as(self, resumed: RunLedger) -> RunLedger:
        """What a run that goes on from a checkpoint can have of this ledger: the state that it begins with, and what
        came after that; all of it where the other run is not such a one."""
        first = min((key.step for key in resumed.pieces), default=NO_STEP)
        computed = (ACTIVATION, ACTIVATION_GRADIENT, GRADIENT)
        if first == NO_STEP or any(key.step == first and key.phase in computed for key in resumed.pieces):
            return self

        def is_due(key: Key) -> bool:
            return key.step > first or (
                key.step == first and (key.phase in (OPTIMIZER, WEIGHT) or key in resumed.pieces)
            )

        return RunLedger({key: pieces for key, pieces in self.pieces.items() if is_due(key)})

    def scalars(self, name: str) -> list[float]:
        """One value per step, as the lowest rank saw it."""
        return [
            float(found[0].load()) for key, found in self.pieces.items() if key.phase == SCALAR and key.tensor == name
        ]


@dataclass
class LedgerWriter:
    """The observer of one rank (the protocol of `backend.base.observe`). Tensors come as torch tensors; only
    their numpy view is used.

    `shapes` maps each parameter to its full shape. `capture` names the tensors whose values are written into `folder`.
    Sequences are `cp` times as long as what a microbatch has of them (context parallelism).
    """

    global_rank: int
    shapes: Mapping[str, tuple[int, ...]]
    capture: frozenset[Key] = frozenset()
    folder: Path | None = None
    cp: int = 1
    entries: list[tuple[Key, Piece]] = field(default_factory=list)
    step: int = 0

    def begin_step(self, step: int) -> None:
        """All that follows belongs to `step`."""
        self.step = step

    def activation(self, name: str, microbatch: Any, tokens: Sequence[slice], tensor: Any) -> None:
        """A tensor [samples, tokens, ...] of one microbatch, and, once backward reaches it, its gradient."""
        self._samples(HELD_OUT if microbatch.step is None else ACTIVATION, name, microbatch, tokens, tensor)
        if tensor.requires_grad:
            tensor.register_hook(
                lambda gradient: self._samples(ACTIVATION_GRADIENT, name, microbatch, tokens, gradient)
            )

    def gradient(self, name: str, slices: Sequence[slice], tensor: Tensor) -> None:
        """The reduced gradient of a parameter's shard."""
        self._shard(GRADIENT, name, self.shapes[name], slices, tensor)

    def optimizer_state(self, name: str, slices: Sequence[slice], moments: Mapping[str, Any]) -> None:
        """The moments of a parameter's shard by their names."""
        for moment, values in moments.items():
            self._shard(OPTIMIZER, f"{name}.{moment}", self.shapes[name], slices, values)

    def weight(self, name: str, slices: Sequence[slice], tensor: Tensor, *, step: int | None = None) -> None:
        """A parameter's shard after the optimizer step; with `step` after that one, which has begun before the last."""
        self._shard(WEIGHT, name, self.shapes[name], slices, tensor, step)

    def recomputed(self, name: str, microbatch: Any, tokens: Sequence[slice] | None, tensor: Tensor) -> None:
        """What a backward has computed again, with its gradient once backward reaches it; without `tokens` a tensor of
        this rank alone, under the microbatch's first sample."""
        if tokens is None:
            values = _values(tensor)
            self._enter(
                Key(self.step, RECOMPUTED, name, microbatch.first_sample),
                values,
                values.shape,
                full_region(values.shape),
            )
            return
        self._samples(RECOMPUTED, name, microbatch, tokens, tensor)
        if tensor.requires_grad:
            tensor.register_hook(
                lambda gradient: self._samples(ACTIVATION_GRADIENT, name, microbatch, tokens, gradient)
            )

    def brought(self, name: str, slices: Sequence[slice], tensor: Tensor) -> None:
        """What this rank brings to UNSHARD of a parameter."""
        self._shard(BROUGHT, name, self.shapes[name], slices, tensor)

    def gathered(self, name: str, slices: Sequence[slice], tensor: Tensor) -> None:
        """A parameter's shard as UNSHARD has brought it together."""
        self._shard(GATHERED, name, self.shapes[name], slices, tensor)

    def scalar(self, name: str, value: float) -> None:
        """A number that every rank knows, such as the loss."""
        value = float(value)
        self.keep(Key(self.step, SCALAR, name), Piece(self.global_rank, (), (), summary_of_scalar(value), value))

    def finish(self) -> RankLedger:
        """What was seen so far."""
        return RankLedger(tuple(self.entries))

    def _samples(self, phase: str, name: str, microbatch: Any, tokens: Sequence[slice], tensor: Any) -> None:
        if microbatch.lengths is not None:
            self._padded(phase, name, microbatch, tokens, tensor)
            return
        values = _values(tensor)
        rest = full_region(values.shape[2:])
        shape = (self.cp * microbatch.tokens.shape[1], *values.shape[2:])
        for sample, of_sample in enumerate(values, start=microbatch.first_sample):
            key, first = Key(self.step, phase, name, sample), 0
            for run in tokens:
                last = first + run.stop - run.start
                self._enter(key, of_sample[first:last], shape, ((run.start, run.stop), *rest))
                first = last

    def _padded(self, phase: str, name: str, microbatch: Any, tokens: Sequence[slice], tensor: Any) -> None:
        """Of padded documents only their own tokens: what follows them changes nothing, and may be left out."""
        for offset, (values, length) in enumerate(zip(_values(tensor), microbatch.lengths, strict=True)):
            key, first = Key(self.step, phase, name, microbatch.first_sample + offset), 0
            for run in tokens:
                lo, hi = run.start, min(run.stop, length)
                if lo < hi:
                    part = values[first : first + hi - lo]
                    self._enter(key, part, (length, *values.shape[1:]), ((lo, hi), *full_region(values.shape[1:])))
                first += run.stop - run.start

    def _shard(
        self,
        phase: str,
        name: str,
        shape: tuple[int, ...],
        slices: Sequence[slice],
        tensor: Tensor,
        step: int | None = None,
    ) -> None:
        region = tuple(piece.indices(size)[:2] for piece, size in zip(slices, shape, strict=True))
        self._enter(Key(self.step if step is None else step, phase, name), _values(tensor), shape, region)

    def _enter(self, key: Key, values: np.ndarray, shape: tuple[int, ...], region: Region) -> None:
        stored = None
        if self.capture and key in self.capture:
            assert self.folder is not None
            stored = store_values(self.folder / f"{self.global_rank}.values", values)
        self.keep(key, Piece(self.global_rank, shape, region, summarize(values, shape, region), stored))

    def keep(self, key: Key, piece: Piece) -> None:
        """Takes one entry into the ledger."""
        self.entries.append((key, piece))


def summary_of_scalar(value: float) -> Summary:
    """Of a number in fp64, every bit of which counts; its place is known."""
    lanes = digest(np.asarray(value))
    return Summary(lanes, lanes[0], abs(value), (value,) * NUM_SUMS)


def _values(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().float().numpy()  # bf16, which numpy lacks, is exact in fp32
