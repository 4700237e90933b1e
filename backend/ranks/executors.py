"""`Executors`: what walks over a rank's rows, one for each size of global batch that a run has."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ...core.plan.plan import Plan
from ...core.plan.schedule_of import schedule_for
from ...core.schedule import lower
from ...core.schedule.schedule import Schedule
from ..model.transformer import Stage
from ..pipeline.executor import Executor, StageWeights
from ..pipeline.graphs import StepGraphs
from ..pipeline.messages import MessageChannel
from ..pipeline.overlap import PairRunner
from ..pipeline.row_messages import row_order_of
from ..tensor_parallel.context import DTYPES
from ..transport.base import Transport
from ..transport.baton import Baton
from ..transport.mesh import Direction, Mesh
from .batches import whole_shape
from .joined import Joined


def own_schedule(plan: Plan, dp_rank: int) -> Schedule:
    """The lowered schedule of global batches of the size that `plan` has, of the replicas of one place in `dp`."""
    return lower(schedule_for(plan, plan.microbatches_of(dp_rank)))


class Executors:
    """Executors of the same stages, each made when the first global batch of its size comes. All send through the same
    lines to other pipeline ranks, or to those of other modules that are `joined`."""

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        schedule: Schedule,
        mesh: Mesh,
        stages: Mapping[int, Stage],
        weights: Mapping[int, StageWeights],
        *,
        baton: Baton | None,
        graphs: StepGraphs | None,
        joined: Joined | None,
    ):
        """`schedule` is that of global batches of the size that `plan` has, without other modules."""
        self._layout, self._mesh, self._joined = plan.layout, mesh, joined
        first, last = plan.tokens_of(mesh.coordinates["tp"])
        width = plan.model.hidden_size
        trimmed = plan.runtime.trim_padding
        self._new = functools.partial(
            Executor,
            pp_rank=mesh.coordinates["pp"],
            stages=stages,
            channel=self._line,
            message_shape=functools.partial(whole_shape, width)
            if trimmed
            else (plan.batch.micro_size, last - first, width),
            dtype=DTYPES[plan.precision.dtype],
            global_rank=transport.global_rank,
            recorder=transport.recorder,
            watch=transport.watch,
            global_rank_of=self._peer,
            weights=weights,
            pairs=PairRunner(transport.global_rank, baton, transport.device) if baton is not None else None,
            row_order=row_order_of(plan.runtime),
            graphs=graphs,
        )
        # By global batch, of those that steps had.
        self._made = {plan.batch.global_size: self._new(schedule if joined is None else joined.schedule)}

    def of(self, plan: Plan) -> Executor:
        """What walks over the row of global batches of the size that `plan` has."""
        size = plan.batch.global_size
        if size not in self._made:
            joined = self._joined
            schedule = own_schedule(plan, self._mesh.coordinates["dp"]) if joined is None else joined.schedule
            self._made[size] = self._new(schedule)
        return self._made[size]

    def _line(self, direction: Direction, peer: int, sending: bool) -> MessageChannel:
        """The line to a pipeline rank, or to another module."""
        if self._joined is not None and not 0 <= peer < self._layout.pp:
            return self._joined.line(direction, sending=sending)
        own = self._mesh.coordinates["pp"]
        return self._mesh.channel(direction, *((own, peer) if sending else (peer, own)))

    def _peer(self, pp_rank: int) -> int:
        """The global rank of the same place on another pipeline rank, or one of another module."""
        if self._joined is not None and not 0 <= pp_rank < self._layout.pp:
            return self._joined.peer(pp_rank)
        return self._layout.global_rank(**{**self._mesh.coordinates, "pp": pp_rank})
