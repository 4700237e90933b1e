"""A step on machines that differ: slow devices and links as they are known, and steps drawn at random
from seeded distributions.

Known differences give every data-parallel rank a pipeline of its own (`columns`), coupled where ranks wait for each
other (`replicas`); the report is then that of the slowest replica. Random ones are drawn `samples` times, each sample
from a generator of its own, so that sample i is the same whatever else is drawn. Contention between transfers is
that of the plan without differences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...core.machine.variation import NO_VARIATION, devices_named
from ...core.plan.plan import Plan
from ...core.schedule.action import SENDS, Kind
from ..cost.expert_load import Loads, draw_loads, joined
from ..cost.pricing import GraphPrices, Pricing
from ..engine.attribution import sorts_of
from ..engine.engine import Run, execute
from ..engine.graph import Graph
from ..engine.replicas import ReplicaRun, execute_replicas
from ..engine.seconds import GRID, Seconds
from ..memory.capacity import capacity_of_class
from ..memory.memory import RankMemory
from ..network.placement import replicas_placed_equally
from ..stack.provenance import Origin
from ..step.step import Simulation, report_of, simulate_first
from .columns import Columns, columns_of
from .draws import add_pauses, slowest
from .goodput import goodput_of

LARGEST_BLOCK = 1 << 21
"""Actions times columns that are drawn and run at a time."""

PRICED_LOADS = (0.0, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0)
"""Loads of the busiest experts at which actions are priced, where they occur; between them seconds are
taken to be straight."""

TRANSFERS = (Kind.REDUCE_GRAD, Kind.UNSHARD)
"""Collectives whose time `comm_jitter` spreads as well as that of messages, once for all their members;
`jitter` spreads computing."""

ORIGINS: dict[str, Origin] = {
    "variation": {
        "kind": "modelled",
        "source": ("simulator.variation.variation: every replica simulated with the differences that the plan gives"),
    },
    "goodput": {
        "kind": "modelled",
        "source": ("Daly 2006 (FGCS 22), for failures at a constant rate that the plan gives"),
    },
}
"""Where the keys come from that plans with a variation add to the report."""

PERCENTILES = (5, 25, 50, 75, 95, 99)


def simulate_varied(plan: Plan) -> Simulation:
    """`simulate` for a plan whose replicas lie differently over nodes, or whose `variation` says something.

    The report is that of the slowest replica; its entry `variation` compares it with the plan without differences and
    has the percentiles of the drawn steps, `goodput` what failures leave of them.
    """
    if plan.variation.is_nothing:
        return _with_differences(plan)
    nominal = _without_differences(replace(plan, variation=NO_VARIATION))
    found = _with_differences(plan) if plan.variation.has_differences else _again(plan, nominal)
    step_s = found.report["step_time_s"]
    if plan.variation.has_differences or plan.variation.is_random:
        report: dict[str, Any] = {"nominal_step_time_s": nominal.report["step_time_s"], "replica": found.dp_rank}
        report["slowed_by"] = step_s / nominal.report["step_time_s"]
        if plan.variation.device_classes:
            report["device_classes"] = _classes(plan, found.memory)
        if plan.variation.is_random:
            sampled = sample_steps(plan)
            report |= sampled.report(plan)
            step_s = float(sampled.step_s.mean())
        found.report["variation"] = report
    if plan.variation.device_mtbf_s is not None:
        found.report["goodput"] = goodput_of(plan, step_s).report()
    found.report["provenance"] = {
        **found.report["provenance"],
        **{name: ORIGINS[name] for name in ORIGINS if name in found.report},
    }
    return found


def _without_differences(plan: Plan) -> Simulation:
    """The step of a plan whose `variation` says nothing: its replicas may still lie differently over nodes."""
    return simulate_first(plan) if replicas_placed_equally(plan) else _with_differences(plan)


def _again(plan: Plan, nominal: Simulation) -> Simulation:
    """The same step, of the plan that says something about variation."""
    return replace(nominal, plan=plan, report=dict(nominal.report))


def _with_differences(plan: Plan) -> Simulation:
    """The slowest replica of the run in which devices and links differ as the plan says, and nodes
    as its layout has it."""
    base = _Base(plan)
    columns = columns_of(plan, base.sorts)
    # equal columns need no more than one of them each
    if all(size == plan.layout.dp for size in columns.couplings.values()):
        some = np.unique(columns.of_column, return_index=True)[1]
        columns = replace(columns, order=some, couplings=dict.fromkeys(columns.couplings, len(some)))
    duration_s = base.durations_s(columns)
    run = base.run(duration_s, columns, samples=1)
    compute = base.graph.is_compute & (base.graph.schedule.actions.kind != Kind.STEP)
    column = int(run.end_s[compute].max(axis=0).argmax())
    one = run.run(column)
    on_grid = Run(one.graph, np.round(one.start_s * GRID) / GRID, np.round(one.end_s * GRID) / GRID)
    prices = _coupled_prices(columns, base, column)
    dp_rank, memory = int(columns.order[column]), base.first.memory
    return Simulation(plan, on_grid, memory, report_of(plan, on_grid, prices, memory, dp_rank), prices, dp_rank)


def _coupled_prices(columns: Columns, base: _Base, column: int) -> tuple[Seconds, ...]:
    """Prices on one column, where an action that columns run together costs what it costs the slowest of them."""
    found = []
    for i, sort in enumerate(base.sorts.sorts):
        size = columns.couplings.get(sort.kind, 1)
        group = columns.order[column // size * size : column // size * size + size]
        numbers = set(columns.of_column[group].tolist())
        found.append(
            max((columns.prices[number][i] for number in sorted(numbers)), key=lambda seconds: seconds.total_s)
        )
    return tuple(found)


def _classes(plan: Plan, memory: tuple[RankMemory, ...]) -> list[dict[str, Any]]:
    """Every class of devices, and whether the pipeline ranks that have such devices fit into their memory."""
    found = []
    for name, names in plan.variation.device_classes.items():
        ranks = devices_named(names, plan.cluster)
        stages = {plan.layout.coordinates(rank)["pp"] for rank in ranks}
        peak = max(memory[pp_rank].peak_bytes for pp_rank in stages)
        capacity = capacity_of_class(plan, name).usable_bytes
        found.append({"class": name, "num_devices": len(ranks), "capacity_bytes": capacity, "peak_memory_bytes": peak})
    return found


@dataclass(frozen=True, eq=False)
class Sampled:
    """Drawn steps: `step_s` [samples] in seconds, and the loads of experts where those are drawn too."""

    step_s: np.ndarray
    loads: Loads | None

    def report(self, plan: Plan) -> dict[str, Any]:
        """The JSON keys."""
        step_s = self.step_s
        report: dict[str, Any] = {"samples": len(step_s), "seed": plan.variation.seed}
        summary = {"mean": step_s.mean(), "std": step_s.std(), "min": step_s.min()}
        summary |= {
            f"p{percent}": value for percent, value in zip(PERCENTILES, np.percentile(step_s, PERCENTILES), strict=True)
        }
        report["sampled_step_time_s"] = {
            name: float(value) for name, value in (summary | {"max": step_s.max()}).items()
        }
        report["tokens_per_s"] = plan.batch.global_size * plan.batch.sequence / float(step_s.mean())
        if self.loads is not None:
            of_layers = self.loads.of_layers
            busiest = {"mean": of_layers.mean(), "p99": np.percentile(of_layers, 99), "max": of_layers.max()}
            report["expert_load"] = {name: float(value) for name, value in busiest.items()}
            report["expert_max_violation"] = self.loads.max_violation
            report["dropped_tokens_share"] = self.loads.dropped_share
        return report


def sample_steps(plan: Plan) -> Sampled:
    """The steps that a plan's variation draws, sample i from the generator of (seed, i)."""
    base, variation = _Base(plan), plan.variation
    samples, dp = variation.samples, plan.layout.dp
    loads, tables = _load_tables(plan, base)
    columns = tables[0][1]
    each = max(1, LARGEST_BLOCK // max(1, len(base.graph.rank) * dp))
    step_s = np.empty(samples)
    for first in range(0, samples, each):
        last = min(samples, first + each)
        blocks = [_drawn(plan, base, _seconds_of(base, tables, loads, i), columns, i) for i in range(first, last)]
        run = base.run(np.concatenate(blocks, axis=1), columns, samples=last - first)
        step_s[first:last] = run.makespan_s.reshape(last - first, dp).max(axis=1)
    return Sampled(step_s, loads)


def _load_tables(plan: Plan, base: _Base) -> tuple[Loads | None, list[tuple[float, Columns]]]:
    """Loads of every sample, and the prices at the loads around those that stages have on average."""
    variation = plan.variation
    if variation.expert_imbalance is None:
        return None, [(1.0, columns_of(plan, base.sorts))]
    num_layers = sum(map(len, _moe_layers(plan)))
    loads = joined(
        [draw_loads(plan, num_layers, np.random.default_rng([variation.seed, i, 1])) for i in range(variation.samples)]
    )
    per_stage = np.stack([_stage_load(plan, loads, i) for i in range(variation.samples)])
    first, last = (
        int(np.searchsorted(PRICED_LOADS, load, side="right")) for load in (per_stage.min(), per_stage.max())
    )
    points = PRICED_LOADS[first - 1 : last + 1]
    return loads, [(load, columns_of(plan, base.sorts, expert_load=load)) for load in points]


def _moe_layers(plan: Plan) -> list[list[int]]:
    """The layers with experts of every stage."""
    return [[layer for layer in stage.layers if plan.model.layer_is_moe(layer)] for stage in plan.stages]


def _stage_load(plan: Plan, loads: Loads, sample: int) -> np.ndarray:
    """[stages] the mean load of a stage's MoE layers in one sample; 1 where it has none."""
    sizes = [len(layers) for layers in _moe_layers(plan)]
    parts = np.split(loads.of_layers[sample], np.cumsum(sizes)[:-1])
    return np.array([part.mean() if len(part) else 1.0 for part in parts])


class _Seconds:
    """Seconds of every sort of action [columns, sorts], all of them and those of computing."""

    def __init__(self, total_s: np.ndarray, computing_s: np.ndarray):
        self.total_s, self.computing_s = total_s, computing_s


def _seconds_of(base: _Base, tables: list[tuple[float, Columns]], loads: Loads | None, sample: int) -> _Seconds:
    """The prices of one sample: those of its experts' loads."""
    if loads is None:
        return base.seconds(tables[0][1])
    points = np.array([load for load, _ in tables])
    stage_load = _stage_load(base.plan, loads, sample)
    sort_load = np.array([_mean_load(stage_load, sort.stage, sort.pair_stage) for sort in base.sorts.sorts])
    place = np.clip(np.searchsorted(points, sort_load, side="right") - 1, 0, len(points) - 2)
    weight = (sort_load - points[place]) / (points[place + 1] - points[place])
    known = [base.seconds(columns) for _, columns in tables]
    sorts = np.arange(len(place))

    def between(name: str) -> np.ndarray:
        values = np.stack([getattr(seconds, name) for seconds in known])  # [loads, columns, sorts]
        return values[place, :, sorts].T * (1 - weight) + values[place + 1, :, sorts].T * weight

    return _Seconds(between("total_s"), between("computing_s"))


def _mean_load(stage_load: np.ndarray, stage: int, pair_stage: int) -> float:
    return float(stage_load[stage] if pair_stage < 0 else (stage_load[stage] + stage_load[pair_stage]) / 2)


def _drawn(plan: Plan, base: _Base, seconds: _Seconds, columns: Columns, sample: int) -> np.ndarray:
    """[actions, columns] durations of one sample."""
    variation, dp, devices = plan.variation, plan.layout.dp, plan.layout.tp * plan.layout.cp
    rng = np.random.default_rng([variation.seed, sample])
    kind: dict[str, Any] = {"distribution": variation.distribution, "devices": devices}
    numbers = columns.of_column[columns.order]
    duration_s = seconds.total_s[numbers].T[base.sorts.of_action] + base.stretched_s[:, None]
    rows = base.computing
    if variation.device_spread or variation.jitter:
        factor = slowest(rng, (plan.layout.pp, dp), spread=variation.device_spread, **kind)[base.graph.rank[rows]]
        factor = factor * slowest(rng, factor.shape, spread=variation.jitter, **kind)
        duration_s[rows] += (factor - 1) * seconds.computing_s[numbers].T[base.sorts.of_action[rows]]
    if variation.comm_jitter:
        kind["devices"] = 1
        duration_s[base.messages] *= slowest(rng, (len(base.messages), dp), spread=variation.comm_jitter, **kind)
        duration_s[base.collectives] *= slowest(rng, (len(base.collectives), 1), spread=variation.comm_jitter, **kind)
    if variation.hiccups_per_s:
        paused = duration_s[rows]
        rate: dict[str, Any] = {
            "per_s": variation.hiccups_per_s,
            "least_s": variation.hiccup_s,
            "exponent": variation.hiccup_shape,
        }
        add_pauses(rng, paused, devices=devices, **rate)
        duration_s[rows] = paused
    return duration_s


class _Base:
    """The graph of a plan, its actions by what can happen to them, and the run of columns over it."""

    def __init__(self, plan: Plan):
        self.plan = plan
        steady = replace(plan, variation=NO_VARIATION)
        self.first = simulate_first(steady)
        self.graph: Graph = self.first.run.graph
        self.sorts = sorts_of(self.graph)
        gathers = any(sort.kind is Kind.UNSHARD for sort in self.sorts.sorts)
        prices: GraphPrices = Pricing(steady, gathers_scheduled=gathers).of_graph(self.sorts)
        self.overlap = prices.overlap
        action_kind = self.graph.schedule.actions.kind
        self.stretched_s = _stretched_s(self.first.run, prices)
        sends = np.isin(action_kind, [int(kind) for kind in SENDS])
        takes_time = prices.duration_s > 0
        self.computing = np.flatnonzero(self.graph.is_compute & takes_time)
        self.messages = np.flatnonzero(sends & takes_time)
        self.collectives = np.flatnonzero(np.isin(action_kind, [int(kind) for kind in TRANSFERS]) & takes_time)
        self.steps = np.flatnonzero(action_kind == Kind.STEP)

    def seconds(self, columns: Columns) -> _Seconds:
        """The prices of columns as arrays."""
        totals = [[price.total_s for price in prices] for prices in columns.prices]
        computing = [
            [price.compute + price.recompute + price.optimizer for price in prices] for prices in columns.prices
        ]
        return _Seconds(np.array(totals), np.array(computing))

    def durations_s(self, columns: Columns) -> np.ndarray:
        """[actions, columns] seconds without anything drawn."""
        return columns.durations_s(self.sorts) + self.stretched_s[:, None]

    def run(self, duration_s: np.ndarray, columns: Columns, *, samples: int) -> ReplicaRun:
        """The run of the columns of some samples side by side. With clipping no rank steps before
        all of its sample can."""
        run = execute_replicas(self.graph, duration_s, columns.couplings, **self.overlap)
        if self.plan.optimizer.clip_grad_norm:
            width = duration_s.shape[1] // samples
            lasting_s = run.end_s[self.steps] - run.start_s[self.steps]
            ready_s = run.start_s[self.steps].reshape(len(self.steps), samples, width).max(axis=(0, 2), initial=0.0)
            run.start_s[self.steps] = np.repeat(ready_s, width)
            run.end_s[self.steps] = run.start_s[self.steps] + lasting_s
        return run


def _stretched_s(run: Run, prices: GraphPrices) -> np.ndarray:
    """[actions] seconds that transfers last longer because they share links with others."""
    if prices.links is None:
        return np.zeros(len(run.graph.rank))
    alone = execute(run.graph, prices.duration_s, **prices.overlap)
    longer_s = (run.end_s - run.start_s) - (alone.end_s - alone.start_s)
    return np.where((prices.links.route >= 0) & ~run.graph.is_receive, np.maximum(0.0, longer_s), 0.0)
