"""What a run has twice and must have equal: weights before UNSHARD has gathered them and after, activations
forward and computed again.

No other run is needed to compare these. A layout alone says which of them there are, so a reference need not have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...core.base.digest import Region
from .ledger import ACTIVATION, BROUGHT, GATHERED, NO_STEP, RECOMPUTED, WEIGHT, Key, Piece, RunLedger
from .relations import in_bf16
from .stored import store_values
from .summary import summarize

PHASES = frozenset({BROUGHT, GATHERED, RECOMPUTED})


def duplicates(run: RunLedger) -> Iterator[tuple[Key, Sequence[Piece], Sequence[Piece]]]:
    """What has to be equal, with its name: the first and the second, as pieces of one tensor. Recomputed
    ones come rank by rank."""
    for key, pieces in run.pieces.items():
        if key.phase == GATHERED:
            yield key, run.pieces.get(key._replace(phase=BROUGHT), ()), pieces
        elif key.phase == RECOMPUTED:
            yield key, firsts(run, key), pieces


def firsts(run: RunLedger, key: Key) -> list[Piece]:
    """What ranks had forward of what they computed again: one piece for each that they have of it."""
    found: dict[tuple[int, Region], Piece] = {}
    for each in (*run.pieces.get(key._replace(phase=ACTIVATION), ()), *run.pieces[key]):
        found.setdefault((each.global_rank, each.region), each)
    regions = {each.region for each in run.pieces[key]}  # an activation of this name may be a part of another tensor
    return [each for each in found.values() if each.region in regions]


def is_of_all(forward: Sequence[Piece], again: Sequence[Piece]) -> bool:
    """Whether what was computed again is a part of a tensor that a reference has, and no tensor of a rank's own."""
    return bool(forward) and forward[0].shape == again[0].shape


def sources_of(key: Key) -> list[Key]:
    """The tensors of a reference that show what is right of one that a run has twice, the nearest first."""
    if key.phase == GATHERED:
        return [Key(step, WEIGHT, key.tensor) for step in range(key.step - 1, NO_STEP - 1, -1)]
    return [key._replace(phase=ACTIVATION)] if key.phase == RECOMPUTED else []


def as_two_runs(
    key: Key, right: RunLedger, wrong: RunLedger, rank: int, *, dtype: str, folder: Path
) -> tuple[RunLedger, RunLedger]:
    """Two ledgers of captured values in which a tensor that `wrong` has twice stands as one that two runs have: `right`
    has what it should be, among other steps and samples of it, in `wrong` is what it became. Of a rank's own tensors
    these are of `rank`. Values in `dtype` are written into `folder`."""
    if key.phase == GATHERED:
        return _with(right, _weights_before(key, right, dtype, folder)), wrong
    if key.phase != RECOMPUTED:
        return right, wrong
    forward = right.pieces.get(key._replace(phase=ACTIVATION), ())
    if is_of_all(forward, wrong.pieces[key]) and forward[0].stored is not None:
        same = {
            each: pieces
            for each, pieces in right.pieces.items()
            if (each.phase, each.tensor) == (ACTIVATION, key.tensor)
        }
        return _with(right, {each._replace(phase=RECOMPUTED): pieces for each, pieces in same.items()}), wrong
    first = next(each for each in firsts(wrong, key) if each.global_rank == rank)
    again = [
        each
        for each in wrong.pieces[key]
        if (each.global_rank, each.region) == (rank, first.region) and each is not first
    ]
    return _with(right, {key: (first,)}), _with(wrong, {key: tuple(again)})


def _with(run: RunLedger, more: Mapping[Key, Sequence[Piece]]) -> RunLedger:
    return RunLedger({**run.pieces, **{key: tuple(pieces) for key, pieces in more.items()}})


def _weights_before(key: Key, right: RunLedger, dtype: str, folder: Path) -> dict[Key, Sequence[Piece]]:
    """The weights of one device after each step before, as layers have them one step later."""
    found: dict[Key, Sequence[Piece]] = {}
    for source in sources_of(key):
        if source in right.pieces and (piece := right.pieces[source][0]).stored is not None:
            values = _in(piece.load(), dtype)
            stored = store_values(folder / "gathered.values", values)
            found[key._replace(step=source.step + 1)] = [
                replace(piece, summary=summarize(values, piece.shape, piece.region), stored=stored)
            ]
    return found


def _in(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bf16":
        return in_bf16(values).astype(np.float32)
    return values.astype(np.float16).astype(np.float32) if dtype == "fp16" else values
