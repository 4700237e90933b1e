"""Muon (Jordan 2024; Liu et al. 2025, arXiv 2502.16982) on a rank's parts of matrices: momentum is the rank's own, and
what it gives is made orthogonal on the rank that has the whole matrix (`whole`, `orthogonal`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...core.model.matrices import split_of
from ...core.model.model import ModelSpec
from ...core.model.parameters import parameters
from ...core.plan.optimizer import Optimizer, Update
from ...core.program.orthogonal import parameter_flops
from ..transport.base import Group
from .held import Held
from .orthogonal import Squares, orthogonal_parts
from .updates import Row, Step
from .whole import WholeMatrices

Parts = tuple[Group, Sequence[Held]]
"""The ranks that hold parts of the same matrices, and this rank's."""


class Muon:
    """The matrices of a rank's stages. All ranks of a stage make the same calls together."""

    def __init__(
        self, model: ModelSpec, choice: Optimizer, parts: Sequence[Parts], squares: Squares, device: torch.device
    ):
        """`parts` of every group of this rank, in an order that all ranks have."""
        self._choice = choice
        self._squares = squares
        matrices = {each.name: each for each in parameters(model) if len(each.shape) > 1}
        self._splits = {name: split_of(model, each) for name, each in matrices.items()}

        def flops(name: str) -> int:
            return parameter_flops(model, matrices[name], choice.muon_steps)

        self._groups = [(WholeMatrices(group, held, flops, device), list(held)) for group, held in parts]

    def step(self, rows: Mapping[int, Row], updates: Mapping[int, Update], step: Step) -> None:
        """Updates weights in place. `rows` has by the identity of `Held.tensor` the weight, its gradient, which is used
        up, and momentum; so has `updates` how each follows."""
        momentum, nesterov = self._choice.own_momentum, self._choice.own_nesterov
        for whole, held in self._groups:
            directions = []
            for one in held:
                _, gradient, buffer = rows[id(one.tensor)]
                if step.scale is not None:
                    gradient.div_(step.scale)
                moved = _unless(step.skipped, buffer, buffer * momentum + gradient)
                directions.append(gradient.add_(moved * momentum) if nesterov else moved.clone())
                buffer.copy_(moved)
            whole.changed(directions, self._orthogonal)
            for one, direction in zip(held, directions, strict=True):
                weight, _, _ = rows[id(one.tensor)]
                update = updates[id(one.tensor)]
                rate, decay = update.learning_rate(step.learning_rate), update.weight_decay(step.weight_decay)
                weight.copy_(_unless(step.skipped, weight, weight * (1.0 - rate * decay) - direction * rate))

    def _orthogonal(self, name: str, whole: Tensor) -> Tensor:
        return orthogonal_parts(whole, self._splits[name], self._choice, self._squares)


def _unless(skipped: Tensor | None, before: Tensor, after: Tensor) -> Tensor:
    return after if skipped is None else torch.where(skipped.bool(), before, after)
