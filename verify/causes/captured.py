"""How the first difference relates to what is right, from the values that two more runs have kept of it and of
what it is made from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...core.base.digest import Digest, Region, bit_words
from ...core.model.parameters import expert_biases, parameters
from ...core.plan.optimizer import STATES
from ...core.plan.plan import AnyPlan, Plan
from ..ledger.compare import Difference, own_key
from ..ledger.ledger import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GATHERED,
    GRADIENT,
    HELD_OUT,
    NO_STEP,
    OPTIMIZER,
    RECOMPUTED,
    SCALAR,
    WEIGHT,
    Key,
    Piece,
    RunLedger,
)
from ..ledger.relations import Class, Evidence, Known, Relation, earlier, in_bf16, relate, relate_values
from ..ledger.summary import summarize
from ..run.contributions import Contributions, Part
from ..run.updates import Tensors, moments_of, rate_and_decay
from .axes import likely_axes, wrong_gradients
from .local_means import explained_by_counts
from .norms import Squares, Suspects, explained_by_squares
from .other_updates import explained_by_update
from .part_groups import rank_of_token
from .sums import explained_by_columns, explained_by_moved_use, explained_by_narrow_operands, explained_by_parts

MOST_SAMPLES = 16
LOSSES = "head.losses"
MOMENTS = tuple(dict.fromkeys(each for states in STATES.values() for each in states))
"""What updates keep of a parameter, whichever they are."""


def context_of(key: Key, reference: RunLedger) -> list[Key]:
    """The tensors whose values explain one that differs: itself in the steps before and after and for other samples,
    and what it is made from."""
    if key.phase == SCALAR:
        phase, tensor = (
            (GRADIENT, None)
            if key.tensor == "grad_norm"
            else (HELD_OUT if key.tensor == "validation_loss" else ACTIVATION, LOSSES)
        )
        return [
            each
            for each in reference.pieces
            if (each.step, each.phase) == (key.step, phase) and tensor in (None, each.tensor)
        ]
    before, after = key._replace(step=key.step - 1), key._replace(step=key.step + 1)
    older = [key._replace(step=step) for step in range(key.step - 2, NO_STEP - 1, -1)] if key.sample is None else []
    others = [each for each in reference.pieces if each._replace(sample=key.sample) in (key, before) and each != key][
        :MOST_SAMPLES
    ]
    through = [key._replace(tensor=each) for each in _operands(key)]
    moments = [key._replace(phase=OPTIMIZER, tensor=f"{key.tensor}.{each}") for each in MOMENTS]
    through += moments if key.phase == WEIGHT else []
    losses = _losses(key, reference) if key.phase in (GRADIENT, ACTIVATION_GRADIENT) else []
    return [
        each for each in dict.fromkeys((before, after, *older, *others, *through, *losses)) if each in reference.pieces
    ]


def _losses(key: Key, reference: RunLedger) -> list[Key]:
    """The losses of all tokens of a step, which show how many of them count."""
    return [each for each in reference.pieces if (each.step, each.phase, each.tensor) == (key.step, ACTIVATION, LOSSES)]


def _operands(key: Key) -> list[str]:
    """The tensors of the same sample that are added up in the output of a layer."""
    words = key.tensor.split(".")
    if key.phase != ACTIVATION or words[0] != "layers" or words[-1] != "output":
        return []
    layer = int(words[1])
    return [
        "embedding.output" if layer == 0 else f"layers.{layer - 1}.output",
        f"layers.{layer}.attention",
        f"layers.{layer}.mlp",
    ]


def part_of(whole: np.ndarray, region: Region) -> np.ndarray:
    """The values of a region."""
    return whole[tuple(slice(lo, hi) for lo, hi in region)]


@dataclass(frozen=True)
class Captured:
    """Two runs that kept values: `right`, of one device, and `wrong`, of the ranks of `plan`. `first_run` is another
    run of these, in which the tensors `differing` were not right; `parts` is the file of what the first of them is the
    sum of, if there is one."""

    plan: AnyPlan
    right: RunLedger
    wrong: RunLedger
    first_run: RunLedger
    differing: frozenset[Key]
    parts: Path

    def relation(self, difference: Difference) -> Relation:
        """How a difference relates to what is right; of the ranks that hold it wrongly the first that explains most."""
        key = difference.key
        pieces = [piece for piece in self.wrong.pieces[key] if self._is_wrong(key, piece)]
        before = {(piece.global_rank, piece.region, piece.digest) for piece in self.first_run.pieces[key]}
        if any((piece.global_rank, piece.region, piece.digest) not in before for piece in pieces):
            return Relation("run-dependent", "other wrong bits in every run of the same ranks", math.nan, math.nan)
        axes = self._axes(difference)
        relations = [self._related(key, piece, axes) for piece in pieces[:8]]
        plain = next((each for each in relations if not each.is_rough), None)
        if plain is None or plain.kind in ("scaled", "doubled"):
            for piece, related in zip(pieces, relations, strict=False):
                if (explained := self._counted(key, piece)) is not None:
                    return replace(related, kind=explained[0], words=explained[1], axis=None)
        if plain is not None:
            return plain
        for piece, related in zip(pieces, relations, strict=False):
            if (explained := self._explained(key, piece, axes)) is not None:
                return replace(related, kind=explained[0], words=explained[1], axis=None)
        return next((each for each in relations if each.kind != "other values"), relations[0])

    def _is_wrong(self, key: Key, piece: Piece) -> bool:
        return not np.array_equal(bit_words(part_of(self._whole(key), piece.region)), bit_words(piece.load()))

    # One tensor as it is

    def _related(self, key: Key, piece: Piece, axes: Sequence[str]) -> Relation:
        """By itself: among its own elements, those of other samples and steps, and other tensors."""
        part = self.plan.part_of(piece.global_rank).of_step(max(0, key.step))
        evidence = Evidence(
            before=earlier(key, piece, self.wrong),
            others=self._others(key, piece),
            layout=part.layout,
            axes=axes,
            dtype=_dtype(part, key),
            known=tuple(self._known(key, piece)),
            elsewhere=self._elsewhere(key),
            shards=self._shards(key),
            of_counts=own_key(self.plan, key).tensor in {each.name for each in expert_biases(part.model)},
        )
        if key.phase == SCALAR:
            return relate(self.right.pieces[key][0].summary, piece.summary, evidence)
        expected, found = part_of(self._whole(key), piece.region), piece.load()
        return relate_values(expected, found, piece.shape, piece.region, evidence)

    def _axes(self, difference: Difference) -> tuple[str, ...]:
        """Those that may have made a multiple of a tensor."""
        key, wrong = difference.key, difference.global_ranks
        holders = [piece.global_rank for piece in self.wrong.pieces[key]]
        gradients = wrong_gradients(self.plan, key.step, self.differing)
        return likely_axes(self.plan.part_of(wrong[0]), own_key(self.plan, key), wrong, holders, gradients)

    def _shards(self, key: Key) -> dict[int, list[Region]]:
        """The parts of a parameter's weights that ranks update."""
        found: dict[int, list[Region]] = {}
        if key.phase in (WEIGHT, GATHERED):
            for each, pieces in self.first_run.pieces.items():
                own = (each.step, each.phase) == (max(key.step, 0), OPTIMIZER)
                if own and each.tensor.rpartition(".")[0] == key.tensor:
                    for piece in pieces:
                        found.setdefault(piece.global_rank, []).append(piece.region)
                    break  # that of its other moments is the same
        return found

    def _whole(self, key: Key) -> np.ndarray:
        return self.right.pieces[key][0].load()

    def _others(self, key: Key, piece: Piece) -> dict[Digest | int, str]:
        """Right tensors of the same step and kind by digest, and other parts of the same one by what they hold."""
        found: dict[Digest | int, str] = {}
        good = ((each, held) for each, held in self.wrong.pieces.items() if each not in self.differing)
        for other, pieces in [*self.right.pieces.items(), *good]:
            if other != key and (other.step, other.phase) == (key.step, key.phase):
                is_same = other.tensor == key.tensor
                words = f"{'' if is_same else other.tensor}{_of_sample(other, key, is_same)}"
                for each in (each for each in pieces if each.region == piece.region):
                    if is_same or each.digest not in found:  # residuals give tensors of one layer the same gradient
                        found[each.digest] = words
        for each in self.wrong.pieces[key]:
            if each.region != piece.region:
                own = part_of(self._whole(key), each.region)
                found[summarize(own, each.shape, each.region).value_digest] = f"rank {each.global_rank}"
        return found

    def _known(self, key: Key, piece: Piece) -> Iterator[Known]:
        """What rows of the tensor may have been taken for: other parts of it, other samples, the step before."""
        if not piece.region:
            return
        yield Known("permuted", "the right ones of other places", self._whole(key), piece.region)
        for other in context_of(key, self.right):
            same = (other.phase, other.tensor) == (key.phase, key.tensor)
            if (
                not same
                or self.right.pieces[other][0].stored is None
                or len(self.right.pieces[other][0].shape) != len(piece.shape)
            ):
                continue
            stale = other.step != key.step
            words = f"those of step {other.step + 1}" if other.step != NO_STEP else "those before the first step"
            words = (
                words
                if other.sample in (None, key.sample)
                else (f"{words if stale else 'those'} of sample {other.sample}")
            )
            yield Known("stale" if stale else "permuted", words, self._whole(other), piece.region)

    def _elsewhere(self, key: Key) -> dict[str, np.ndarray]:
        """The other tensors of the same step and kind; of other samples, all of them are in `_known`."""
        if key.phase not in (GRADIENT, WEIGHT, OPTIMIZER):
            return {}
        same = (each for each in self.right.pieces if (each.step, each.phase) == (key.step, key.phase) and each != key)
        return {each.tensor: self._whole(each) for each in same if self._has(each)}

    # One tensor by what it is made from

    def _counted(self, key: Key, piece: Piece) -> tuple[Class, str] | None:
        """By the numbers of tokens that ranks, microbatches and samples count."""
        if key.phase not in (SCALAR, GRADIENT, ACTIVATION_GRADIENT):
            return None
        plan = self.plan.part_of(piece.global_rank).of_step(max(0, key.step))
        parts, values = self._parts_of_mean(key, piece)
        expected, found = part_of(self._whole(key), piece.region).astype(np.float64), piece.load()
        counted = [part for part, value in self._token_losses(key) if value]
        if not parts or not counted:
            return None
        return explained_by_counts(plan, parts, values, np.atleast_1d(found - expected), counted, _dtype(plan, key))

    def _parts_of_mean(self, key: Key, piece: Piece) -> tuple[list[Part], np.ndarray]:
        """What of a tensor has tokens of its own: samples and tokens of a gradient or a loss; the tensor of
        a sample is one part."""
        if key.phase == SCALAR:
            if not (losses := self._token_losses(key)) or key.tensor == "grad_norm":
                return [], np.empty(0)
            labels, values = zip(*losses, strict=True)
            return list(labels), _scale(np.array([sum(values)]), self._whole(key)) * np.array(values)[:, None]
        if key.sample is not None:
            return [Part(key.sample)], part_of(self._whole(key), piece.region).astype(np.float64)[None]
        if not self.parts.exists():
            return [], np.empty(0)
        whole = Contributions.load(self.parts)
        box = tuple(slice(lo, hi) for lo, hi in piece.region)
        return list(whole.parts), _scale(whole.values.sum(0), self._whole(key)) * whole.values[(slice(None), *box)]

    def _token_losses(self, key: Key) -> list[tuple[Part, float]]:
        """The losses of a step's tokens; those that do not count are 0."""
        phase = HELD_OUT if (key.phase, key.tensor) == (SCALAR, "validation_loss") else ACTIVATION
        wanted = key.step, phase, LOSSES
        losses = [
            each for each in self.right.pieces if (each.step, each.phase, each.tensor) == wanted and self._has(each)
        ]
        values = ((each.sample, at, float(value)) for each in losses for at, value in enumerate(self._whole(each)))
        return [(Part(sample, (at, at + 1)), value) for sample, at, value in values]

    def _explained(self, key: Key, piece: Piece, axes: Sequence[str]) -> tuple[Class, str] | None:
        plan = self.plan.part_of(piece.global_rank).of_step(max(0, key.step))
        if key.phase == SCALAR:
            return self._explained_scalar(plan, key, piece)
        expected, found = part_of(self._whole(key), piece.region), piece.load()
        if self.parts.exists():
            whole = Contributions.load(self.parts)
            scale = _scale(whole.values.sum(0), self._whole(key))
            box = tuple(slice(lo, hi) for lo, hi in piece.region)
            own = Contributions(whole.parts, whole.values[(slice(None), *box)])
            explained = explained_by_parts(
                plan,
                piece.global_rank,
                expected,
                found,
                own,
                scale=scale,
                rows=_rows(plan, key, piece),
                dtype=_dtype(plan, key),
                axes=axes,
            )
            if explained is None and whole.narrow is not None:
                explained = explained_by_narrow_operands(expected, found, whole.narrow[box])
            explained = explained or explained_by_moved_use(expected, found, whole, box, scale)
            if explained is not None:
                return explained
        if (explained := self._of_another_update(plan, key, piece)) is not None:
            return explained
        columns = {words: part_of(values, piece.region) for words, values in self._columns(plan, key)}
        extra = {words: (kind, part_of(values, piece.region)) for words, kind, values in self._extra(plan, key)}
        return explained_by_columns(expected, found, columns, extra, dtype=_dtype(plan, key))

    def _of_another_update(self, plan: Plan, key: Key, piece: Piece) -> tuple[Class, str] | None:
        """A weight, by an update that is not that of its step: from the moments, which say all of the gradient but in
        an SGD that has none, or adds the gradient to it once more."""
        parameter = next((each for each in parameters(plan.model) if each.name == key.tensor), None)
        before = key._replace(step=key.step - 1)
        if key.phase != WEIGHT or key.step < 0 or parameter is None or not self._has(before):
            return None
        names = moments_of(plan, parameter)
        keys = {each: key._replace(phase=OPTIMIZER, tensor=f"{key.tensor}.{each}") for each in names}
        if not keys or not all(map(self._has, keys.values())):
            return None
        moments = {name: self._whole(each).astype(np.float64) for name, each in keys.items()}
        old = self._whole(before).astype(np.float64)
        tensors = Tensors(np.zeros_like(old), old, moments, moments)
        box = tuple(slice(lo, hi) for lo, hi in piece.region)
        return explained_by_update(plan, parameter, key.step, tensors, piece.load(), box)

    def _columns(self, plan: Plan, key: Key) -> Iterator[tuple[str, np.ndarray]]:
        """What a tensor is the sum of, in words, where it is not recorded as a sum."""
        before = key._replace(step=key.step - 1)
        now = self._whole(key).astype(np.float64)
        old = self._whole(before).astype(np.float64) if self._has(before) else np.zeros_like(now)
        if key.phase == OPTIMIZER:
            beta = _carried(plan, key.tensor.rpartition(".")[2])
            yield "what is left of the moment before", beta * old
            yield "what the gradient of this step adds", now - beta * old
        elif key.phase == WEIGHT and self._has(before):
            decay = _decay(plan, key.step, key.tensor, old)
            yield "the weight decay", decay
            yield "the update", now - old - decay
        elif (operands := [key._replace(tensor=each) for each in _operands(key)]) and all(map(self._has, operands)):
            yield from ((each.tensor, self._whole(each).astype(np.float64)) for each in operands)

    def _extra(self, plan: Plan, key: Key) -> Iterator[tuple[str, Class, np.ndarray]]:
        """What does not belong to a tensor and may have been added to it, and the kind of difference that this is."""
        before = key._replace(step=key.step - 1)
        if not self._has(before):
            return
        old = self._whole(before).astype(np.float64)
        if key.phase not in (WEIGHT, GATHERED):
            yield "the values of the step before", "stale", old
        elif key.phase == WEIGHT and not _decay(plan, key.step, key.tensor, old).any():
            yield "a weight decay that it does not have", "scaled", _usual_decay(plan, key.step, old)

    def _has(self, key: Key) -> bool:
        return key in self.right.pieces and self.right.pieces[key][0].stored is not None

    def _explained_scalar(self, plan: Plan, key: Key, piece: Piece) -> tuple[Class, str] | None:
        right, found = float(self._whole(key)), float(piece.load())
        if key.tensor == "grad_norm":
            held = {each.tensor: each for each in context_of(key, self.right) if self._has(each)}
            gradients = {name: self._whole(each).astype(np.float64) for name, each in held.items()}
            narrow = math.sqrt(math.fsum(float(np.square(in_bf16(each)).sum()) for each in gradients.values()))
            if abs(found - narrow) <= 1e-3 * abs(found - right):
                return "order only", "the norm of gradients that were rounded to bf16"
            elements = {name: np.square(each) for name, each in gradients.items()}
            squares = Squares.of_values(
                elements, {name: self.wrong.pieces.get(each, ()) for name, each in held.items()}
            )
            return explained_by_squares(right, found, squares, Suspects.of_plan(plan, squares))
        if not (parts := self._token_losses(key)):
            return None
        labels, values = zip(*parts, strict=True)
        own = Contributions(labels, np.array(values)[:, None])
        scale = _scale(own.values.sum(0), np.array([right]))
        return explained_by_parts(
            plan, piece.global_rank, np.array([right]), np.array([found]), own, scale=scale, dtype="fp32"
        )


def _of_sample(other: Key, key: Key, is_same: bool) -> str:
    """The sample of another tensor, in words, where it has one that is not that of `key`."""
    if other.sample in (None, key.sample):
        return ""
    return f"sample {other.sample}" if is_same else f" of sample {other.sample}"


def _rows(plan: Plan, key: Key, piece: Piece) -> dict[str, slice]:
    """The rows of a piece of an activation by the tensor-parallel rank that works on their tokens,
    where such ranks cut them."""
    if key.sample is None or plan.layout.tp == 1:
        return {}
    first, last = piece.region[0]
    owners = [rank_of_token(plan, "tp", token) for token in range(first, last)]
    return {
        f"of the tokens of tp rank {rank}": slice(owners.index(rank), len(owners) - owners[::-1].index(rank))
        for rank in dict.fromkeys(owners)
    }


def _scale(total: np.ndarray, right: np.ndarray) -> float:
    return float((total * right).sum() / max(float((total * total).sum()), np.finfo(float).tiny))


def _carried(plan: Plan, moment: str) -> float:
    """The share of a moment that an update leaves of it."""
    first, second = plan.optimizer.betas
    return {"exp_avg": first, "exp_avg_sq": second}.get(moment, plan.optimizer.own_momentum)


def _decay(plan: Plan, step: int, name: str, old: np.ndarray) -> np.ndarray:
    """What weight decay adds to the weights of a parameter (Loshchilov & Hutter 2019, algorithm 2)."""
    parameter = next((each for each in parameters(plan.model) if each.name == name), None)
    if parameter is None:  # an expert's bias
        return np.zeros_like(old)
    rate, decay = rate_and_decay(plan, parameter, step)
    return -rate * decay * old


def _usual_decay(plan: Plan, step: int, old: np.ndarray) -> np.ndarray:
    """The same where parameters are decayed that should not be."""
    return -plan.rates.learning_rate(step) * plan.rates.weight_decay(step) * old


def _dtype(plan: Plan, key: Key) -> str:
    return (
        plan.precision.dtype
        if key.phase in (ACTIVATION, ACTIVATION_GRADIENT, HELD_OUT, RECOMPUTED, GATHERED)
        else "fp32"
    )
