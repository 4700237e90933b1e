"""`prove`: a plan's lowered schedule and program run on expressions and compared with one device. No torch, no numbers.

The proof is put together from three parts, each of which asks nothing of the others but what they show:

- *layers*: in every block of a stage all tensor-parallel ranks make what one device makes, from complete
  inputs (`symbolic_layers`);
- *schedule*: with stages as functions, every action reads the values it should, and every gradient and loss is the sum
  over its microbatches (`symbolic_schedule`, `symbolic_sums`);
- *step*: REDUCE_GRAD and STEP finish these sums over all ranks (`symbolic_reduction`, `symbolic_step`).

One device is the same plan with every degree 1, described by `core.program` itself. What is assumed: ranks do what the
program says (a test holds the backend to it), and in a step all tensor- and data-parallel ranks walk the same rows,
which is how a schedule is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ...core.base.findings import Finding, Severity, Where
from ...core.layout.layout import Layout
from ...core.machine.cluster import ClusterSpec
from ...core.machine.variation import NO_VARIATION
from ...core.plan.plan import Plan
from ...core.plan.sections import DataParallel, ScheduleChoice
from ...core.program import Op, Product, sequences_are_cut
from ...core.schedule import lower
from ...core.schedule.action import Kind
from ...core.schedule.schedule import Schedule
from ..schedule.rules import View
from ..schedule.rules.rule import SCHEDULE_KEY
from .blocks import EMBEDDING, HEAD, Block, blocks_of, run_block
from .layers import Difference, Program
from .reduction import StageGradients, StepDifference, exchange_difference, reduced_gradients
from .step import Step, unshard_difference
from .sums import Judgement, judge

VALUE_RULE, ORDER_RULE, SCOPE_RULE = "other-mathematics", "other-order", "not-proved"
_HINTS = {
    VALUE_RULE: "The plan does not compute what one device computes. Mend the program or the schedule at this place.",
    ORDER_RULE: (
        "The same mathematics in another order: results agree to rounding. numerics.mode = exact keeps the order."
    ),
    SCOPE_RULE: "The schedule and its collectives were checked; --dynamic proves the plan without what is not known.",
}
_EXACT_HINT = "Exact numerics promise one device's bits, so this sum needs its canonical order."
_MAX_PLACES = 20


@dataclass(frozen=True)
class SymbolicProof:
    """What was compared and what was found.

    `num_values` counts the comparisons of digests; `findings` are errors for other mathematics (and, in exact numerics,
    another order), infos for another order in fast numerics. `beyond` names what of the plan the proof does not know;
    then nothing was compared, and a warning says so.
    """

    findings: tuple[Finding, ...]
    num_values: int
    num_ranks: int
    exact: bool
    beyond: tuple[str, ...] = ()

    @property
    def same_mathematics(self) -> bool:
        """True when no value is another than on one device, but for the order of sums."""
        return not self.beyond and not any(finding.rule == VALUE_RULE for finding in self.findings)

    @property
    def same_order(self) -> bool:
        """True when the order of every sum is one device's too."""
        return not self.findings

    @property
    def ok(self) -> bool:
        """True when the plan keeps what its numerics promise: the same bits (exact) or the same mathematics (fast)."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def report(self) -> dict[str, Any]:
        """For JSON, besides the findings."""
        return {
            "same_mathematics": self.same_mathematics,
            "same_order": self.same_order,
            "num_values": self.num_values,
            "num_ranks": self.num_ranks,
        }

    @property
    def line(self) -> str:
        """The result in one line."""
        if self.beyond:
            return f"No symbolic proof: it does not know {', '.join(self.beyond)} yet."
        looked = f"{self.num_values:,} expressions of {self.num_ranks:,} ranks compared with one device"
        if not self.same_mathematics:
            count = sum(finding.rule == VALUE_RULE for finding in self.findings)
            return f"Symbolic proof failed: {looked}, other mathematics in {count} places."
        if self.same_order:
            return f"Symbolic proof: {looked}, the same mathematics in the same order."
        count = sum(finding.rule == ORDER_RULE for finding in self.findings)
        return (
            f"Symbolic proof: {looked}, the same mathematics; {count} kind{'s' if count > 1 else ''} of sums made "
            "in another order."
        )


def prove(plan: Plan, schedule: Schedule, program: Program | None = None) -> SymbolicProof:
    """Runs the plan's program over its schedule, lowered first if it is not, on expressions.

    `program` replaces `core.program` on the ranks, not on the single device. Raises `ScheduleError` for a
    schedule that cannot be lowered.
    """
    if beyond := beyond_proof(plan):
        where = f"the plan for {plan.model.name}"
        finding = Finding(
            SCOPE_RULE,
            "warning",
            where,
            (f"the symbolic proof does not know {', '.join(beyond)} yet."),
            _HINTS[SCOPE_RULE],
        )
        return SymbolicProof((finding,), 0, plan.layout.world_size, plan.numerics.mode == "exact", beyond)
    lowered = schedule if schedule.is_lowered else lower(schedule, max_active_stages=plan.schedule.max_active_stages)
    return _Prover(plan, lowered, program or Program()).proof()


def beyond_proof(plan: Plan) -> tuple[str, ...]:
    """What of a plan the proof has no expressions for; empty when it knows all of it."""
    shard, cp = plan.data_parallel.shard, plan.layout.cp
    if shard is not None and sequences_are_cut(plan) and shard % cp:
        return (
            (
                f"hybrid sharding (data_parallel.shard={shard}) that keeps the cp={cp} parts of a sequence apart in "
                "exact numerics"
            ),
        )
    return ()


class _Prover:
    def __init__(self, plan: Plan, schedule: Schedule, program: Program):
        self.plan, self.schedule, self.program = plan, schedule, program
        self.num_values = 0
        self.states: list[dict[str, tuple[tuple[int, int], ...]]] = [{} for _ in plan.stages]

    def proof(self) -> SymbolicProof:
        layers = list(self._layers())
        judgement = judge(self.schedule)
        self.num_values += 2 * self.schedule.num_stages * self.schedule.num_microbatches
        findings = (*layers, *self._schedule(judgement), *self._step(judgement))
        return SymbolicProof(findings, self.num_values, self.plan.layout.world_size, self.exact)

    @property
    def exact(self) -> bool:
        return self.plan.numerics.mode == "exact"

    def _finding(
        self,
        kind: Literal["value", "order"],
        where: Where,
        what: str,
        *,
        axis: str | None = None,
        key: str | None = None,
    ) -> Finding:
        rule = VALUE_RULE if kind == "value" else ORDER_RULE
        severity: Severity = "error" if kind == "value" or self.exact else "info"
        hint = _EXACT_HINT if kind == "order" and self.exact else _HINTS[rule]
        return Finding.at(rule, severity, where, f"{what}.", hint, axis=axis, key=key)

    def _layers(self) -> Iterator[Finding]:
        """Every block of every stage; blocks that differ in their layer's name only are run once."""
        one = _one_device(self.plan)
        one_works = _by_block(Program().works(one, 0, 0), list(blocks_of(one.model, one.stages[0])))
        proved: dict[tuple[object, ...], tuple[Block, list[Difference], dict[str, tuple[tuple[int, int], ...]]]] = {}
        stages_of: dict[Block, list[int]] = {}
        for content in self.plan.stages:
            works = [self.program.works(self.plan, content.stage, tp_rank) for tp_rank in range(self.plan.layout.tp)]
            blocks = list(blocks_of(self.plan.model, content))
            tables = {id(each): _by_block(each, blocks) for each in works}  # ranks that do the same share one sequence
            for block in blocks:
                own = [tables[id(each)][block] for each in works]
                signatures = {number: _signature(block, table[block]) for number, table in tables.items()}
                key = (block.name if block.layer is None else "layer", *(signatures[id(each)] for each in works))
                if key not in proved:
                    reference, _ = run_block(one, block, [one_works[block]], None)
                    ranks, gradients = run_block(self.plan, block, own, reference.values)
                    self.num_values += len(reference.values) * self.plan.layout.tp
                    states = {
                        name.removeprefix(block.prefix): tuple(part.tokens for part in parts)
                        for name, parts in gradients.items()
                    }
                    proved[key] = block, ranks.differences, states
                first, _, states = proved[key]
                stages_of.setdefault(first, []).append(content.stage)
                self.states[content.stage].update({_usage_key(block, name): tokens for name, tokens in states.items()})
        for first, differences, _ in proved.values():
            yield from self._layer_findings(first, differences, stages_of[first])

    def _layer_findings(self, block: Block, differences: list[Difference], stages: list[int]) -> Iterator[Finding]:
        more = f" and {len(stages) - 1} more layers" if len(stages) > 1 else ""
        token = {"forward": "F", "recomputation": "B", "input gradient": "B", "weight gradient": "W"}
        orders = [difference for difference in differences if difference.kind == "order"]
        for difference in differences:
            if difference.kind == "value":
                pp_rank = self._pp_rank(stages[0])
                words = (
                    f"pipeline rank {pp_rank}, tp rank {difference.tp_rank}, {stages[0]}{token[difference.phase]}, "
                    f"{difference.layer} ({difference.phase})"
                )
                where = Where(pp_rank, tensor=difference.layer, words=words)
                yield self._finding("value", where, f"{difference.what}{more}")
        if orders:
            names = ", ".join(
                dict.fromkeys(
                    (f"{difference.layer.removeprefix(block.prefix)} ({difference.phase})") for difference in orders
                )
            )
            where = Where(tensor=block.name, words=f"{block.name}{more}")
            yield self._finding("order", where, f"sums are made in another order than on one device: {names}")

    def _pp_rank(self, stage: int) -> int:
        return self.schedule.placement.ranks[stage][0]

    def _schedule(self, judgement: Judgement) -> Iterator[Finding]:
        view = View(self.schedule)
        kind: Literal["value", "order"] = "order" if judgement.same_sums else "value"
        for place in judgement.places[:_MAX_PLACES]:
            yield self._finding(
                kind, view.where(place.pp_rank, place.index, place.microbatch), place.what, key=SCHEDULE_KEY
            )
        if (more := len(judgement.places) - _MAX_PLACES) > 0:
            where = Where(words="other places")
            yield self._finding(kind, where, f"the same in {more} more places", key=SCHEDULE_KEY)
        if judgement.unordered_stages and not self.exact:
            stages = ", ".join(map(str, judgement.unordered_stages[:8])) + (
                ", ..." if len(judgement.unordered_stages) > 8 else ""
            )
            where = Where(words=f"the gradients of stages {stages}")
            what = "microbatches are not added in ascending order"
            yield self._finding("order", where, what, key=SCHEDULE_KEY)

    def _step(self, judgement: Judgement) -> Iterator[Finding]:
        stages: list[StageGradients] = []
        found: list[StepDifference] = []
        placement = self.schedule.placement
        found += self._samples()
        for content in self.plan.stages:
            states = self.states[content.stage]
            gradients, differences = reduced_gradients(
                self.plan, placement, self.program, content.stage, states, judgement.num_reductions
            )
            self.num_values += (
                len(states)
                * self.plan.layout.tp
                * self.plan.layout.dp
                * self.plan.layout.cp
                * len(placement.ranks[content.stage])
            )
            stages.append(gradients)
            found += differences
        unsharded = np.unique(self.schedule.actions.stage[self.schedule.actions.kind == Kind.UNSHARD]).tolist()
        exchanges = (exchange_difference(self.plan, self.program, content.stage) for content in self.plan.stages)
        found += [difference for difference in exchanges if difference is not None]
        by_unshard = (unshard_difference(self.plan, placement, self.program, stage) for stage in unsharded)
        found += [difference for difference in by_unshard if difference is not None]
        found += Step(self.plan, placement, self.program, stages).differences()
        self.num_values += 2 * self.plan.layout.world_size
        yield from (
            self._finding("value", each.where, each.what, axis=each.axis) for each in found if each.kind == "value"
        )
        orders: dict[str, list[Where]] = {}
        for each in found:
            if each.kind == "order":
                orders.setdefault(each.what, []).append(each.where)
        for what, places in orders.items():
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            yield self._finding("order", replace(places[0], words=f"{places[0]}{more}"), what)

    def _samples(self) -> Iterator[StepDifference]:
        """The copies of a stage must see every sample of the global batch once: what follows counts copies."""
        size = self.plan.batch.global_size
        by_replicas = {len(ranks): stage for stage, ranks in enumerate(self.schedule.placement.ranks)}
        for stage in by_replicas.values():
            spans = sorted(
                self.plan.copy_samples(stage, copy)
                for copy in range(0, self.plan.num_copies(stage), self.plan.layout.cp)
            )
            ends = [0, *(hi for _, hi in spans)]
            if [lo for lo, _ in spans] != ends[:-1] or ends[-1] != size:
                what = f"its copies see the samples {spans[:8]}, which are not every one of {size} samples once"
                yield StepDifference("value", Where(words=f"stage {stage}"), what, axis="dp")


def _one_device(plan: Plan) -> Plan:
    """The same problem with every degree 1: model, batch, microbatch size and numerics stay; what a layer
    recomputes, all layers do."""
    cluster: ClusterSpec = replace(plan.cluster, num_devices=1)
    recompute = replace(plan.recompute, num_layers=None, layers=None)
    return replace(
        plan,
        cluster=cluster,
        layout=Layout(),
        recompute=recompute,
        schedule=ScheduleChoice(),
        data_parallel=DataParallel(),
        variation=NO_VARIATION,
    )


def _by_block(works: Any, blocks: list[Block]) -> dict[Block, list[Op]]:
    """A rank's works by the block their names belong to. Works of no block here go to the first, where
    they are a difference."""
    tables: dict[Block, list[Op]] = {block: [] for block in blocks}
    by_prefix = {block.prefix: block for block in blocks}
    for work in works:
        parts = work.layer.split(".")
        prefix = f"{parts[0]}.{parts[1]}." if parts[0] in ("layers", "mtp") else f"{parts[0]}."
        tables[by_prefix.get(prefix, blocks[0])].append(work)
    return tables


def _usage_key(block: Block, name: str) -> str:
    """The whole key of a gradient from its name inside a block; a table belongs to the embedding, or the
    head, wherever it is used."""
    return name if name.startswith((EMBEDDING.prefix, HEAD.prefix)) else f"{block.prefix}{name}"


def _signature(block: Block, works: list[Op]) -> tuple[object, ...]:
    """Equal for blocks whose operations are equal but for the layer's number."""
    return tuple(
        (work.layer.removeprefix(block.prefix), *(tuple(map(_plain, part)) for part in _phases(work))) for work in works
    )


def _phases(work: Op) -> tuple[Any, ...]:
    return work.forward, work.input_gradient, work.weight_gradient, work.recomputed


def _plain(operation: Any) -> tuple[object, ...]:
    if isinstance(operation, Product):
        return operation.m, operation.n, operation.k, operation.count
    return tuple(getattr(operation, name) for name in ("op", "axis", "group_size") if hasattr(operation, name))
