"""`search`: which layout of a model on a cluster is fastest, and why the others lost.

Every combination of degrees, microbatch, recompute, ZeRO stage and schedule is decided: by a rule of the plan, by memory, by a lower
bound on its time, or by a full simulation. Candidates are simulated in the order of their bounds until no bound is below the slowest
of the best ones found, so the ranking is that of simulating everything.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from time import perf_counter
from typing import Any

from ..core.action import Kind
from ..core.divisors import divisors
from ..core.errors import LayoutError, PlanError
from ..core.layout import DEFAULT_ORDER, Layout
from ..core.options import SearchSpace
from ..core.plan import Plan, Recompute, ScheduleChoice
from ..core.plan_rules import broken_rules
from ..core.schedule import Schedule
from ..core.schedules import CATALOG, add_unshard, build
from .memory import RankMemory, rank_memories
from .pricing import Pricing
from .simulate import PROFILES, Simulation, simulate, worst

MICRO_SIZES = (1, 2, 4, 8, 16)
"""Microbatch sizes tried unless one is pinned."""

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")
"""Schedules tried unless one is pinned."""

MAX_CHUNKS = 8
"""Most stages per pipeline rank tried unless vpp is pinned."""

NUM_RANKED = 10
"""Candidates in the report."""

MAX_SIMULATIONS = 200
"""Simulations after which the search stops even if bounds are left below the best; the report then says so under `rejected`."""

SHARED_WITH_PLANS = ("model", "cluster", "batch", "precision", "runtime", "numerics", "optimizer")
"""What a search space takes from a plan."""

REASONS = {
    "out-of-memory": "the worst rank's peak is above the device's memory",
    "bound-above-best": "a lower bound on the step time is above the slowest ranked candidate",
    "slower": "simulated, and slower than the ranked candidates",
    "illegal-layout": "degrees or rank order contradict each other",
    "not-simulated": f"left over after {MAX_SIMULATIONS} simulations",
}
"""Reasons for a rejection beside the rules of `core.plan_rules`."""


@dataclass(frozen=True, eq=False)
class SearchResult:
    """`report` has the JSON keys of the interface; `plans` are the ranked plans, best first."""

    report: dict[str, Any]
    plans: tuple[Plan, ...] = ()


@dataclass
class _Tally:
    """What became of the combinations so far."""

    rejected: Counter[str] = field(default_factory=Counter)
    evaluated: int = 0
    simulated: int = 0


def search(space: SearchSpace | Plan) -> SearchResult:
    """The ranked layouts of a search space; of a plan, all but its layout, microbatch, recomputation and schedule is taken.

    Raises `PlanError` when values are pinned that a search cannot take, or pinned degrees that do not make the number of devices.

    `rejected` counts combinations of all free values; where a rule already forbids the degrees or the microbatch, all combinations
    with them count once.
    """
    started = perf_counter()
    tally = _Tally()
    if isinstance(space, Plan):
        space = SearchSpace(**{name: getattr(space, name) for name in SHARED_WITH_PLANS})
    if not any(_degrees(space, _Pinned(space))):
        raise PlanError(_no_degrees(space))
    bounded = sorted(_feasible(space, tally), key=lambda entry: entry[0])
    ranked: list[tuple[float, int, Simulation]] = []
    for position, (bound_s, plan) in enumerate(bounded):
        if len(ranked) >= NUM_RANKED and bound_s > ranked[NUM_RANKED - 1][0]:
            tally.rejected["bound-above-best"] += len(bounded) - position
            break
        if tally.simulated == MAX_SIMULATIONS:
            tally.rejected["not-simulated"] += len(bounded) - position
            break
        simulation = simulate(plan)
        tally.simulated += 1
        bisect.insort(ranked, (simulation.report["step_time_s"], position, simulation))
    tally.rejected["slower"] += max(0, len(ranked) - NUM_RANKED)
    best = [simulation for _, _, simulation in ranked[:NUM_RANKED]]
    report = {
        "candidates": [_candidate(simulation) for simulation in best],
        "evaluated": tally.evaluated,
        "simulated": tally.simulated,
        "rejected": {reason: count for reason, count in sorted(tally.rejected.items()) if count},
        "elapsed_s": perf_counter() - started,
    }
    return SearchResult(report, tuple(simulation.plan for simulation in best))


def _feasible(space: SearchSpace, tally: _Tally) -> Iterator[tuple[float, Plan]]:
    """(lower bound in seconds, plan) of every combination that obeys the rules and fits."""
    shared: dict[tuple[object, ...], Any] = {}
    capacity = space.cluster.device_memory_bytes
    for skeleton in _skeletons(space, tally):
        for plan in _variants(skeleton, space):
            tally.evaluated += 1
            if worst(_memories(plan)).peak_bytes > capacity:
                tally.rejected["out-of-memory"] += 1
            else:
                gathers_scheduled = plan.schedule.max_active_stages is not None
                yield lower_bound_s(plan, Pricing(plan, gathers_scheduled=gathers_scheduled, shared=shared)), plan


def _skeletons(space: SearchSpace, tally: _Tally) -> Iterator[Plan]:
    """Plans with degrees, microbatch and schedule chosen, without sequence parallelism, ZeRO and recompute."""
    pinned = _Pinned(space)
    for tp, pp, dp in _degrees(space, pinned):
        chunks = [vpp for vpp in range(1, MAX_CHUNKS + 1) if pp > 1 or vpp == 1]
        for vpp, micro in product(pinned.values("layout.vpp", chunks), pinned.values("batch.micro", MICRO_SIZES)):
            names = [name for name in SCHEDULES if CATALOG[name].nearest_vpp(vpp) == vpp and (pp > 1 or name == "1F1B")]
            for name in pinned.values("schedule.name", names):
                plan = _plan(space, {"tp": tp, "pp": pp, "dp": dp, "vpp": vpp}, micro, name)
                if isinstance(plan, Plan):
                    yield plan
                else:
                    tally.evaluated += 1
                    tally.rejected[plan] += 1


def _plan(space: SearchSpace, degrees: dict[str, Any], micro: int, schedule: str) -> Plan | str:
    """The plan with these choices, or the name of the first rule that it breaks."""
    pinned = _Pinned(space)
    try:
        layout = Layout(**degrees, order=pinned.one("layout.order", DEFAULT_ORDER), stages=pinned.one("layout.stages"))
    except LayoutError:
        return "illegal-layout"
    nouns: dict[str, Any] = {
        "model": space.model,
        "cluster": space.cluster,
        "layout": layout,
        "batch": replace(space.batch, micro_size=micro),
        "runtime": space.runtime,
        "precision": space.precision,
        "recompute": Recompute(),
        "schedule": ScheduleChoice(schedule),
        "numerics": space.numerics,
        "optimizer": space.optimizer,
    }
    broken = broken_rules(nouns)
    return broken[0].rule.name if broken else Plan(**nouns)


def _degrees(space: SearchSpace, pinned: _Pinned) -> Iterator[tuple[int, int, int]]:
    """(tp, pp, dp) whose product is the number of devices."""
    devices = space.cluster.num_devices
    for tp in pinned.values("layout.tp", divisors(devices)):
        for pp in pinned.values("layout.pp", [n for n in divisors(devices // tp) if n <= space.model.num_layers]):
            for dp in pinned.values("layout.dp", [devices // (tp * pp)]):
                if tp * pp * dp == devices:
                    yield tp, pp, dp


def _no_degrees(space: SearchSpace) -> str:
    """Why no degrees are left to decide: the pinned ones do not make the number of devices."""
    devices, model = space.cluster.num_devices, space.model
    pinned = {key.removeprefix("layout."): value for key, value in space.pinned.items() if key in ("layout.tp", "layout.pp", "layout.dp")}
    given = "*".join(pinned) + "=" + "*".join(map(str, pinned.values()))
    return (
        f"{given} does not divide {devices} devices, or leaves no pp of at most num_layers={model.num_layers}, so there is no layout to "
        f"choose from. Leave these degrees to the search, or use divisors of {devices}: {', '.join(map(str, divisors(devices)))}."
    )


def _variants(skeleton: Plan, space: SearchSpace) -> Iterator[Plan]:
    """The skeleton with every choice of sequence parallelism, ZeRO stage and recompute mode."""
    pinned, layout = _Pinned(space), skeleton.layout
    sequence_parallel = pinned.values("layout.sequence_parallel", (True, False) if _can_cut_sequence(skeleton) else (False,))
    zero = pinned.values("layout.zero", (0, 1, 2, 3) if layout.dp > 1 else (0,))
    modes = pinned.values("recompute.mode", ("none", "selective", "full"))
    for sequence, stage, mode in product(sequence_parallel, zero, modes):
        if sequence and not _can_cut_sequence(skeleton):
            continue
        choice = replace(skeleton.schedule, max_active_stages=pinned.one("schedule.max_active_stages") if stage == 3 else None)
        cut = replace(layout, sequence_parallel=sequence, zero=stage)
        yield replace(skeleton, layout=cut, recompute=Recompute(mode), schedule=choice)


def _can_cut_sequence(plan: Plan) -> bool:
    return plan.layout.tp > 1 and plan.batch.sequence % plan.layout.tp == 0


@dataclass(frozen=True)
class _Pinned:
    """Values fixed by the user take the place of those a search would try."""

    space: SearchSpace

    def __post_init__(self) -> None:
        if "schedule.file" in self.space.pinned:
            raise PlanError("a search chooses among schedules by name, and a CSV file fits one layout only. Give --schedule NAME, or none.")

    def values(self, key: str, otherwise: Any) -> tuple[Any, ...]:
        """The pinned value alone, or what a search tries."""
        return (self.space.pinned[key],) if key in self.space.pinned else tuple(otherwise)

    def one(self, key: str, otherwise: Any = None) -> Any:
        """The pinned value or the default."""
        return self.space.pinned.get(key, otherwise)


def lower_bound_s(plan: Plan, pricing: Pricing) -> float:
    """Seconds that no run of the plan's schedule can beat, whatever its communication.

    A rank computes all its microbatches; before its first forward the forwards of the lower stages have to run once, after the last
    backward of its lowest stage those of the lower stages; then the slowest optimizer step follows. For 1F1B with equal stages and
    free messages this is the makespan itself. The lower stages count in schedules of one direction with whole backwards only: else a
    rank starts at either end, or fills the time after its last input gradient with weight gradients.
    """
    placement = plan.placement
    work = [pricing.seconds(Kind.F, s).total_s + pricing.seconds(Kind.B, s).total_s for s in range(placement.num_stages)]
    longest, below, steps_s = 0.0, 0.0, 0.0
    for pp_rank in range(placement.num_ranks):
        stages = placement.stages_of(pp_rank)
        replicas = [placement.replica_of(stage, pp_rank) for stage in stages]
        counts = [hi - lo for lo, hi in map(placement.microbatches_of, stages, replicas)]
        longest = max(longest, below + sum(count * work[stage] for count, stage in zip(counts, stages, strict=True)))
        below += work[pp_rank] if plan.schedule.name in SCHEDULES else 0.0
        steps_s = max(steps_s, pricing.seconds(Kind.STEP, stages[0], replicas[0]).total_s)
    return longest + steps_s


def _memories(plan: Plan) -> tuple[RankMemory, ...]:
    """Peaks of the pipeline ranks. After two rounds of warm-up 1F1B holds no more, so few microbatches tell all."""
    layout, microbatches = plan.layout, plan.num_microbatches
    if plan.schedule.name in ("1F1B", "Interleaved1F1B"):
        microbatches = min(microbatches, 2 * layout.num_stages + microbatches % layout.pp)
    schedule = _compute_schedule(plan.schedule.name, layout.pp, layout.vpp, microbatches, plan.schedule.max_active_stages)
    return rank_memories(plan, schedule, PROFILES[plan.runtime.profile].recv_buffers)


@lru_cache(maxsize=256)
def _compute_schedule(name: str, pp: int, vpp: int, num_microbatches: int, max_active_stages: int | None) -> Schedule:
    schedule = build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    return schedule if max_active_stages is None else add_unshard(schedule, max_active_stages)


def _candidate(simulation: Simulation) -> dict[str, Any]:
    plan, report = simulation.plan, simulation.report
    layout, batch = plan.layout, plan.batch
    return {
        "layout": {
            "tp": layout.tp,
            "pp": layout.pp,
            "vpp": layout.vpp,
            "dp": layout.dp,
            "sequence_parallel": layout.sequence_parallel,
            "zero": layout.zero,
        },
        "batch": {"global": batch.global_size, "micro": batch.micro_size, "sequence": batch.sequence},
        "recompute": plan.recompute.mode,
        "schedule": plan.schedule.name,
        "step_time_s": report["step_time_s"],
        "mfu": report["mfu"],
        "peak_memory_bytes": report["peak_memory_bytes"],
    }
