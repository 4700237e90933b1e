"""The optimizer step, and the gathers of ZeRO-3, on expressions: norm, losses, tied tables, and the parameters
that come together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...core.base.findings import Where
from ...core.layout.stage_parameters import Usage, stage_usages
from ...core.model.blocks import num_losses
from ...core.model.parameters import TOKEN_TABLE
from ...core.plan.plan import Plan
from ...core.program import Collective, Operations, num_copies, num_shards
from ...core.program.buckets import gathered_sizes
from ...core.schedule.action import Action, Kind
from ...core.schedule.placement import Placement
from .experts import EXPERT_AXES, ExpertGrid
from .expressions import MODULUS, digest, digests
from .layers import Program
from .reduction import StageGradients, StepDifference, calls_text, in_step, of_ranks
from .shards import dense_members, split_axis


def unshard_difference(plan: Plan, placement: Placement, program: Program, stage: int) -> StepDifference | None:
    """What is wrong with UNSHARD of a stage: it has to bring together the parts of all copies (ZeRO-3)."""
    num_replicas = len(placement.ranks[stage])
    calls, note = in_step(of_ranks(program, plan, Kind.UNSHARD, stage, num_replicas))
    parts, copies = num_shards(plan, stage), num_copies(plan, stage)
    axes = ("dp", "edp") if num_replicas == 1 else ("replica", "expert_replica")
    levels = ["_shard" * (some < size) for some, size in zip(parts, copies, strict=True)]
    wanted = [
        ("all_gather", f"{axes[each.is_expert]}{levels[each.is_expert]}", parts[each.is_expert])
        for each in gathered_sizes(plan, stage, 0)
        if plan.layout.zero == 3 and parts[each.is_expert] > 1
    ]
    if note or [(call.op, call.axis, call.group_size) for call in calls] != wanted:
        called = calls_text([(call.op, call.axis, call.layer) for call in calls])
        return StepDifference(
            "value",
            Where(action=str(Action(stage, Kind.UNSHARD))),
            note or f"{len(wanted)} all_gather over copies are due, and the program calls {called}",
            axis="dp",
        )
    return None


class Step:
    """STEP of all pipeline ranks together."""

    def __init__(self, plan: Plan, placement: Placement, program: Program, stages: Sequence[StageGradients]):
        self.plan, self.placement, self.stages = plan, placement, stages
        self.ranks = [rank for rank in range(placement.num_ranks) if placement.stages_of(rank)]
        self.shape = (len(self.ranks), plan.layout.tp, plan.layout.dp * plan.layout.cp)
        self.operations: dict[tuple[int, int], list[tuple[int, Operations]]] = {}
        for rank, pp_rank in enumerate(self.ranks):
            stage = placement.stages_of(pp_rank)[0]
            replica = placement.replica_of(stage, pp_rank)
            for t in range(plan.layout.tp):
                self.operations[rank, t] = program.of_copies(plan, Kind.STEP, stage, t, replica)

    def differences(self) -> Iterator[StepDifference]:
        """Everything STEP does otherwise than one device."""
        yield from self._scalar("grad_norm", *self._with_experts(*self._squares()))
        yield from self._scalar("loss", *self._losses())
        if num_losses(self.plan.model) > 1:
            yield from self._scalar("mtp_loss", *self._losses())
        if self.plan.train.adds_router_losses:
            yield from self._scalar("aux_loss", *self._aux_losses())
        yield from self._tied_table()
        yield from self._parameters()

    def _different(self, rank: int) -> list[tuple[tuple[int, int], Operations]]:
        """The operations of a pipeline rank's tensor-parallel and data-parallel ranks; of those
        that do the same, the first."""
        return [((t, d), own) for t in range(self.shape[1]) for d, own in self.operations[rank, t]]

    def _of_layer(self, layer: str) -> tuple[list[Collective], str]:
        distinct = {id(own): own for copies in self.operations.values() for _, own in copies}.values()
        return in_step([[each for each in own if each.layer == layer] for own in distinct])

    def _squares(self) -> tuple[np.ndarray, np.uint64]:
        """Each rank's sum of squares, every element of the model counted once: on a stage's first replica, or
        every copy's own part. What tensor parallelism does not cut is counted by its first rank, and goes with
        that rank's slices here."""
        own, total = np.zeros(self.shape, dtype=np.uint64), np.uint64(0)
        for gradients in self.stages:
            if not gradients.values:  # a stage without layers
                continue
            squares = digests(gradients.shape, "squares", gradients.stage)
            parts, copies = num_shards(self.plan, gradients.stage).dense, num_copies(self.plan, gradients.stage).dense
            if self.plan.layout.zero and parts < copies:  # of equal parts one counts
                squares[dense_members(self.plan, gradients.shape) >= parts] = 0
            total = squares.sum(dtype=np.uint64, initial=total)
            for replica, pp_rank in enumerate(self.placement.ranks[gradients.stage]):
                if self.plan.layout.zero:
                    own[self.ranks.index(pp_rank)] += squares[:, :, replica]
                elif replica == 0:
                    own[self.ranks.index(pp_rank)] += squares.sum((1, 2), dtype=np.uint64)[:, None]
        return own, total

    def _with_experts(self, own: np.ndarray, wanted: np.uint64) -> tuple[np.ndarray, np.uint64]:
        """The squares of experts, which lie on another grid, and the others; with ZeRO every copy's
        own part counts them."""
        if not self.plan.model.is_moe or self.plan.layout.zero:
            return own, wanted
        calls = [call for call in self._of_layer("grad_norm")[0] if call.axis in ("ep", "etp")]
        with_experts = [
            each for each in self.stages if any(usage.parameter.expert for usage in self._usages(each.stage))
        ]
        stages = [(each.stage, self.ranks.index(self.placement.ranks[each.stage][0])) for each in with_experts]
        return ExpertGrid(self.plan.layout).with_squares(calls, own, wanted, stages)

    def _usages(self, stage: int) -> tuple[Usage, ...]:
        return stage_usages(self.plan.model, self.plan.stages[stage])

    def _losses(self) -> tuple[np.ndarray, np.uint64]:
        """The losses of a rank's samples, on the ranks of the last stage, counted by the first tensor-parallel rank."""
        own, total = np.zeros(self.shape, dtype=np.uint64), 0
        for replica, pp_rank in enumerate(self.placement.ranks[-1]):
            for d in range(self.shape[2]):
                loss = digest("losses", d, replica)
                own[self.ranks.index(pp_rank), 0, d] = loss
                total += loss
        return own, np.uint64(total % 2**64)

    def _aux_losses(self) -> tuple[np.ndarray, np.uint64]:
        """What routers add to the loss, on the ranks of their stages: of each rank's own tokens, or counted by the
        first tensor-parallel rank where all have the same."""
        own, total = np.zeros(self.shape, dtype=np.uint64), 0
        for stage, ranks in enumerate(self.placement.ranks):
            for replica, pp_rank in enumerate(ranks):
                losses = np.zeros(self.shape[1:], dtype=np.uint64)
                for t, d in np.ndindex(self.shape[1:]):
                    if t == 0 or self.plan.layout.sequence_parallel:
                        losses[t, d] = digest("aux losses", stage, t, d, replica)
                own[self.ranks.index(pp_rank)] += losses
                total += int(losses.sum(dtype=np.uint64))
        return own, np.uint64(total % MODULUS)

    def _scalar(self, layer: str, own: np.ndarray, wanted: np.uint64) -> Iterator[StepDifference]:
        where = Where(tensor=layer, words=f"STEP, {layer}")
        calls, note = self._of_layer(layer)
        for call in calls:
            if call.axis in ("ep", "etp") and layer == "grad_norm" and self.plan.model.is_moe:
                continue  # of the squares of experts
            axes = {"dp": (2,), "model": (0, 1), "tp": (1,)}.get(call.axis)
            if axes is None:
                note = note or f"{call.op} over {call.axis} is no sum over the ranks that hold parts of it"
            else:
                own = np.broadcast_to(own.sum(axes, keepdims=True, dtype=np.uint64), own.shape)
        if note or not (own == wanted).all():
            axes_text = " and ".join(call.axis for call in calls) or "no axis"
            rank, t, d = np.argwhere(own != wanted)[0].tolist() if not note else (0, 0, 0)
            place = f"pipeline rank {self.ranks[rank]}, tp rank {t}, dp rank {d}"
            what = note or f"{place} has another sum than one device; its parts are added over {axes_text}"
            yield StepDifference("value", where, what)
        elif any(call.op == "all_reduce" for call in calls):
            yield StepDifference("order", where, "the scalar is added over ranks in the library's order")

    def _tied_table(self) -> Iterator[StepDifference]:
        """First and last stage add the sums of their uses; each rank that holds one of them needs the other's."""
        if not self.plan.model.shares_table:
            return
        first, last = self.placement.ranks[0], self.placement.ranks[-1]
        for rank, pp_rank in enumerate(self.ranks):
            crossed = bool(self.plan.layout.zero and self.placement.crossed_ends_of(pp_rank))
            needed = int((pp_rank in first) != (pp_rank in last) or crossed)
            for (t, d), own in self._different(rank):
                calls = [each for each in own if isinstance(each, Collective) and each.axis == "embedding"]
                if len(calls) != needed:
                    rank_words = f"{TOKEN_TABLE} on pipeline rank {pp_rank}, tp rank {t}, dp rank {d}"
                    where = Where(pp_rank, tensor=TOKEN_TABLE, words=f"STEP, {rank_words}")
                    uses = (
                        "without the other end's use"
                        if len(calls) < needed
                        else ("with a sum that is added more than once")
                    )
                    what = (
                        f"the tied table is updated {uses}: {needed} collectives over embedding are due, "
                        f"{len(calls)} called"
                    )
                    yield StepDifference("value", where, what, axis="pp")
                    return

    def _expert_copies(self, pp_rank: int) -> list[int]:
        """Of every stage of a pipeline rank whose experts are updated in parts the number of copies that hold these."""
        if not self.plan.layout.zero:
            return []
        stages = [
            stage
            for stage in self.placement.stages_of(pp_rank)
            if any(usage.parameter.expert for usage in self._usages(stage))
        ]
        copies = [num_shards(self.plan, stage).expert for stage in stages]
        return [size for size in copies if size > 1]

    def _parameters(self) -> Iterator[StepDifference]:
        """Weights whose parts were updated apart must come together again: in STEP, or with ZeRO-3 at UNSHARD."""
        if self.plan.layout.zero == 3:
            return
        by_stage = {gradients.stage: gradients for gradients in self.stages}
        for rank, pp_rank in enumerate(self.ranks):
            apart = [stage for stage in self.placement.stages_of(pp_rank) if by_stage[stage].is_part]
            expert_copies = self._expert_copies(pp_rank)
            for (t, d), own in self._different(rank):
                buckets = {size.layer for stage in apart for size in gathered_sizes(self.plan, stage, t)} | {""}
                gathers = [
                    each
                    for each in own
                    if isinstance(each, Collective) and each.layer in buckets and each.op == "all_gather"
                ]
                sizes = [each.group_size for each in gathers if split_axis(each.axis)[0] in ("dp", "replica")]
                of_experts = [each.group_size for each in gathers if split_axis(each.axis)[0] in EXPERT_AXES]
                dense = [
                    (stage, size)
                    for stage in apart
                    for size in gathered_sizes(self.plan, stage, t)
                    if not size.is_expert
                ]
                wanted = [num_shards(self.plan, stage).dense for stage, _ in dense]
                if sizes != wanted or of_experts != expert_copies:
                    where = Where(pp_rank, words=f"STEP on pipeline rank {pp_rank}, tp rank {t}, dp rank {d}")
                    what = (
                        f"stages {apart} are updated in parts, which {len(gathers)} all_gather over their copies "
                        "bring together"
                    )
                    yield StepDifference("value", where, what, axis="dp")
                    return
