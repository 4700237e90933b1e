"""Which layouts a search looks at: degrees, microbatch, schedule, sequence parallelism, recomputation and ZeRO,
as far as they are free; what it looks at besides on demand is in `freed`.

They come in families, whose layers cost the same; a family has cuts, which differ in more than the ZeRO
stage, and a cut has plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import product
from typing import Any, Literal, NamedTuple

from ...core.base.divisors import divisors
from ...core.base.errors import LayoutError, PlanError
from ...core.commands.options import SHARED_WITH_PLANS, SearchSpace
from ...core.layout.layout import DEFAULT_ORDER, Layout
from ...core.layout.microbatches import microbatch_counts
from ...core.layout.stages import balanced_stages
from ...core.plan.batch_sizes import sizes_of
from ...core.plan.plan import Plan
from ...core.plan.rules import Rule, broken_rules
from ...core.plan.rules.schedule import actions_are_bounded
from ...core.plan.runtime import Recompute
from ...core.plan.sections import Batch, DataParallel, ScheduleChoice
from ...core.schedule import CATALOG
from ..cost.pricing import Pricing
from ..stack.profiles import PROFILES
from .freed import STAGES, is_another, without_whole
from .legal import Legality
from .min_max import min_max_stages, work_of

MICRO_SIZES = (1, 2, 4, 8, 16)
"""Microbatch sizes tried unless one is pinned."""

MAX_CHUNKS = 8
"""Most stages per pipeline rank tried unless vpp is pinned."""

MIN_CONTEXT_TOKENS = 4096
"""Fewest tokens that context parallelism leaves a rank unless cp is pinned: the ring's exchange hides behind attention,
which grows with the square, and shorter parts were never worth a cut (Llama 3, arXiv 2407.21783, section 3.3.2: cp=16
at 131,072 tokens, 1 at 8,192)."""

RECOMPUTE_MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")

_NOTHING_RECOMPUTED = Recompute("none")

DEGREES = ("layout.tp", "layout.cp", "layout.pp", "layout.dp", "layout.ep", "layout.etp")


@dataclass
class Tally:
    """What became of the combinations so far."""

    rejected: Counter[str] = field(default_factory=Counter)
    evaluated: int = 0
    simulated: int = 0

    def reject(self, reason: str, count: int = 1) -> None:
        """So many more combinations are decided."""
        self.rejected[reason] += count
        self.evaluated += count


class Skeleton(NamedTuple):
    """Degrees and chunks, and the schedules of one placement that can be built for them, each with the ZeRO stages to
    try."""

    layout: Layout
    zeros: Mapping[str, tuple[int, ...]]

    @property
    def schedules(self) -> tuple[str, ...]:
        """Names of the schedules."""
        return tuple(self.zeros)


class Family(NamedTuple):
    """Layouts of a space that differ in chunks, cut of the layers, schedule and ZeRO stage only, so that their layers
    cost the same: one plan of them, what makes the others, and a lower bound on the memory of each."""

    space: SearchSpace
    plan: Plan
    skeletons: tuple[Skeleton, ...]
    least_bytes: int = 0

    @property
    def size(self) -> int:
        """Plans of the family."""
        return sum(len(zeros) for skeleton in self.skeletons for zeros in skeleton.zeros.values())


class Cut(NamedTuple):
    """Layouts of a space that differ in their ZeRO stage only: the plan of the first one, the schedule's name, and the
    stages."""

    space: SearchSpace
    plan: Plan
    schedule: str
    zeros: tuple[int, ...]

    @property
    def size(self) -> int:
        """Plans of the cut."""
        return len(self.zeros)


class _Draft(NamedTuple):
    """Degrees and chunks before the microbatch is known: their layout (None where it is illegal), the schedules to try
    and which of them have a problem with the chunks, and the first rule that is broken whatever the microbatch. Not
    `is_searched` where other spaces have the layout too."""

    layout: Layout | None
    names: tuple[str, ...] = ()
    problems: tuple[bool, ...] = ()
    broken: tuple[int, Rule] | None = None
    is_searched: bool = False


@dataclass(frozen=True)
class Pinned:
    """Values fixed by the user take the place of those a search would try."""

    space: SearchSpace

    def __post_init__(self) -> None:
        if "schedule.file" in self.space.pinned:
            raise PlanError(
                "a search chooses among schedules by name, and a CSV file fits one layout only. Give "
                "--schedule NAME, or none."
            )

    def values(self, key: str, otherwise: Any) -> tuple[Any, ...]:
        """The pinned value alone, or what a search tries."""
        return (self.space.pinned[key],) if key in self.space.pinned else tuple(otherwise)

    def one(self, key: str, otherwise: Any = None) -> Any:
        """The pinned value or the default."""
        return self.space.pinned.get(key, otherwise)


def families(space: SearchSpace, tally: Tally, part: tuple[int, int] = (1, 1)) -> Iterator[Family]:
    """All families that obey the rules, of the degrees that are a part's: (number, of how many). Counts what breaks a
    rule: where the degrees, the chunks or the microbatch do, all combinations with them once."""
    pinned, legality = Pinned(space), Legality(_shared_nouns(space), space.batch)
    _check_recompute(space, pinned)
    batches = [replace(space.batch, micro_size=micro) for micro in pinned.values("batch.micro", MICRO_SIZES)]
    found, base = False, None
    number, of = part
    for place, degrees in enumerate(_degrees(space, pinned)):
        found = True
        if place % of != number - 1:
            continue
        chunks = pinned.values("layout.vpp", range(1, MAX_CHUNKS + 1) if degrees["pp"] > 1 else (1,))
        drafts = [_draft(space, pinned, legality, {**degrees, "vpp": vpp}) for vpp in chunks]
        for batch in batches:
            skeletons = [each for draft in drafts for each in _skeletons(tally, legality, draft, batch)]
            zeros = _zeros(space, pinned, tally, skeletons[0][0]) if skeletons else ()
            if zeros:
                tried = tuple(Skeleton(layout, dict.fromkeys(names, zeros)) for layout, names in skeletons)
                for plan in _recomputed(space, pinned, tried[0], batch, zeros[0], base):
                    base = plan
                    more = _min_max_cuts(space, plan, tried) if STAGES in space.free else ()
                    yield Family(space, plan, (*tried, *more))
    if not found:
        raise PlanError(_no_degrees(space))


def cuts(family: Family) -> Iterator[list[Cut]]:
    """The cuts of a family, those together that differ in the order of their schedule only."""
    for skeleton in family.skeletons:
        first = first_plan(family, skeleton)
        yield [Cut(family.space, first, name, zeros) for name, zeros in skeleton.zeros.items()]


def first_plan(family: Family, skeleton: Skeleton) -> Plan:
    """The plan of a family with the degrees of a skeleton and the first of its schedules."""
    plan, layout = family.plan, family.plan.layout
    cut = _cut_layout(skeleton.layout, layout.sequence_parallel, layout.zero)
    return _changed(plan, layout=cut, schedule=_choice(skeleton.schedules[0], plan.schedule.max_active_stages))


def without_recomputation(family: Family) -> Plan:
    """The plan of a family with nothing recomputed."""
    return _changed(family.plan, recompute=_NOTHING_RECOMPUTED)


def with_schedule(family: Family, layout: Layout, schedule: str, zero: int) -> Plan:
    """The plan of a family with the degrees of a layout, a schedule and a ZeRO stage."""
    cut = _cut_layout(layout, family.plan.layout.sequence_parallel, zero)
    return with_zero(_changed(family.plan, layout=cut), family.space, Pinned(family.space), schedule, zero)


def variants(cut: Cut) -> Iterator[Plan]:
    """The plans of a cut, one for every ZeRO stage."""
    space, pinned = cut.space, Pinned(cut.space)
    for zero in cut.zeros:
        yield with_zero(cut.plan, space, pinned, cut.schedule, zero)


def with_zero(plan: Plan, space: SearchSpace, pinned: Pinned, schedule: str, zero: int) -> Plan:
    """The plan with another schedule and ZeRO stage."""
    data_parallel = space.data_parallel if zero else _whole(space.data_parallel)
    choice = _choice(schedule, pinned.one("schedule.max_active_stages") if zero == 3 else None)
    if (plan.layout.zero, plan.data_parallel, plan.schedule) == (zero, data_parallel, choice):
        return plan
    layout = _cut_layout(plan.layout, plan.layout.sequence_parallel, zero)
    return _changed(plan, layout=layout, data_parallel=data_parallel, schedule=choice)


@lru_cache(maxsize=16)
def _whole(data_parallel: DataParallel) -> DataParallel:
    """Without ZeRO there are no shards, and no weights to gather."""
    return replace(data_parallel, shard=None, overlap_param_gather=None)


@lru_cache(maxsize=256)
def _choice(name: str, max_active_stages: int | None = None) -> ScheduleChoice:
    return ScheduleChoice(name, max_active_stages=max_active_stages)


def _cut_layout(layout: Layout, sequence_parallel: bool, zero: int) -> Layout:
    """A layout with other values of what has no rule to obey but its own range, which are not checked again."""
    if (layout.sequence_parallel, layout.zero) == (sequence_parallel, zero):
        return layout
    made = object.__new__(Layout)
    made.__dict__.update(layout.__dict__, sequence_parallel=sequence_parallel, zero=zero)
    return made


def _changed(plan: Plan, **nouns: Any) -> Plan:
    """The plan with nouns that are known to obey the rules: as `dataclasses.replace`, which would check
    all of them every time."""
    return Plan.of_checked({name: nouns[name] if name in nouns else getattr(plan, name) for name in _NOUNS})


_NOUNS = tuple(entry.name for entry in fields(Plan))


def _degrees(space: SearchSpace, pinned: Pinned) -> Iterator[dict[str, Any]]:
    """Degrees, of which tp*cp*pp*dp is the number of devices; experts are spread in every way. Heads are cut
    evenly unless tp is pinned."""
    devices, model = space.cluster.num_devices, space.model
    even = [degree for degree in divisors(devices) if model.num_kv_heads % degree == 0]
    for tp in pinned.values("layout.tp", even):
        for cp in pinned.values("layout.cp", _context_degrees(space, devices // tp)):
            for pp in pinned.values("layout.pp", [n for n in divisors(devices // (tp * cp)) if n <= model.num_layers]):
                for dp in pinned.values("layout.dp", [devices // (tp * cp * pp)]):
                    if tp * cp * pp * dp == devices:
                        for ep, etp in _expert_degrees(space, pinned, tp, tp * cp * dp):
                            yield {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep, "etp": etp}


def _context_degrees(space: SearchSpace, devices: int) -> list[int]:
    """Degrees of context parallelism that leave a rank enough tokens."""
    sequence = space.batch.sequence
    return [
        cp for cp in divisors(devices) if cp == 1 or (sequence // cp >= MIN_CONTEXT_TOKENS and sequence % (2 * cp) == 0)
    ]


def _expert_degrees(space: SearchSpace, pinned: Pinned, tp: int, ranks: int) -> Iterator[tuple[int, int | None]]:
    """(ep, etp): experts over the ranks of a pipeline stage, each cut as attention is, or whole."""
    model = space.model
    spread = pinned.values("layout.ep", divisors(model.num_experts) if model.is_moe else (1,))
    cut = pinned.values("layout.etp", (None, 1) if model.is_moe and tp > 1 else (None,))
    for ep, etp in product(spread, cut):
        if ranks % (ep * (etp or tp)) == 0:
            yield ep, etp


def _no_degrees(space: SearchSpace) -> str:
    """Why no degrees are left to decide: the pinned ones do not make the number of devices."""
    devices, model = space.cluster.num_devices, space.model
    pinned = {key.removeprefix("layout."): value for key, value in space.pinned.items() if key in DEGREES}
    given = "*".join(pinned) + "=" + "*".join(map(str, pinned.values()))
    return (
        f"{given} does not divide {devices} devices, or leaves no pp of at most num_layers={model.num_layers}, so "
        "there is no layout to "
        f"choose from. Leave these degrees to the search, or use divisors of {devices}: "
        f"{', '.join(map(str, divisors(devices)))}."
    )


def _draft(space: SearchSpace, pinned: Pinned, legality: Legality, degrees: dict[str, Any]) -> _Draft:
    """What is known of degrees and chunks before the microbatch is."""
    try:
        layout = Layout(
            **degrees, order=pinned.one("layout.order", DEFAULT_ORDER), stages=_stages(space, pinned, degrees)
        )
    except LayoutError:
        return _Draft(None)
    layout = _cut_layout(layout, _must_cut_sequence(layout), layout.zero)
    if not is_another(space, layout):
        return _Draft(layout)
    names = pinned.values("schedule.name", _names(space, layout.pp, layout.vpp))
    problems = tuple(bool(CATALOG[name].vpp_problem(layout.pp, layout.vpp)) for name in names)
    return _Draft(layout, names, problems, legality.of_layout(layout), is_searched=True)


def _skeletons(tally: Tally, legality: Legality, draft: _Draft, batch: Batch) -> list[tuple[Layout, tuple[str, ...]]]:
    """Which schedules can run with these degrees, chunks and microbatch, those of one placement together."""
    layout = draft.layout
    if layout is None:
        tally.reject("illegal-layout")
        return []
    if not draft.is_searched:
        return []
    if broken := legality.broken(layout, batch, draft.broken):
        tally.reject(broken.name)
        return []
    if draft.names and any(actions_are_bounded(batch, layout, _choice(draft.names[0]))):  # as long whatever the order
        tally.reject("actions-are-bounded")
        return []
    legal: dict[object, list[str]] = {}
    multiples = {CATALOG[name].multiple for name in draft.names}
    counts = {multiple: _all_counts(batch, layout, multiple) for multiple in multiples}
    for name, problem in zip(draft.names, draft.problems, strict=True):
        known = CATALOG[name]
        if problem:
            tally.reject("interleaving-matches")
        elif any(known.condition(layout.pp, count) for count in counts[known.multiple]):
            tally.reject("schedule-can-be-built")
        else:
            legal.setdefault(known.placement, []).append(name)
    return [(layout, tuple(same_cut)) for same_cut in legal.values()]


def _all_counts(batch: Batch, layout: Layout, multiple: int) -> list[int]:
    """Microbatches of a rank in a step, of every batch that steps have."""
    micro, dp = batch.micro_size, layout.dp
    return [count for size in sizes_of(batch) for count in microbatch_counts(size, micro, dp, multiple)]


def microbatches(batch: Batch, layout: Layout, multiple: int) -> tuple[int, ...]:
    """The numbers of microbatches that data-parallel ranks have."""
    return microbatch_counts(batch.global_size, batch.micro_size, layout.dp, multiple)


def _stages(space: SearchSpace, pinned: Pinned, degrees: dict[str, Any]) -> str | None:
    """The layout string that is pinned, or a balanced one where the stages do not divide the layers."""
    num_layers, num_stages = space.model.num_layers, degrees["pp"] * degrees["vpp"]
    otherwise = balanced_stages(num_layers, num_stages) if num_layers % num_stages else None
    found: str | None = pinned.one("layout.stages", otherwise)
    return found


def _names(space: SearchSpace, pp: int, vpp: int) -> list[str]:
    """Schedules for so many ranks and chunks; on one rank all orders of whole passes are plain
    gradient accumulation."""
    if pp == 1:
        return ["1F1B"]
    return [name for name in PROFILES[space.runtime.profile].schedules if CATALOG[name].nearest_vpp(vpp) == vpp]


def _shared_nouns(space: SearchSpace) -> dict[str, Any]:
    return {name: getattr(space, name) for name in SHARED_WITH_PLANS if name not in ("batch", "data_parallel")}


def _zeros(space: SearchSpace, pinned: Pinned, tally: Tally, layout: Layout) -> tuple[int, ...]:
    """The ZeRO stages to try; groups of `data_parallel.shard` ranks must divide the data-parallel ranks."""
    zeros = without_whole(space, pinned.values("layout.zero", (0, 1, 2, 3) if layout.dp * layout.cp > 1 else (0,)))
    if space.data_parallel.shard is None:
        return zeros
    sharding = DataParallel(shard=space.data_parallel.shard)
    broken = broken_rules({"data_parallel": sharding, "layout": replace(layout, zero=1), "model": space.model})
    if not broken:
        return zeros
    tally.reject(broken[0].rule.name)
    return tuple(zero for zero in zeros if zero == 0)


def _min_max_cuts(space: SearchSpace, plan: Plan, skeletons: Sequence[Skeleton]) -> Iterator[Skeleton]:
    """The skeletons of a family with the cut by min-max of its own layers' seconds, where that is another."""
    work = work_of(plan, Pricing(plan)) if plan.layout.pp > 1 else None
    if work is None:
        return
    for skeleton in skeletons:
        first = first_plan(Family(space, plan, ()), skeleton)
        stages = min_max_stages(work, first.placement)
        if stages is None:
            continue
        other = _changed(first, layout=replace(first.layout, stages=stages))
        if other.stages != first.stages:
            yield skeleton._replace(layout=replace(skeleton.layout, stages=stages))


def _recomputed(
    space: SearchSpace, pinned: Pinned, skeleton: Skeleton, batch: Batch, zero: int, base: Plan | None
) -> Iterator[Plan]:
    """The plan with every choice of sequence parallelism and recomputation. `base` is another plan of the space, if
    there is one already: of what differs from it all rules have been asked."""
    layout, schedule = skeleton.layout, skeleton.schedules[0]
    can, must = _can_cut_sequence(layout, batch), _must_cut_sequence(layout)
    first: Plan | None = None
    for split in pinned.values("layout.sequence_parallel", (True, False) if can else (False,)):
        if not (can if split else not must):
            continue
        for mode in pinned.values("recompute.mode", RECOMPUTE_MODES):
            recompute = _recompute(mode, pinned, space)
            if split and recompute.distribute:  # tokens that are cut leave nothing to distribute
                continue
            nouns: dict[str, Any] = {"layout": _cut_layout(layout, split, zero), "recompute": recompute}
            if first is None:
                nouns |= {"batch": batch, "schedule": _choice(schedule)}
                if base is None:
                    nouns["layout"] = replace(layout, sequence_parallel=split, zero=zero)  # a pinned one may be wrong
                plan = Plan(**_shared_nouns(space), **nouns) if base is None else _changed(base, **nouns)
                first = with_zero(plan, space, pinned, schedule, zero)
                yield first
            else:
                yield _changed(first, **nouns)


def _recompute(mode: Any, pinned: Pinned, space: SearchSpace) -> Recompute:
    """The mode with what the user fixed about it. A stack that goes by operations keeps the attention core
    unless the user names it."""
    if mode == "full":
        limits = {name: pinned.one(f"recompute.{name}") for name in ("num_layers", "layers")}
        return Recompute(mode, distribute=bool(pinned.one("recompute.distribute", False)), **limits)
    usual = ("norm",) if PROFILES[space.runtime.profile].selective_operators else Recompute().modules
    return (
        Recompute(mode, modules=tuple(pinned.one("recompute.modules", usual)))
        if mode == "selective"
        else Recompute(mode)
    )


def _check_recompute(space: SearchSpace, pinned: Pinned) -> None:
    """Raises `PlanError` where what is pinned about recomputation does not suit the model or the mode."""
    for mode in pinned.values("recompute.mode", RECOMPUTE_MODES):
        if broken := broken_rules({"recompute": _recompute(mode, pinned, space), "model": space.model}):
            raise PlanError([problem.sentence for problem in broken])


def _can_cut_sequence(layout: Layout, batch: Batch) -> bool:
    return layout.tp > 1 and batch.sequence // layout.cp % layout.tp == 0


def _must_cut_sequence(layout: Layout) -> bool:
    """True where every tensor-parallel rank sends tokens of its own to the experts."""
    return layout.tp > 1 and layout.expert_tp != layout.tp
