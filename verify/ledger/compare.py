"""Compares the ledgers of two runs, of one device and a sharded one or of any two layouts, in dataflow order.

Digests decide *whether* tensors differ, and on which ranks; `relations` says how.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from ...core.base.digest import Digest, Region, add, region_size, regions_overlap
from ...core.plan.plan import AnyPlan, Plan
from ...core.plan.schedule_of import schedule_for
from ...core.schedule.action import Action, Kind
from .duplicates import PHASES, duplicates
from .ledger import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GATHERED,
    GRADIENT,
    HELD_OUT,
    NO_STEP,
    OPTIMIZER,
    RECOMPUTED,
    SCALAR,
    Key,
    Piece,
    RunLedger,
)
from .relations import Class, Relation
from .summary import Summary, add_summaries

Problem = Literal["differs", "missing", "extra", "incomplete", "unclear"]
"""`missing`: no rank has the tensor, `extra`: the reference has not, `incomplete`: the ranks' pieces are not the whole
tensor once, `unclear`: those of the reference are not, or its own copies differ, on the ranks that are named."""


@dataclass(frozen=True)
class Values:
    """How captured values differ. Counts are over the pieces of all ranks named in the difference."""

    elements_different: int
    num_elements: int
    bits_different: int
    index: tuple[int, ...]
    expected: float
    found: float


@dataclass(frozen=True)
class Difference:
    """One tensor that is not what one device computes. `global_ranks` hold it wrongly; before values are looked
    at they may be suspects.

    `relation` says how it differs, as far as that was asked: of the first difference only.
    """

    key: Key
    problem: Problem
    global_ranks: tuple[int, ...]
    values: Values | None = None
    relation: Relation | None = None

    @property
    def kind(self) -> Class:
        """The kind of difference, for machines."""
        if self.relation is not None:
            return self.relation.kind
        if self.problem == "differs":
            return "other values" if self.global_ranks else "run-dependent"
        return "missing" if self.problem in ("missing", "incomplete") else "other values"


def compare(reference: RunLedger, run: RunLedger, names: Iterable[str] | None) -> list[Difference]:
    """Every tensor of which any rank's piece differs from the reference, in dataflow order: the first is
    the nearest to the cause.

    Pieces of equal region on several ranks are replicas, and each is compared; pieces of different regions are
    assembled, on both sides. What a run has twice (`duplicates`) is compared with itself. `names` are those of what
    training changes, in canonical order; without them (another stack, whose names say nothing of the order)
    differences stand as the reference recorded their tensors.
    """
    found = []
    for key, expected in reference.pieces.items():
        if key.phase in PHASES:
            continue
        difference = _compare_tensor(key, expected, run.pieces.get(key, ()))
        if difference is not None:
            found.append(difference)
    extra = (key for key in run.pieces if key not in reference.pieces and key.phase not in PHASES)
    found += [Difference(key, "extra", ranks_of(run.pieces[key])) for key in extra]
    for key, first, second in duplicates(run):
        difference = (
            _compare_tensor(key, first, second) if key.phase == GATHERED else _compare_ranks(key, first, second)
        )
        found += [] if difference is None else [difference]
    return found if names is None else sorted(found, key=_position(reference, names, found))


def _compare_tensor(key: Key, expected: Sequence[Piece], pieces: Sequence[Piece]) -> Difference | None:
    if not pieces:
        return Difference(key, "missing", ())
    shape = expected[0].shape
    known, held = _by_region(expected), _by_region(pieces)
    if not _is_whole(expected, known, shape) or len({_digest_of(cover, known) for cover in _covers(sorted(known))}) > 1:
        return Difference(key, "unclear", ranks_of(expected))
    if unequal := _unequal(known):
        return Difference(key, "unclear", ranks_of(unequal))
    if not _is_whole(pieces, held, shape):
        return Difference(key, "incomplete", ranks_of(pieces))
    whole = _digest_of(_covers(sorted(known))[0], known)
    if torn := _unequal(held):  # a copy with which the others make up the right tensor is right
        suspects = [piece for piece in torn if whole_summary(pieces, piece).digest != whole]
    else:
        differ = [cover for cover in _covers(sorted(held)) if _digest_of(cover, held) != whole]
        suspects = [piece for cover in differ for region in cover for piece in held[region]]
    # a piece of which the reference has the same region is right or wrong for itself
    wrong = [piece for piece in suspects if piece.region not in known or known[piece.region][0].digest != piece.digest]
    return Difference(key, "differs", ranks_of(wrong)) if wrong else None


def _compare_ranks(key: Key, first: Sequence[Piece], second: Sequence[Piece]) -> Difference | None:
    """Tensors of which every rank has its own."""
    had = {(piece.global_rank, piece.region): piece.digest for piece in first}
    wrong = [piece for piece in second if had[piece.global_rank, piece.region] != piece.digest]
    return Difference(key, "differs", ranks_of(wrong)) if wrong else None


def _by_region(pieces: Sequence[Piece]) -> dict[Region, list[Piece]]:
    found: dict[Region, list[Piece]] = defaultdict(list)
    for piece in pieces:
        found[piece.region].append(piece)
    return found


def _is_whole(pieces: Sequence[Piece], by_region: Mapping[Region, list[Piece]], shape: tuple[int, ...]) -> bool:
    """Whether pieces make up tensors of a shape, each element once."""
    return all(piece.shape == shape for piece in pieces) and all(
        _partitions(cover, shape) for cover in _covers(sorted(by_region))
    )


def _unequal(by_region: Mapping[Region, list[Piece]]) -> list[Piece]:
    """The pieces of all regions of which two ranks have other bits."""
    return [piece for held in by_region.values() if len({piece.digest for piece in held}) > 1 for piece in held]


def _digest_of(cover: Sequence[Region], by_region: Mapping[Region, list[Piece]]) -> Digest:
    return add(by_region[region][0].digest for region in cover)


def whole_summary(pieces: Sequence[Piece], one: Piece | None = None) -> Summary:
    """The summary of a whole tensor from its pieces, of replicas the first; with `one` from a set of
    pieces that it is in."""
    by_region = _by_region(pieces) if one is None else {**_by_region(pieces), one.region: [one]}
    covers = _covers(sorted(by_region))
    cover = covers[0] if one is None else next(cover for cover in covers if one.region in cover)
    return add_summaries(by_region[region][0].summary for region in cover)


def _covers(regions: Sequence[Region]) -> list[list[Region]]:
    """Sets of regions that do not overlap, such that every region is in one: ranks that hold copies of a tensor may cut
    it otherwise among their copies (ZeRO). A set takes what no other has before what others have."""
    covers: list[list[Region]] = []
    left = list(regions)
    while left:
        cover: list[Region] = []
        for region in (*left, *regions):
            if not any(regions_overlap(region, other) for other in cover):
                cover.append(region)
        left = [region for region in left if region not in cover]
        covers.append(cover)
    return covers


def _partitions(regions: Sequence[Region], shape: tuple[int, ...]) -> bool:
    covered = sum(region_size(region) for region in regions) == math.prod(shape)
    return covered and not any(regions_overlap(a, b) for a, b in combinations(regions, 2))


def ranks_of(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """The ranks that hold some pieces, each once."""
    return tuple(sorted({piece.global_rank for piece in pieces}))


# Dataflow order


def _position(reference: RunLedger, names: Iterable[str], found: Sequence[Difference]) -> Callable[[Difference], tuple]:
    """A sort key: gathered weights, activations forward, loss, those computed again, their gradients backward,
    parameter gradients backward, norm, optimizer, weights."""
    parameter_position = {name: i for i, name in enumerate(names)}
    last = len(parameter_position)  # of a tensor that this model has not, in the ledger of another
    keys = [*reference.pieces, *(difference.key for difference in found)]
    activations = dict.fromkeys(key.tensor for key in keys if key.phase in (ACTIVATION, ACTIVATION_GRADIENT, HELD_OUT))
    forward = {name: i for i, name in enumerate(activations)}

    def position(difference: Difference) -> tuple:
        step, phase, tensor, sample = difference.key
        sample = NO_STEP if sample is None else sample
        if phase == GATHERED:
            where: tuple = (-1, parameter_position.get(tensor, last))
        elif phase == ACTIVATION:
            where = (0, forward[tensor], sample)
        # before all gradients, none of which they are made from: layers backward, each of them forward
        elif phase == RECOMPUTED:
            where = (1.5, -forward.get(f"{_layer_of(tensor)}.output", 0), sample, forward.get(tensor, len(forward)))
        elif phase == HELD_OUT:
            where = (7, forward[tensor], sample)
        elif phase == ACTIVATION_GRADIENT:
            where = (2, -forward[tensor], sample)
        elif phase == GRADIENT:
            where = (3, -parameter_position.get(tensor, last))
        elif phase == SCALAR:
            where = ({"grad_norm": 4, "validation_loss": 8}.get(tensor, 1), tensor)
        else:
            name = tensor.rpartition(".")[0] if phase == OPTIMIZER else tensor
            where = (5 if phase == OPTIMIZER else 6, parameter_position.get(name, last), tensor)
        return step, *where

    return position


def _layer_of(tensor: str) -> str:
    """`layers.3` of `layers.3.mlp.norm`, also with the name of a module before it."""
    before, layers, rest = tensor.partition("layers.")
    return f"{before}{layers}{rest.partition('.')[0]}"


def action_of(plan: AnyPlan, key: Key, global_rank: int) -> Action:
    """The action in which a rank computes a tensor: its F or B, the gradient reduction of its
    stage, or the optimizer step."""
    part = plan.part_of(global_rank)
    action = _own_action(part, own_key(plan, key), global_rank)
    return replace(action, stage=action.stage + part.first_stage)


def own_key(plan: AnyPlan, key: Key) -> Key:
    """A tensor by its name in its own part of a plan."""
    return key if key.phase == SCALAR else key._replace(tensor=plan.own_name(key.tensor))


def _own_action(plan: Plan, key: Key, global_rank: int) -> Action:
    plan = plan.of_step(max(0, key.step))
    block = key.tensor.split(".")
    if block[0] == "layers":
        stage = next(
            (content.stage for content in plan.stages if int(block[1]) in content.layers), len(plan.stages) - 1
        )
    else:
        stage = 0 if block[0] == "embedding" else len(plan.stages) - 1
    if key.sample is not None:
        first, _ = plan.samples_of(plan.layout.coordinates(global_rank)["dp"])
        microbatch = (key.sample - first) // plan.batch.micro_size
        backward = key.phase in (ACTIVATION_GRADIENT, RECOMPUTED)
        return Action(stage, _backward_kind(plan, stage, global_rank) if backward else Kind.F, microbatch)
    if key.phase in (GRADIENT, GATHERED):
        return Action(stage, Kind.REDUCE_GRAD if key.phase == GRADIENT else Kind.UNSHARD)
    return Action(plan.placement.stages_of(plan.layout.coordinates(global_rank)["pp"])[0], Kind.STEP)


def _backward_kind(plan: Plan, stage: int, global_rank: int) -> Kind:
    """B, or I where the schedule parts input gradients from weight gradients."""
    here = plan.layout.coordinates(global_rank)
    row = schedule_for(plan, plan.microbatches_of(here["dp"])).row(here["pp"])
    return Kind.I if any(action.kind is Kind.I and action.stage == stage for action in row) else Kind.B


def ranks_listed(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1, 4`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def name_of(key: Key) -> str:
    """A tensor in words: `gradient layers.0.mlp.down.weight`, `layers.0.mlp of sample 3`."""
    words = key.tensor if key.phase == ACTIVATION else f"{key.phase} {key.tensor}"
    return words if key.sample is None else f"{words} of sample {key.sample}"
