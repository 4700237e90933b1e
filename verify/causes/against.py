"""Compares two saved ledgers: any two layouts of one problem, after the fact. Names the first tensor that
differs, where, and how.

Runs in exact numerics on one kind of machine have equal bits, so every difference is a fault. Between other
runs rounding differs; what a difference may then be is bounded (`bounds`) in the first step, before which
both have the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from ...core.base.digest import Digest, Region, full_region
from ...core.base.findings import Finding
from ...core.plan.plan import Plan
from ..ledger.compare import Difference, compare, own_key, whole_summary
from ..ledger.duplicates import PHASES, firsts
from ..ledger.file import RecordedLedger, SavedLedger
from ..ledger.ledger import BROUGHT, GATHERED, HELD_OUT, NO_STEP, RECOMPUTED, SCALAR, Key, Piece
from ..ledger.relations import HINTS, ROUNDING, Evidence, Relation, earlier, relate
from ..ledger.summary import Summary
from ..run.bounds import StepBounds
from .axes import likely_axes, wrong_gradients
from .describe import differing_words, divergence, later, problem_words, where_of
from .summaries import explained_by_summaries, with_flip

HOW_KEYS = frozenset({"batch.micro_size", "precision.gradient_dtype", "train.timeout_s", "train.steps"})
"""Fields that do not change what exact numerics compute."""

OF_THE_PROBLEM = ("batch", "precision", "optimizer", "train")
"""Sections of a plan that say what is computed, with the recorded numerics; all others say how."""


@dataclass(frozen=True)
class Comparison:
    """What the comparison of two ledgers found. `report` has the JSON keys of `verify --json`."""

    report: dict[str, Any]
    findings: tuple[Finding, ...]
    text: str

    @property
    def ok(self) -> bool:
        """True when nothing differs but by the order of sums."""
        return bool(self.report["ok"])


def compare_saved(run: SavedLedger, reference: SavedLedger) -> Comparison:
    """Every tensor of `run` against that of `reference`; of a run that was resumed from the state
    on that it began with."""
    reference = replace(reference, run=reference.run.as_far_as(run.run))
    differences = compare(reference.run, run.run, run.plan.named_shapes)
    if not run.exact:  # the library may compute again with other bits
        differences = [each for each in differences if each.key.phase != RECOMPUTED]
    judge = _Judge(run, reference, frozenset(each.key for each in differences))
    judged = [(each, judge.finding(each)) for each in map(judge.related, differences)]
    wrong = [(difference, finding) for difference, finding in judged if finding.severity == "error"]
    explained = [finding for _, finding in judged if finding.severity != "error"]
    findings = [*judge.premises, *(finding for _, finding in wrong[:1])]
    findings += later([difference.key for difference, _ in wrong[1:]])
    if explained:
        what = (
            f"{differing_words(len(explained))} as other orders of the same sums do. First, {explained[0].where}: "
            f"{explained[0].what}"
        )
        findings.append(Finding("order-of-sums", "info", "all steps", what))
    report = {
        "ok": not any(finding.severity == "error" for finding in findings),
        "findings": [finding.to_dict() for finding in findings],
        "steps": len({key.step for key in reference.run.pieces if key.phase == SCALAR and key.step != NO_STEP}),
        "losses": run.run.scalars("loss"),
        "tensors_compared": len(reference.run.pieces),
        "tensors_different": len(differences),
        "tensors_explained": len(explained),
        "first_divergence": divergence(run.plan, wrong[0][0]) if wrong else None,
        "bitwise": judge.bitwise,
    }
    return Comparison(report, tuple(findings), _text(run, reference, report, findings))


class _Judge:
    """What a difference between two runs means: `premises` are findings about the runs themselves, `bitwise` says
    whether equal bits are promised. The tensors `differing` are not right."""

    def __init__(self, run: SavedLedger, reference: SavedLedger, differing: frozenset[Key]):
        self.run, self.reference, self._differing = run, reference, differing
        self._gradients: dict[int, frozenset[str]] = {}
        self.premises = [*_other_problem(run, reference), *other_machines(run, reference)]
        self.bitwise = not self.premises and run.plan.numerics.mode == reference.plan.numerics.mode == "exact"
        self._bounds = StepBounds(run.plan) if isinstance(run.plan, Plan) else None
        first = {key: pieces for key, pieces in reference.run.pieces.items() if key.step == 0}
        self._largest = {} if self.bitwise else {key: whole_summary(pieces).largest for key, pieces in first.items()}

    def finding(self, difference: Difference) -> Finding:
        """A fault, or what other orders of the same sums explain; the relation of the difference is known."""
        key, relation = difference.key, difference.relation
        where = where_of(self.run.plan, key, difference.global_ranks)
        if relation is None:
            what, hint = problem_words(difference.problem)
            return Finding.at(f"tensor-{difference.problem}", "error", where, what, hint)
        axis = relation.axis
        if self.bitwise or key.phase in PHASES or relation.kind not in ("order only", "other values"):
            what = f"{relation.kind}: {relation.words}."
            return Finding.at("bits-differ", "error", where, what, HINTS[relation.kind], axis=axis)
        after = key.step > 0 or key.phase == HELD_OUT or key.tensor == "validation_loss"
        if after or self._bounds is None:
            why = "modules have no bounds" if self._bounds is None else "the weights differed before this step"
            return Finding.at("order-of-sums", "info", where, f"{relation.words}; not judged, because {why}.")
        bound = self._bounds.of(key, self._largest) * math.sqrt(math.prod(self.reference.run.pieces[key][0].shape))
        share = relation.distance / bound if bound else math.inf
        if share <= 1:
            what = f"{relation.words}, {share:.2g} of what other orders of the same sums may give."
            return Finding.at("order-of-sums", "info", where, what)
        what = f"{relation.words}, {share:.3g} times what other orders of the same sums may give."
        return Finding.at("not-explained", "error", where, what, HINTS[relation.kind], axis=axis)

    def related(self, difference: Difference) -> Difference:
        """The difference with the relation of its tensor to the right one: of a piece that both have,
        else of the whole tensor."""
        if difference.problem != "differs":
            return difference
        key, rank = difference.key, difference.global_ranks[0]
        expected, found = self._right(key, rank), self.run.run.pieces[key]
        wrong = [
            each for each in found if each.global_rank == rank and each.digest not in _digests(expected, each.region)
        ]
        # those of other regions may be right
        piece = next((each for each in wrong if _digests(expected, each.region)), wrong[0])
        right = next((each for each in expected if each.region == piece.region), None)
        plan, holders = self.run.plan.part_of(rank), [each.global_rank for each in found]
        if key.step not in self._gradients:
            self._gradients[key.step] = wrong_gradients(self.run.plan, key.step, self._differing)
        axes = likely_axes(
            plan, own_key(self.run.plan, key), difference.global_ranks, holders, self._gradients[key.step]
        )
        evidence = Evidence(layout=plan.layout, axes=axes)
        if right is None:
            whole, of_run = whole_summary(expected), whole_summary(found, piece)
            relation = relate(whole, of_run, evidence)
            return replace(
                difference, relation=self._with_flip(key, relation, whole, of_run, piece, full_region(piece.shape))
            )
        evidence = replace(evidence, before=earlier(key, piece, self.run.run), others=self._others(key, piece))
        relation = relate(right.summary, piece.summary, evidence)
        relation = self._with_flip(key, relation, right.summary, piece.summary, piece, piece.region)
        copies = [each for each in found if each.region == piece.region]
        return replace(
            difference,
            relation=explained_by_summaries(
                relation, right.summary, piece.summary, piece, copies, ROUNDING[evidence.dtype]
            ),
        )

    def _with_flip(
        self, key: Key, relation: Relation, right: Summary, wrong: Summary, of: Piece, region: Region
    ) -> Relation:
        if not self.bitwise or key.phase == SCALAR:
            return relation
        dtype = self.run.plan.part_of(of.global_rank).precision.dtype if key.sample is not None else "fp32"
        return with_flip(relation, right, wrong, of.shape, region, dtype)

    def _right(self, key: Key, rank: int) -> Sequence[Piece]:
        """The pieces that are right: those of the reference, or of what the run has twice the first; of
        recomputed ones a rank's own."""
        if key.phase == GATHERED:
            return self.run.run.pieces[key._replace(phase=BROUGHT)]
        if key.phase == RECOMPUTED:
            return [each for each in firsts(self.run.run, key) if each.global_rank == rank]
        return self.reference.run.pieces[key]

    def _others(self, key: Key, piece: Piece) -> dict[Digest | int, str]:
        """The right tensors of the same step and kind, and other parts of the same tensor."""
        found: dict[Digest | int, str] = {}
        for other, pieces in self._by_place.get((key.step, key.phase), {}).items():
            words = f"sample {other.sample}" if other.tensor == key.tensor else other.tensor
            found |= {each.digest: words for each in pieces if other != key and each.region == piece.region}
        right = self.reference.run.pieces.get(key, ())
        parts = {each.summary.value_digest: each.global_rank for each in right if each.region != piece.region}
        return found | {value_digest: f"rank {rank} of the reference" for value_digest, rank in parts.items()}

    @cached_property
    def _by_place(self) -> dict[tuple[int, str], dict[Key, Sequence[Piece]]]:
        """The tensors of the reference by step and kind."""
        found: dict[tuple[int, str], dict[Key, Sequence[Piece]]] = {}
        for key, pieces in self.reference.run.pieces.items():
            found.setdefault((key.step, key.phase), {})[key] = pieces
        return found


def _digests(pieces: Sequence[Piece], region: Region) -> set[Digest]:
    return {each.digest for each in pieces if each.region == region}


def _other_problem(run: SavedLedger, reference: SavedLedger) -> Iterator[Finding]:
    """What the two runs were to compute otherwise, as one finding."""
    differing = []
    models = [[(part.name, part.model) for part in each.plan.parts] for each in (run, reference)]
    if models[0] != models[1]:
        differing.append("the models are others")
    for section in OF_THE_PROBLEM:
        one, other = getattr(run.plan, section), getattr(reference.plan, section)
        differing += [
            f"{section}.{entry.name} is {getattr(one, entry.name)!r} and was {getattr(other, entry.name)!r}"
            for entry in fields(one)
            if f"{section}.{entry.name}" not in HOW_KEYS and getattr(one, entry.name) != getattr(other, entry.name)
        ]
    differing += [
        f"numerics.{name} is {ours} and was {theirs}"
        for name, ours, theirs in run.numerics.differences(reference.numerics)
        if name != "mode"
    ]
    if differing:
        hint = "Compare runs of one problem: only layout, schedule, recomputation and machines may differ."
        yield Finding("other-problem", "error", "the plans", f"{'; '.join(differing)}.", hint)


def other_machines(run: SavedLedger | RecordedLedger, reference: SavedLedger | RecordedLedger) -> Iterator[Finding]:
    """Differences of machine and libraries, across which bits are not promised."""
    kinds = [tuple(sorted(each.items())) for each in (*run.environments, *reference.environments)]
    if len(set(kinds)) > 1:
        names = sorted(
            {name for kind in kinds for name, value in kind if any((name, value) not in other for other in kinds)}
        )
        values = "; ".join(
            f"{name}: {', '.join(sorted({dict(kind).get(name, 'none') for kind in kinds}))}" for name in names
        )
        yield Finding(
            "other-machine",
            "info",
            "the ranks",
            (f"bits are promised on one kind of machine, and these differ in {values}."),
        )


def _text(run: SavedLedger, reference: SavedLedger, report: dict[str, Any], findings: Sequence[Finding]) -> str:
    promise = "bits are compared" if report["bitwise"] else "bits are not promised: differences are held to bounds"
    sides = [f"{each.path} ({each.plan.world_size} ranks, {each.plan.numerics.mode})" for each in (run, reference)]
    lines = [f"{' against '.join(sides)}: {promise}."]
    if not report["tensors_different"]:
        lines.append(f"0 different bits in {report['tensors_compared']:,} tensors of {report['steps']} steps.")
    else:
        lines.append(f"{differing_words(report['tensors_different'])} of {report['tensors_compared']:,}.")
    return "\n".join([*lines, *map(str, findings)])
