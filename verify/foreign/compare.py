"""Compares ledgers of which one at least is of another stack (`Recorder`): without a plan, by the order in which
tensors were recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...core.base.digest import full_region, region_size
from ...core.base.findings import Finding, Where
from ..causes.against import Comparison, other_machines
from ..causes.describe import differing_words, later, problem_words
from ..causes.norms import Squares, Suspects, explained_by_squares
from ..causes.summaries import explained_by_summaries, with_flip
from ..ledger.compare import Difference, compare, name_of, ranks_listed, whole_summary
from ..ledger.duplicates import PHASES
from ..ledger.file import RecordedLedger, SavedLedger
from ..ledger.ledger import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GRADIENT,
    HELD_OUT,
    NO_STEP,
    OPTIMIZER,
    SCALAR,
    SQUARE,
    WEIGHT,
    Key,
    Piece,
    RunLedger,
)
from ..ledger.relations import HINTS, Evidence, Relation, earlier, relate
from ..ledger.summary import Summary
from .relations import related_norm, related_number
from .tolerances import RELATIVE, ROUNDOFF, Tolerances, format_of

MUST_BE = frozenset({GRADIENT, WEIGHT})
"""Kinds of which both runs have every tensor. Modules and state of an optimizer may be called
otherwise in another stack."""

ACTIONS = {
    ACTIVATION: "forward",
    HELD_OUT: "forward",
    ACTIVATION_GRADIENT: "backward",
    GRADIENT: "backward and the reduction of gradients",
    OPTIMIZER: "optimizer step",
    WEIGHT: "optimizer step",
}
"""What a rank does when it makes a tensor of a kind."""

Ledger = SavedLedger | RecordedLedger


def compare_recorded(run: Ledger, reference: Ledger) -> Comparison:
    """Every tensor that both ledgers have. Differences are faults where both claim bits, else where
    they leave the tolerance."""
    premises = list(other_machines(run, reference))
    bitwise = run.exact and reference.exact and not premises
    expected, found, alone = _common(reference.run, run.run)
    judge = _Judge(expected, found, run.run, bitwise, format_of(reference.run, run.run))
    differences = sorted(compare(expected, found, None), key=_position(expected))
    judged = [judge.judged(each) for each in differences]
    wrong = [each for each in judged if not each.explained]
    wrong[:1] = map(judge.related, wrong[:1])
    findings = [*premises, *(judge.finding(each) for each in wrong[:1])]
    if all(key.phase == SCALAR for key in expected.pieces):
        hint = "Give tensors that are the same in both runs the same names (`names`)."
        findings.append(Finding("nothing-compared", "error", "the ledgers", "they have no tensor in common.", hint))
    findings += later([each.difference.key for each in wrong[1:]], "differs-later", order="recorded")
    if near := [each for each in judged if each.explained]:
        most = max(near, key=lambda each: each.share)
        what = (
            f"{differing_words(len(near))} within {judge.tolerance_words}; most of it, {most.share:.2g}, uses "
            f"{_where(most.difference)}."
        )
        findings.append(Finding("within-tolerance", "info", "all steps", what))
    findings += alone
    report = {
        "ok": not any(finding.severity == "error" for finding in findings),
        "findings": [finding.to_dict() for finding in findings],
        "steps": len({key.step for key in expected.pieces} - {NO_STEP}),
        "losses": found.scalars("loss"),
        "tensors_compared": len(expected.pieces),
        "tensors_different": len(differences),
        "tensors_explained": len(near),
        "first_divergence": _divergence(wrong[0].difference) if wrong else None,
        "bitwise": bitwise,
        "relative_tolerance": None if bitwise else RELATIVE[judge.dtype],
    }
    return Comparison(report, tuple(findings), _text(run, reference, report, findings, judge))


@dataclass(frozen=True)
class _Judged:
    """A difference, of whose ranks only those are left that are at fault, and what it uses of its tolerance at most."""

    difference: Difference
    explained: bool
    share: float


class _Judge:
    """Which differences are faults, and what kind of."""

    def __init__(self, reference: RunLedger, run: RunLedger, squares: RunLedger, bitwise: bool, dtype: str):
        self.reference, self.run, self.bitwise, self.dtype = reference, run, bitwise, dtype
        self._squares = squares
        self._wholes: dict[Key, Summary] = {}

    @cached_property
    def _tolerances(self) -> Tolerances:
        return Tolerances(self.reference, self.run, self.dtype)

    @property
    def tolerance_words(self) -> str:
        """What differences are held to."""
        return f"the tolerance, {RELATIVE[self.dtype]:g} of the norm for {self.dtype}"

    def judged(self, difference: Difference) -> _Judged:
        """A difference with the ranks that are at fault."""
        key = difference.key
        # replicas of the reference, but for rounding
        if difference.problem == "unclear" and not self.bitwise and self._agrees(key):
            difference = replace(difference, problem="differs", global_ranks=())
        if difference.problem != "differs":
            return _Judged(difference, False, math.inf)
        pieces = [
            each
            for each in self.run.pieces[key]
            if not difference.global_ranks or each.global_rank in difference.global_ranks
        ]
        shares = {each.global_rank: 0.0 for each in pieces}
        for piece in pieces:
            shares[piece.global_rank] = max(shares[piece.global_rank], self._share(key, piece))
        wrong = tuple(sorted(rank for rank, share in shares.items() if share > 1))
        if not wrong:
            return _Judged(replace(difference, global_ranks=tuple(sorted(shares))), True, max(shares.values()))
        return _Judged(replace(difference, global_ranks=wrong), False, max(shares.values()))

    def related(self, first: _Judged) -> _Judged:
        """The first fault in dataflow order with how its values relate to the right ones, on the first of its ranks."""
        difference = first.difference
        if difference.problem != "differs":
            return first
        pieces = [each for each in self.run.pieces[difference.key] if each.global_rank == difference.global_ranks[0]]
        piece = max(pieces, key=lambda each: self._share(difference.key, each))
        relation = self._relation(difference.key, piece)
        if len(pieces) > 1 and any(self._share(difference.key, each) <= 1 for each in pieces):
            relation = replace(
                relation, words=(f"{relation.words}, when it was computed again; the rank had it right before")
            )
        return replace(first, difference=replace(difference, relation=relation))

    def finding(self, judged: _Judged) -> Finding:
        """The fault in words."""
        difference, relation = judged.difference, judged.difference.relation
        if relation is None:
            what, hint = problem_words(difference.problem)
            if difference.problem == "incomplete":
                hint = "Give the recorder the part of it that each rank holds (`cuts`), or leave it out (`names`)."
            return Finding.at(f"tensor-{difference.problem}", "error", _where(difference), what, hint)
        far = "" if self.bitwise or not math.isfinite(judged.share) else f", {judged.share:.3g} times what is allowed"
        what, hint = f"{relation.kind}: {relation.words}{far}.", self._hint(difference, relation)
        return Finding.at("differs", "error", _where(difference), what, hint, axis=relation.axis)

    def _share(self, key: Key, piece: Piece) -> float:
        """How much of its tolerance a piece uses; of two that promise bits, infinitely much as
        soon as one is different."""
        expected, found, size = self._sides(key, piece)
        if expected.digest == found.digest:
            return 0.0
        distance = found.distance(expected)
        if self.bitwise or not math.isfinite(distance):
            return math.inf
        allowed = self._tolerances.of(key, expected.norm, size)
        return distance / allowed if allowed else math.inf

    def _sides(self, key: Key, piece: Piece) -> tuple[Summary, Summary, int]:
        """The right summary and the piece's, of its region if the reference has the same, else of the whole
        tensor; and the size."""
        expected = self.reference.pieces[key]
        right = next((each for each in expected if each.region == piece.region), None)
        if right is not None:
            return right.summary, piece.summary, region_size(piece.region)
        return whole_summary(expected), self._whole(key, piece), math.prod(piece.shape)

    def _whole(self, key: Key, piece: Piece) -> Summary:
        """The summary of the whole tensor with a rank's piece; one for all ranks where none has
        the piece of another."""
        pieces = self.run.pieces[key]
        if len({each.region for each in pieces}) < len(pieces):
            return whole_summary(pieces, piece)
        if key not in self._wholes:
            self._wholes[key] = whole_summary(pieces)
        return self._wholes[key]

    def _agrees(self, key: Key) -> bool:
        """Whether the reference has the whole tensor, and copies of its parts that are apart by rounding alone."""
        pieces = self.reference.pieces[key]
        by_region = {each.region: each.summary for each in reversed(pieces)}
        if sum(map(region_size, by_region)) != math.prod(pieces[0].shape):
            return False
        return all(
            each.summary.distance(by_region[each.region])
            <= self._tolerances.of(key, by_region[each.region].norm, region_size(each.region))
            for each in pieces
        )

    def _relation(self, key: Key, piece: Piece) -> Relation:
        expected, found, _ = self._sides(key, piece)
        if key.phase == SCALAR:
            if key.tensor != "grad_norm":
                return related_number(expected, found)
            squares = Squares.recorded(self._squares, key.step)
            explained = explained_by_squares(expected.sums[0], found.sums[0], squares, Suspects.by_name(squares))
            return related_norm(expected, found, explained)
        evidence = Evidence(before=earlier(key, piece, self.run), others=self._others(key, piece), dtype=self.dtype)
        relation = relate(expected, found, evidence)
        copies = [each for each in self.run.pieces[key] if each.region == piece.region]
        same = any(each.region == piece.region for each in self.reference.pieces[key])
        of = piece if same else replace(piece, region=full_region(piece.shape))
        if self.bitwise:
            relation = with_flip(relation, expected, found, of.shape, of.region, self.dtype)
        return explained_by_summaries(relation, expected, found, of, copies, RELATIVE[self.dtype])

    def _others(self, key: Key, piece: Piece) -> Mapping[Any, str]:
        """Other samples of the tensor in the same step, and its other parts, by digest."""
        same = (other for other in self.reference.pieces if other != key and other[:3] == key[:3])
        found: dict[Any, str] = {
            each.digest: f"sample {other.sample}"
            for other in same
            for each in self.reference.pieces[other]
            if each.region == piece.region
        }
        parts = [each for each in self.reference.pieces[key] if each.region != piece.region]
        return found | {each.summary.value_digest: f"rank {each.global_rank} of the reference" for each in parts}

    def _hint(self, difference: Difference, relation: Relation) -> str:
        pieces = self.run.pieces[difference.key]
        regions = {each.region for each in pieces if each.global_rank in difference.global_ranks}
        right = sorted({each.global_rank for each in pieces if each.region in regions} - set(difference.global_ranks))
        if right:
            words = (
                f"Replicas on {ranks_listed(right)} are"
                if len(right) > 1
                else (f"The replica on {ranks_listed(right)} is")
            )
            return f"{words} right. {HINTS[relation.kind]}"
        return HINTS[relation.kind]


def _common(reference: RunLedger, run: RunLedger) -> tuple[RunLedger, RunLedger, list[Finding]]:
    """What both ledgers are to have, in the steps that both have, and what is left out of the comparison."""
    last = min(max((key.step for key in each.pieces), default=NO_STEP) for each in (reference, run))
    sides: list[dict[Key, tuple[Piece, ...]]] = []
    alone: list[str] = []
    for own, other, words in ((reference, run, "the reference"), (run, reference, "the run")):
        comparable, left = {}, []
        for key, pieces in own.pieces.items():
            if key == ROUNDOFF or key.phase in (SQUARE, *PHASES) or key.step > last:
                continue
            if key.phase in MUST_BE or (key in other.pieces and _same_shape(pieces, other.pieces[key])):
                comparable[key] = pieces
            else:
                left.append(name_of(key._replace(sample=None)))
        sides.append(comparable)
        if left:
            names = list(dict.fromkeys(left))
            alone.append(f"{len(left):,} of {words} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})")
    hint = "Give them common names (`names`), say how they are cut (`cuts`), or leave it at that."
    what = f"tensors without a counterpart: {'; '.join(alone)}."
    findings = [Finding("not-compared", "info", "one side only", what, hint)] if alone else []
    return RunLedger(sides[0]), RunLedger(sides[1]), findings


def _same_shape(pieces: Sequence[Piece], others: Sequence[Piece]) -> bool:
    return {each.shape for each in pieces} == {each.shape for each in others}


def _position(reference: RunLedger) -> Callable[[Difference], tuple[Any, ...]]:
    """A sort key: forward as recorded, losses and other numbers, backward, parameter gradients and their norm,
    the optimizer, weights."""
    place = {name: i for i, name in enumerate(dict.fromkeys((key.phase, key.tensor) for key in reference.pieces))}
    forward = {name: i for i, (phase, name) in enumerate(place) if phase in (ACTIVATION, HELD_OUT)}

    def position(difference: Difference) -> tuple[Any, ...]:
        step, phase, tensor, sample = difference.key
        late = {"grad_norm": 4}.get(tensor, 5 if tensor.startswith("learning_rate") else 1)
        kind = {ACTIVATION: 0, SCALAR: late, ACTIVATION_GRADIENT: 2, GRADIENT: 3, OPTIMIZER: 6, WEIGHT: 7, HELD_OUT: 8}[
            phase
        ]
        where = -forward.get(tensor, 0) if phase == ACTIVATION_GRADIENT else place.get((phase, tensor), len(place))
        return step, kind, where, -1 if sample is None else sample

    return position


def _where(difference: Difference) -> Where:
    key = difference.key
    ranks = difference.global_ranks
    when = f"step {key.step + 1}" if key.step > NO_STEP else "before the first step"
    action = ACTIONS.get(key.phase) if key.step > NO_STEP else None
    words = (when, ranks_listed(ranks) if ranks else None, action, name_of(key))
    return Where(ranks[0] if ranks else None, action, key.tensor, words=", ".join(filter(None, words)))


def _divergence(difference: Difference) -> dict[str, Any]:
    """The JSON form of the first divergence. Steps are counted from 1."""
    key, relation = difference.key, difference.relation
    return {
        "step": key.step + 1,
        "rank": difference.global_ranks[0] if difference.global_ranks else None,
        "ranks": list(difference.global_ranks),
        "action": ACTIONS.get(key.phase),
        "microbatch": None,
        "tensor": key.tensor,
        "phase": key.phase,
        "sample": key.sample,
        "problem": difference.problem,
        "class": difference.kind,
        "words": problem_words(difference.problem)[0] if relation is None else relation.words,
        "distance": relation.distance if relation and math.isfinite(relation.distance) else None,
        "norm": relation.norm if relation and math.isfinite(relation.norm) else None,
    }


def _text(run: Ledger, reference: Ledger, report: Mapping[str, Any], findings: Sequence[Finding], judge: _Judge) -> str:
    sides = [f"{each.path} ({len(each.environments)} ranks)" for each in (run, reference)]
    promise = (
        "both claim their bits, which are compared"
        if report["bitwise"]
        else (
            f"bits are not claimed by both: differences are held to {judge.tolerance_words}, which is a convention "
            "and no bound"
        )
    )
    lines = [f"{' against '.join(sides)}: {promise}."]
    compared = f"{report['tensors_compared']:,}"
    if report["tensors_different"]:
        lines.append(f"{differing_words(report['tensors_different'])} of {compared}.")
    else:
        lines.append(f"0 different bits in {compared} tensors of {report['steps']} steps.")
    return "\n".join([*lines, *map(str, findings)])
