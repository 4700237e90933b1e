"""Compares two saved ledgers: any two layouts of one problem, after the fact. Names the first tensor that differs, where, and how.

Runs in exact numerics on one kind of machine have equal bits, so every difference is a fault. Between other runs rounding differs; what a
difference may then be is bounded (`bounds`) in the first step, before which both have the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from ..core.findings import Finding
from ..core.layout import Layout
from ..core.model import ModelSpec
from ..core.modules import ModularPlan
from ..core.plan import Plan
from .bounds import StepBounds
from .compare import Difference, action_of, compare, name_of, places, whole_summary
from .digest import EMPTY, Digest, Region
from .ledger import HELD_OUT, NO_STEP, Piece
from .ledger_file import SavedLedger
from .modules import AnyPlan, plan_of_rank
from .summary import Summary

AXES = ("tp", "cp", "dp", "ep", "etp", "pp")
LARGEST_RATIO = 64
ROUNDING = 1e-5
"""A distance below this part of the norm is what other orders of the same fp32 sums give."""
SAME_RATIO = 1e-6
"""Sums of a tensor and of a multiple of it agree to rounding."""

PROBLEMS = {
    "missing": ("the reference has this tensor, and no rank of the run.", "Look at which layers and leaves each rank holds."),
    "extra": ("the run has this tensor, and the reference has not.", "Look at which layers and leaves each rank holds."),
    "incomplete": ("the pieces of the ranks do not make up the whole tensor exactly once.", "Look at which part each rank holds."),
    "unclear": ("these ranks of the reference hold the same tensor and have other bits.", "Find what is wrong in the reference first."),
}
"""What and hint by the problem of a difference."""

HINTS = {
    "not finite": "Look at what feeds it: the last tensor before it was right.",
    "stale": "Something was not refreshed in this step: look at what copies it, and at waits that are missing.",
    "missing": "A contribution was dropped or a buffer was zeroed: look at the reduction of this tensor.",
    "permuted": "Shards or chunks were put together in another order: look at gathers and at the order of ranks.",
    "doubled": "Something was added twice: look at reductions over replicas, and at contributions that are counted on two ranks.",
    "scaled": "A sum was divided or multiplied once too often: look at where the axis of this ratio is averaged.",
    "order only": "Another order of the same sums: look for a reduction that is not exact.",
    "other values": "Look at what feeds it: the last tensor before it was right.",
}
"""Where to look, by kind of relation."""

HOW_KEYS = frozenset({"batch.micro_size", "numerics.mode", "precision.gradient_dtype", "train.timeout_s", "train.steps"})
"""Fields that do not change what exact numerics compute."""

OF_THE_PROBLEM = ("batch", "precision", "numerics", "optimizer", "train")
"""Sections of a plan that say what is computed; all others say how."""


@dataclass(frozen=True)
class Relation:
    """How the wrong values of a tensor relate to the right ones: `kind` for machines, `words` for people."""

    kind: str
    words: str
    distance: float
    norm: float


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
    """Every tensor of `run` against that of `reference`."""
    judge = _Judge(run, reference)
    differences = compare(reference.run, run.run, run.plan.model if isinstance(run.plan, Plan) else run.plan)
    judged = [(each, judge.finding(each)) for each in differences]
    wrong = [(difference, finding) for difference, finding in judged if finding.severity == "error"]
    explained = [finding for _, finding in judged if finding.severity != "error"]
    findings = [*judge.premises, *(finding for _, finding in wrong[:1])]
    if len(wrong) > 1:
        names = list(dict.fromkeys(name_of(difference.key._replace(sample=None)) for difference, _ in wrong[1:]))
        findings.append(
            Finding("bits-differ-later", "info", "later in dataflow order", f"{_count(len(wrong) - 1)} more, first {', '.join(names[:3])}.")
        )
    if explained:
        what = f"{_count(len(explained))} as other orders of the same sums do. First, {explained[0].where}: {explained[0].what}"
        findings.append(Finding("order-of-sums", "info", "all steps", what))
    report = {
        "ok": not any(finding.severity == "error" for finding in findings),
        "findings": [finding.to_dict() for finding in findings],
        "steps": len({key.step for key in reference.run.pieces if key.phase != HELD_OUT}),
        "losses": run.run.scalars("loss"),
        "tensors_compared": len(reference.run.pieces),
        "tensors_different": len(differences),
        "tensors_explained": len(explained),
        "first_divergence": judge.divergence(wrong[0][0]) if wrong else None,
        "bitwise": judge.bitwise,
    }
    return Comparison(report, tuple(findings), _text(run, reference, report, findings))


class _Judge:
    """What a difference between two runs means: `premises` are findings about the runs themselves, `bitwise` says whether equal bits are
    promised."""

    def __init__(self, run: SavedLedger, reference: SavedLedger):
        self.run, self.reference = run, reference
        self.premises = [*_other_problem(run.plan, reference.plan), *_other_machines(run, reference)]
        self.bitwise = not self.premises and run.plan.numerics.mode == reference.plan.numerics.mode == "exact"
        self._bounds = StepBounds(run.plan) if isinstance(run.plan, Plan) else None
        first = {key: pieces for key, pieces in reference.run.pieces.items() if key.step == 0}
        self._largest = {} if self.bitwise else {key: whole_summary(pieces).largest for key, pieces in first.items()}

    def finding(self, difference: Difference) -> Finding:
        """A fault, or what other orders of the same sums explain."""
        key = difference.key
        when = "before the first step" if key.step == NO_STEP else f"step {key.step + 1}"
        where = ", ".join([when, *places(self.run.plan, key, difference.global_ranks), name_of(key)])
        if difference.problem != "differs":
            what, hint = PROBLEMS[difference.problem]
            return Finding(f"tensor-{difference.problem}", "error", where, what, hint)
        relation = self.relation(difference)
        if self.bitwise or relation.kind not in ("order only", "other values"):
            return Finding("bits-differ", "error", where, f"{relation.words}.", HINTS[relation.kind])
        if key.step > 0 or key.phase == HELD_OUT or self._bounds is None:
            why = "modules have no bounds" if self._bounds is None else "the weights differed before this step"
            return Finding("order-of-sums", "info", where, f"{relation.words}; not judged, because {why}.")
        bound = self._bounds.of(key, self._largest) * math.sqrt(math.prod(self.reference.run.pieces[key][0].shape))
        share = relation.distance / bound if bound else math.inf
        if share <= 1:
            return Finding("order-of-sums", "info", where, f"{relation.words}, {share:.2g} of what other orders of the same sums may give.")
        what = f"{relation.words}, {share:.3g} times what other orders of the same sums may give."
        return Finding("not-explained", "error", where, what, HINTS[relation.kind])

    def relation(self, difference: Difference) -> Relation:
        """How the tensor of a difference relates to the right one: a piece that both have, else the whole tensor."""
        key, rank = difference.key, difference.global_ranks[0]
        expected, found = self.reference.run.pieces[key], self.run.run.pieces[key]
        piece = next(each for each in found if each.global_rank == rank and each.digest not in _digests(expected, each.region))
        right = next((each for each in expected if each.region == piece.region), None)
        layout = plan_of_rank(self.run.plan, rank).layout
        if right is None:
            return relate(whole_summary(expected), whole_summary(found, piece), layout=layout)
        before = [key._replace(step=step) for step in range(key.step)]
        earlier = [each.summary for old in before for each in self.run.run.pieces.get(old, ()) if _same_place(each, piece)]
        return relate(right.summary, piece.summary, before=earlier, layout=layout)

    def divergence(self, difference: Difference) -> dict[str, Any]:
        """The JSON form of the first divergence. Steps are counted from 1."""
        key, ranks = difference.key, difference.global_ranks
        action = action_of(self.run.plan, key, ranks[0]) if ranks else None
        relation = self.relation(difference) if difference.problem == "differs" else None
        return {
            "step": key.step + 1,
            "rank": ranks[0] if ranks else None,
            "ranks": list(ranks),
            "action": None if action is None else str(action),
            "microbatch": None if action is None else action.microbatch,
            "tensor": key.tensor,
            "phase": key.phase,
            "sample": key.sample,
            "problem": difference.problem,
            "class": None if relation is None else relation.kind,
            "distance": None if relation is None or not math.isfinite(relation.distance) else relation.distance,
            "norm": None if relation is None else relation.norm,
        }


def relate(expected: Summary, found: Summary, *, before: Sequence[Summary] = (), layout: Layout | None = None) -> Relation:
    """How `found` relates to `expected`; `before` are the same tensor's summaries in earlier steps, `layout` names axes of ratios."""
    distance, norm = found.distance(expected), expected.norm

    def relation(kind: str, words: str) -> Relation:
        return Relation(kind, words, distance, norm)

    if not (math.isfinite(found.largest) and all(map(math.isfinite, found.sums))):
        return relation("not finite", "not finite numbers")
    if found.digest in {each.digest for each in before} - {EMPTY}:
        return relation("stale", "the values of an earlier step")
    if found.largest == 0 < expected.largest:
        return relation("missing", "all zero")
    if found.alike == expected.alike:
        return relation("permuted", "the right values in other places")
    if (ratio := _ratio(expected, found)) is not None:
        axes = [] if layout is None else [axis for axis in AXES if _degree(layout, axis) in (ratio, 1 / ratio)]
        named = f", as {' or '.join(axes)} is" if axes else ""
        return relation("doubled" if ratio == 2 else "scaled", f"the right values times {ratio}{named}")
    if distance <= ROUNDING * norm:
        return relation("order only", f"off by {distance / norm:.1e} of their norm, as rounding is")
    return relation("other values", f"off by {distance / norm:.1e} of their norm" if norm else "not zero as they should be")


def _ratio(expected: Summary, found: Summary) -> Fraction | None:
    """The simple ratio of two tensors that are multiples of each other; None of all others, and 1 is none."""
    size = math.fsum(each * each for each in expected.sums)
    if not size:
        return None
    ratio = math.fsum(a * b for a, b in zip(expected.sums, found.sums, strict=True)) / size
    simple = Fraction(ratio).limit_denominator(LARGEST_RATIO)
    scale = math.sqrt(size)
    fits = all(
        abs(b - float(simple) * a) <= SAME_RATIO * abs(float(simple)) * scale for a, b in zip(expected.sums, found.sums, strict=True)
    )
    return simple if fits and simple not in (0, 1) and max(abs(simple.numerator), simple.denominator) <= LARGEST_RATIO else None


def _degree(layout: Layout, axis: str) -> int:
    return layout.expert_tp if axis == "etp" else int(getattr(layout, axis))


def _digests(pieces: Sequence[Piece], region: Region) -> set[Digest]:
    return {each.digest for each in pieces if each.region == region}


def _same_place(one: Piece, other: Piece) -> bool:
    return one.global_rank == other.global_rank and one.region == other.region


def _other_problem(plan: AnyPlan, reference: AnyPlan) -> Iterator[Finding]:
    """What the two runs were to compute otherwise, as one finding."""
    told = []
    models = [
        [(part.name, part.model) for part in each.parts] if isinstance(each, ModularPlan) else each.model for each in (plan, reference)
    ]
    if models[0] != models[1]:
        told.append("the models are others")
    for section in OF_THE_PROBLEM:
        one, other = getattr(plan, section), getattr(reference, section)
        told += [
            f"{section}.{entry.name} is {getattr(one, entry.name)!r} and was {getattr(other, entry.name)!r}"
            for entry in fields(one)
            if f"{section}.{entry.name}" not in HOW_KEYS and getattr(one, entry.name) != getattr(other, entry.name)
        ]
    if told:
        hint = "Compare runs of one problem: only layout, schedule, recomputation and machines may differ."
        yield Finding("other-problem", "error", "the plans", f"{'; '.join(told)}.", hint)


def _models(plan: AnyPlan) -> list[tuple[str, ModelSpec]]:
    return [(part.name, part.model) for part in plan.parts] if isinstance(plan, ModularPlan) else [("", plan.model)]


def _other_machines(run: SavedLedger, reference: SavedLedger) -> Iterator[Finding]:
    """Differences of machine and libraries, across which bits are not promised."""
    kinds = [tuple(sorted(each.items())) for each in (*run.environments, *reference.environments)]
    if len(set(kinds)) > 1:
        names = sorted({name for kind in kinds for name, value in kind if any((name, value) not in other for other in kinds)})
        values = "; ".join(f"{name}: {', '.join(sorted({dict(kind).get(name, 'none') for kind in kinds}))}" for name in names)
        yield Finding("other-machine", "info", "the ranks", f"bits are promised on one kind of machine, and these differ in {values}.")


def _count(number: int) -> str:
    return f"{number:,} tensor{' differs' if number == 1 else 's differ'}"


def _text(run: SavedLedger, reference: SavedLedger, report: dict[str, Any], findings: Sequence[Finding]) -> str:
    promise = "bits are compared" if report["bitwise"] else "bits are not promised: differences are held to bounds"
    sides = [f"{each.path} ({each.plan.world_size} ranks, {each.plan.numerics.mode})" for each in (run, reference)]
    lines = [f"{' against '.join(sides)}: {promise}."]
    if not report["tensors_different"]:
        lines.append(f"0 different bits in {report['tensors_compared']:,} tensors of {report['steps']} steps.")
    else:
        lines.append(f"{_count(report['tensors_different'])} of {report['tensors_compared']:,}.")
    return "\n".join([*lines, *map(str, findings)])
