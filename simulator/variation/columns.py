"""Data-parallel ranks that differ: the price of every action on each of them, given slow devices, other
devices, slow links and nodes.

A column is one data-parallel rank's pipeline. Tensor- and context-parallel ranks of a column and a pipeline
rank wait for each other in every layer, so together they are as slow as the slowest. Columns that differ in
nothing share their prices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...core.machine.cluster_presets import as_device
from ...core.machine.variation import NO_VARIATION, devices_named
from ...core.plan.plan import Plan
from ...core.schedule.action import Kind
from ..cost.pricing import Pricing
from ..engine.attribution import Sorts
from ..engine.seconds import Seconds
from ..network.link_shares import DegradedSpreads, LinkShares, rank_index
from ..network.placement import replicas_placed_equally, shift_of
from ..network.spreads import Spreads

SHARED_BY_EXPERTS = (Kind.F, Kind.B, Kind.I, Kind.OVERLAP_F_B)
"""Actions inside which ranks of an ep group exchange tokens."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Prices of a graph's sorts of action on every data-parallel rank: `prices[of_column[d]]` for rank d.

    `order` lists the data-parallel ranks so that those which run a kind of action together are neighbours,
    `couplings[kind]` says how many that are.
    """

    prices: tuple[tuple[Seconds, ...], ...]
    of_column: np.ndarray
    order: np.ndarray
    couplings: Mapping[Kind, int]

    def durations_s(self, sorts: Sorts) -> np.ndarray:
        """[actions, columns in `order`] seconds of every action."""
        totals = np.array([[seconds.total_s for seconds in prices] for prices in self.prices])
        return totals[self.of_column[self.order]].T[sorts.of_action]


def columns_of(plan: Plan, sorts: Sorts, *, expert_load: float = 1.0) -> Columns:
    """The columns of a plan, with the busiest experts `expert_load` times as busy as the average."""
    plain = replace(plan, variation=NO_VARIATION)
    couplings, order = couplings_of(plan)
    conditions = _Conditions(plan, sorts, plain, expert_load)
    known: dict[object, int] = {}
    of_column = np.array([known.setdefault(conditions.key(dp_rank), len(known)) for dp_rank in range(plan.layout.dp)])
    firsts = [int(np.flatnonzero(of_column == number)[0]) for number in range(len(known))]
    return Columns(tuple(conditions.prices(dp_rank) for dp_rank in firsts), of_column, order, couplings)


class _Conditions:
    """What every cell, a data-parallel and a pipeline rank, is made of, and what actions cost there."""

    def __init__(self, plan: Plan, sorts: Sorts, plain: Plan, expert_load: float):
        variation, self._plan, self._sorts, self._plain, self._load = plan.variation, plan, sorts, plain, expert_load
        # Per device how many times slower it is, and the number of its class (0: the plan's own device).
        self._slower = np.ones(plan.cluster.num_devices)
        for names, factor in variation.stragglers.items():
            self._slower[devices_named(names, plan.cluster)] *= factor
        self._kind = np.zeros(plan.cluster.num_devices, dtype=np.int64)
        for number, names in enumerate(variation.device_classes.values(), start=1):
            self._kind[devices_named(names, plan.cluster)] = number
        self._classes = (None, *variation.device_classes)
        cells = rank_index(plan.layout, "dense")  # [tp, cp, dp, pp]
        # Per (dp, pp) cell the slowest device, and which classes are among its devices [dp, pp, class].
        self._factor = self._slower[cells].max(axis=(0, 1))
        kinds = self._kind[cells]
        self._present = np.stack([(kinds == number).any(axis=(0, 1)) for number in range(len(self._classes))], axis=-1)
        has_faults = bool(variation.slow_links or variation.failed_links)
        # What is left of links, None where all are whole; prices are shared by data-parallel ranks that lie and whose
        # links are in the same way (`_place`).
        self._links = LinkShares(plan) if has_faults else None
        self._placed_equally = replicas_placed_equally(plan)
        self._pricings: dict[tuple[object, ...], Pricing] = {}
        self._gathers_scheduled = any(sort.kind is Kind.UNSHARD for sort in sorts.sorts)

    def key(self, dp_rank: int) -> object:
        """Equal for data-parallel ranks that do everything in the same time."""
        return self._factor[dp_rank].tobytes(), self._present[dp_rank].tobytes(), *self._place(dp_rank)

    def _place(self, dp_rank: int) -> tuple[bytes, int]:
        """Equal for data-parallel ranks whose groups are placed in the same way and have equally slow links."""
        links = self._links.signature(dp_rank) if self._links else b""
        return links, 0 if self._placed_equally else shift_of(self._plan, dp_rank)

    def prices(self, dp_rank: int) -> tuple[Seconds, ...]:
        """Seconds of every sort of action: of the slowest kind of device that a cell has, and its slowest device."""
        found = []
        for sort in self._sorts.sorts:
            kinds = np.flatnonzero(self._present[dp_rank, sort.pp_rank]).tolist()
            slowest = max(
                (self._pricing(kind, dp_rank).price(sort) for kind in kinds), key=lambda seconds: seconds.total_s
            )
            found.append(slower(slowest, float(self._factor[dp_rank, sort.pp_rank])))
        return tuple(found)

    def _pricing(self, kind: int, dp_rank: int) -> Pricing:
        key = (kind, *self._place(dp_rank))
        if key not in self._pricings:
            name = self._classes[kind]
            plan = self._plain if name is None else replace(self._plain, cluster=as_device(self._plan.cluster, name))
            spreads: Spreads | None = None
            if self._links:
                spreads = DegradedSpreads(plan, self._links, dp_rank)
            elif not self._placed_equally:
                spreads = Spreads(plan, dp_rank)
            self._pricings[key] = Pricing(
                plan, gathers_scheduled=self._gathers_scheduled, spreads=spreads, expert_load=self._load
            )
        return self._pricings[key]


def slower(seconds: Seconds, factor: float) -> Seconds:
    """The same work where computing takes `factor` times as long; transfers take as long as before."""
    if factor == 1:
        return seconds
    scaled = {name: getattr(seconds, name) * factor for name in ("compute", "recompute", "optimizer")}
    return seconds._replace(**scaled).on_grid()


def couplings_of(plan: Plan) -> tuple[dict[Kind, int], np.ndarray]:
    """How many data-parallel ranks run a kind of action together, and an order of the ranks in
    which those are neighbours.

    All reduce gradients together. Experts tie the forwards and backwards of the ranks that an ep group spans, ZeRO-3
    those of the ranks that hold one copy of the weights, which are gathered layer by layer; ZeRO-2 reduces inside every
    backward. With a global gradient norm or sharded weights the step is taken together.
    """
    layout, dp = plan.layout, plan.layout.dp
    order, block_size = _expert_blocks(plan)
    couplings = dict.fromkeys((Kind.REDUCE_GRAD, Kind.UNSHARD), dp)
    if plan.optimizer.clip_grad_norm or layout.zero:
        couplings[Kind.STEP] = dp
    tied = dict.fromkeys(SHARED_BY_EXPERTS, block_size)
    if layout.zero == 3 or layout.zero == 2:
        shard = dp if plan.data_parallel.shard is None else max(1, plan.data_parallel.shard // layout.cp)
        sharded = shard if layout.zero == 3 else dp
        kinds = SHARED_BY_EXPERTS if layout.zero == 3 else (Kind.B, Kind.OVERLAP_F_B)
        couplings[Kind.UNSHARD] = sharded
        for kind in (*kinds, Kind.W):
            larger, smaller = max(tied.get(kind, 1), sharded), min(tied.get(kind, 1), sharded)
            tied[kind] = larger if larger % smaller == 0 else dp
    return couplings | {kind: size for kind, size in tied.items() if size > 1}, order


def _expert_blocks(plan: Plan) -> tuple[np.ndarray, int]:
    """The data-parallel ranks in an order in which those that an ep group spans are neighbours,
    and how many those are."""
    layout = plan.layout
    if not plan.model.is_moe or layout.ep * layout.expert_tp <= 1:
        return np.arange(layout.dp), 1
    dense, experts = (rank_index(layout, grid)[..., 0] for grid in ("dense", "expert"))
    dp_of = np.empty(int(dense.max()) + 1, dtype=np.int64)
    dp_of[dense] = np.arange(layout.dp)[None, None, :]
    block = np.arange(layout.dp)
    for group in experts.reshape(-1, layout.expert_dp).T:  # the ranks that hold one copy of all experts
        members = np.unique(dp_of[group])
        block[np.isin(block, block[members])] = block[members].min()
    sizes = np.unique(block, return_counts=True)[1]
    block_size = int(sizes[0]) if len(set(sizes.tolist())) == 1 else layout.dp
    return np.argsort(block, kind="stable"), block_size
