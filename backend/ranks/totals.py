"""`Totals`: the few numbers of a step that are sums over all ranks: losses, and the gradient norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...core.plan.plan import Plan
from ..base.recorder import Recorder
from ..model.transformer import Stage
from ..numerics import Numerics, Scalar
from ..optimizers.held import Held
from ..transport.base import Group
from ..transport.mesh import Mesh


class Totals:
    """Sums over the global batch and the whole model, fp64 [], the same on every rank, where they are computed:
    nobody waits for them here. All ranks call the same, in the same order."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        numerics: Numerics,
        stages: Sequence[Stage],
        recorder: Recorder,
        *,
        modules: Group | None = None,
    ):
        """With `modules`, the group of all ranks of several modules, sums are those over all of them."""
        self._plan = plan
        self._mesh = mesh
        self._numerics = numerics
        self._stages = stages
        self._recorder = recorder
        self._modules = modules
        self._num_tokens = plan.batch.global_size * plan.batch.sequence

    def begin_batches_of(self, plan: Plan) -> None:
        """From here on sums are over the global batches of `plan`."""
        self._plan = plan
        self._num_tokens = plan.batch.global_size * plan.batch.sequence

    def norm(self, held: Sequence[Held], gradients: Sequence[Tensor]) -> Tensor:
        """The norm of the whole gradient, every element of the model once. `gradients` are those of
        `held`, in its order."""
        counted = [(one, gradient) for one, gradient in zip(held, gradients, strict=True) if one.counts]
        if self._plan.layout.zero:
            with self._recorder.layer("grad_norm"):
                total = self._numerics.sum_of_squares(gradient for _, gradient in counted)
                return torch.sqrt(self._whole(total.over(self._mesh.dp).over(self._mesh.model)))
        total = self._numerics.sum_of_squares(gradient for one, gradient in counted if not one.parameter.expert)
        with self._recorder.layer("grad_norm"):
            if self._plan.model.is_moe:
                of_experts = self._numerics.sum_of_squares(
                    gradient for one, gradient in counted if one.parameter.expert
                )
                of_experts = of_experts.over(self._mesh.ep).over(self._mesh.etp)
                total = total + of_experts if self._mesh.coordinates["tp"] == 0 else total
            return torch.sqrt(self._whole(total.over(self._mesh.model)))

    def mean_loss(self, token_losses: Mapping[int, Tensor], num_counted: int) -> Tensor:
        """The mean over the tokens of a global batch that count, on every rank. Tensor-parallel ranks hold the
        same losses: one enters."""
        counted = token_losses.values() if self._mesh.coordinates["tp"] == 0 else ()
        with self._recorder.layer("loss"):
            return self._whole(self._numerics.sum(counted).over(self._mesh.dp).over(self._mesh.model)) / num_counted

    def mean_aux_loss(self) -> Tensor:
        """What routers add to the loss, per token of the global batch; 0 where the plan has no such losses."""
        if not self._plan.train.adds_router_losses:
            return self._zero
        losses = [loss for stage in self._stages for router in stage.routers for loss in router.take_losses()]
        counted = losses if self._plan.layout.sequence_parallel or self._mesh.coordinates["tp"] == 0 else ()
        with self._recorder.layer("aux_loss"):
            return (
                self._whole(sum(counted, self._numerics.sum(())).over(self._mesh.dp).over(self._mesh.model))
                / self._num_tokens
            )

    def mean_mtp_loss(self, num_counted: int) -> Tensor:
        """The losses of multi-token prediction per token that counts, the mean over the modules; 0
        where there are none."""
        if not self._plan.model.num_mtp_layers:
            return self._zero
        losses = [
            loss for stage in self._stages if stage.multi_token is not None for loss in stage.multi_token.take_losses()
        ]
        counted = losses if self._mesh.coordinates["tp"] == 0 else ()
        with self._recorder.layer("mtp_loss"):
            total = sum(counted, self._numerics.sum(())).over(self._mesh.dp).over(self._mesh.model).value
        return total / num_counted / self._plan.model.num_mtp_layers

    @property
    def _zero(self) -> Tensor:
        return self._numerics.sum(()).value

    def _whole(self, total: Scalar) -> Tensor:
        """A sum over a model; with several modules the sum of theirs, into which one rank
        of each brings its own."""
        if self._modules is None:
            return total.value
        leads = not any(self._mesh.coordinates.values())
        return (total if leads else self._numerics.sum(())).over(self._modules).value
