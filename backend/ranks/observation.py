"""`Observation`: what a training rank shows its observer of gradients and state. It waits for nothing that
the step does not wait for.

Weights that are gathered during the next forward (`data_parallel.late`) are shown twice: those that this rank has
updated with the step, and all of them where a forward first uses them. Whoever forgets to wait for them shows what
the forward computes with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from ...core.plan.plan import Plan
from ..base.observe import Observer
from ..data_parallel.buckets import part_of
from ..data_parallel.late import LAST
from ..gradients.parameter import Shard
from ..model.transformer import Stage
from ..optimizers.sharded import ShardedOptimizer


class Observation:
    """One rank's. `late` are the stages whose updated weights are gathered during the next forward."""

    def __init__(self, observer: Observer, plan: Plan, stages: Mapping[int, Stage], late: Iterable[int]):
        self._observer = observer
        self._plan = plan
        self._stages = stages
        self._late = tuple(late)
        # Whether weights are whole and fp32 between steps: then those which layers use are the updated ones.
        self._rests_whole = plan.precision.dtype == "fp32" and plan.layout.zero < 3
        # By late stage the weights after the last step, to be shown when a forward first uses them; and the step that
        # made them.
        self._coming: dict[int, dict[str, Shard]] = {}
        self._step = -1

    def computed(
        self,
        optimizer: ShardedOptimizer,
        found: Sequence[Tensor],
        share: float,
        numbers: Sequence[float],
        *,
        skipped: bool,
    ) -> None:
        """What STEP computed before the update: the loss, gradients times `share` as backward finishes them, last layer
        first, and their norm. Of a step that is `skipped` these are no numbers, which have no bits to compare."""
        loss, norm, *_ = numbers
        self._observer.scalar("loss", loss)
        if skipped:
            return
        for one, gradient in reversed(list(zip(optimizer.held, found, strict=True))):
            self._observer.gradient(one.name, one.slices, gradient if share == 1.0 else gradient * share)
        self._observer.scalar("grad_norm", norm)

    def changed(self, step: int, optimizer: ShardedOptimizer, *, updated: bool) -> None:
        """`step` has `updated` what this rank keeps, or left it. With late stages that is shown now, before the gather
        of the rest begins: it then has no more time until the next forward than without an observer."""
        self._step = step
        self.coming()
        if self._late:
            self._state(optimizer, with_moments=updated)

    def refreshed(self, optimizer: ShardedOptimizer, numbers: Sequence[float], *, updated: bool) -> None:
        """The weights of all stages but late ones, and what routers choose by, are what the step made of them; with
        what was added to its loss."""
        if not self._late:
            self._state(optimizer, with_moments=updated)
        self.biases()
        if updated:
            _, _, aux_loss, mtp_loss = numbers
            self._losses(aux_loss, mtp_loss)

    def state(self, step: int, optimizer: ShardedOptimizer) -> None:
        """The weights, and the moments if there are any, as those that `step` left."""
        self._step = step
        self._observer.begin_step(step)
        self._state(optimizer, with_moments=bool(optimizer.state_tensors))
        self.biases()

    def _losses(self, aux_loss: float, mtp_loss: float) -> None:
        """What was added to the loss of the step, where the plan has such losses."""
        if self._plan.train.adds_router_losses:
            self._observer.scalar("aux_loss", aux_loss)
        if self._plan.model.num_mtp_layers:
            self._observer.scalar("mtp_loss", mtp_loss)

    def biases(self) -> None:
        """Those of experts, which every rank holds whole."""
        for router in (router for stage in self._stages.values() for router in stage.routers):
            if router.expert_bias is not None:
                whole = (slice(0, len(router.expert_bias)),)
                self._observer.weight(router.bias_name, whole, router.expert_bias)

    def coming(self) -> None:
        """The weights of late stages begin to come together."""
        if self._rests_whole:
            self._coming = {stage: dict(self._stages[stage].trained) for stage in self._late}

    def used(self, stage: int, part: str) -> None:
        """A forward uses a part of a late stage: its weights, as those of the step that updated them, are shown
        if this is the first."""
        if not (coming := self._coming.get(stage)):
            return
        for name in [name for name in coming if part in (LAST, part_of(name))]:
            shard = coming.pop(name)
            self._observer.weight(name, shard.slices, shard.tensor, step=self._step)

    def settled(self) -> None:
        """The weights of late stages are there."""
        for stage in self._late:
            self.used(stage, LAST)

    def _state(self, optimizer: ShardedOptimizer, *, with_moments: bool) -> None:
        """The moments, and the weights: those that layers compute with where they rest in fp32 and are there; else
        those that this rank keeps."""
        optimizer.settle()
        for one in optimizer.held if with_moments else ():
            self._observer.optimizer_state(one.name, one.slices, optimizer.moments(one))
        whole = [shard for stage in self._stages.values() for shard in stage.trained.values()]
        for each in whole if self._rests_whole and not any(self._coming.values()) else optimizer.held:
            self._observer.weight(each.parameter.name, each.slices, each.tensor)
        for each in (shard for stage in self._stages.values() for shard in stage.shards.values()):
            if self._plan.optimizer.update_of(each.parameter).is_frozen:
                self._observer.weight(each.parameter.name, each.slices, each.tensor)
