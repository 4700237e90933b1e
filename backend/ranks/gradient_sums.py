"""`GradientSums`: a rank's gradients summed over the global batch, from REDUCE_GRAD until STEP takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ...core.model.parameters import Parameter, parameters
from ...core.plan.plan import Plan
from ...core.program import EXPERT_BIAS
from ...core.program.expert_tokens import expert_nodes
from ..base.streams import used_here
from ..data_parallel.base import DataParallel
from ..data_parallel.tied import tied_gradients
from ..gradients import not_finite
from ..gradients.gradients import ExpertCopies
from ..model.router import reduce_counts
from ..model.transformer import Stage
from ..numerics import Numerics
from ..transport.base import Transport
from ..transport.mesh import Mesh


class GradientSums:
    """The sums of a rank's stages. `reduced` are by stage those that an early reduction or `reduce` made, fp32 by name,
    until `finished` takes them."""

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        mesh: Mesh,
        stages: Mapping[int, Stage],
        data_parallel: Mapping[int, DataParallel],
        numerics: Numerics,
    ):
        self.plan, self.data_parallel = plan, data_parallel
        self._transport, self._mesh, self._stages, self._numerics = transport, mesh, stages, numerics
        self.reduced: dict[int, Mapping[str, Tensor]] = {}
        # By stage looks for gradients of this step that are not finite on this rank, from before sums spread them.
        self._not_finite: dict[int, tuple[not_finite.Found, not_finite.Found]] = {}

    def begin_batches_of(self, plan: Plan) -> None:
        """From here on global batches have the size that `plan` has."""
        self.plan = plan

    def state(self) -> Callable[[], None]:
        """What brings back which sums there are, as it is now. For replays of a walk."""
        reduced = dict(self.reduced)
        return lambda: self.reduced.update(reduced)

    @property
    def num_bytes(self) -> int:
        """Of the sums that wait for STEP."""
        return sum(total.nbytes for of_stage in list(self.reduced.values()) for total in of_stage.values())

    def reduce(self, stage: int) -> None:
        """REDUCE_GRAD: sums over the global batch; runs on the executor's `dp` lane."""
        samples_of = functools.partial(self.plan.copy_samples, stage)
        parts = self._mesh.tp_cp_gradients if self._numerics.mode == "exact" else self._mesh.tp_gradients
        gradients, own = self._stages[stage].gradients, self.data_parallel[stage]
        reduced = own.reduce(samples_of, parts, self._expert_copies(stage))
        self._not_finite[stage] = gradients.take_not_finite(), own.not_finite()
        # finished sums are rounded once, whatever they were added up in
        if self.plan.precision.gradient_dtype == "bf16":
            reduced = {key: total.bfloat16().float() for key, total in reduced.items()}
        self.reduced[stage] = reduced
        tp = self._mesh.tp_gradients
        own_tokens = [tp] if tp and self.plan.layout.sequence_parallel else []
        with self._transport.recorder.layer(EXPERT_BIAS):
            reduce_counts(self._stages[stage].routers, [*own_tokens, self._mesh.copies(stage)])

    def _expert_copies(self, stage: int) -> ExpertCopies | None:
        if not self.plan.model.is_moe:
            return None
        group = self._mesh.expert_copies(stage)
        return ExpertCopies(group, tuple(expert_nodes(self.plan, stage, rank) for rank in group.ranks))

    def finished(self) -> list[Tensor]:
        """Gradients summed over the global batch, in the order of the optimizer's `held`. A tied table's two sums are
        added here."""
        used_here(total for of_stage in self.reduced.values() for total in of_stage.values())
        tables = tied_gradients(self.plan, self._mesh, self.reduced, self._transport.recorder)
        gradients = [
            each
            for stage, own in self.data_parallel.items()
            for each in own.finished(self.reduced[stage], tables.get(stage))
        ]
        self.reduced.clear()
        return gradients

    @property
    def parameters(self) -> list[Parameter]:
        """Of what `finished` returns."""
        return [each.parameter for own in self.data_parallel.values() for each in own.pieces]

    def first_not_finite(self, gradients: Sequence[Tensor]) -> str:
        """Which gradient of this step is the first that is not finite, in words. All ranks come together."""
        looks = [look for _, of_stage in sorted(self._not_finite.items(), reverse=True) for look in of_stage]
        found = next((found for found in (look() for look in looks) if found is not None), None)
        own = None if found is None else replace(found, name=found.name.partition("@")[0])
        names = [parameter.name for parameter in parameters(self.plan.model)]
        sums = zip((each.name for each in self.parameters), gradients, strict=True)
        return not_finite.first(own, sums, names, self._mesh, self._transport.device)

    def end_step(self) -> None:
        """The numbers of the step are read: nobody asks any more which gradient was not finite."""
        self._not_finite.clear()
