"""Who makes which matrix of a stage orthogonal for Muon, and the calls in which matrices come together and go back.

All ranks that hold a stage share its matrices: the largest first, each to the rank that has the least to do so far. In
a round every rank has one matrix at most, so a step takes as many rounds as a rank has matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..model.matrices import matrix_shapes
from ..model.model import ModelSpec
from ..model.parameters import Parameter
from .optimizer_state import matrices_of
from .work import Collective

if TYPE_CHECKING:
    from ..plan.plan import Plan

Matrix = tuple[str, int]
"""The name of a parameter, and the expert that the matrix is of; 0 of others."""

AXIS = "matrices"
"""What joins all ranks that hold a stage: tensor-parallel ranks, copies, and replicas."""


def parameter_flops(model: ModelSpec, parameter: Parameter, steps: int) -> int:
    """FLOPs of the products of the iterations on the matrices of a parameter, or of one of its experts: of each
    iteration two with the columns and one of the short side."""
    sides = [sorted(shape) for shape in matrix_shapes(model, parameter)]
    return steps * sum(4 * short * short * long + 2 * short**3 for short, long in sides)


def owned_matrices(flops: Mapping[Matrix, int], size: int) -> list[list[Matrix]]:
    """By member of a group of `size` the matrices that it makes orthogonal, the largest first."""
    owned: list[list[Matrix]] = [[] for _ in range(size)]
    loads = [0] * size
    for matrix in sorted(flops, key=lambda each: (-flops[each], each)):
        member = min(range(size), key=lambda each: (loads[each], each))
        owned[member].append(matrix)
        loads[member] += flops[matrix]
    return owned


def muon_calls(plan: Plan, stage: int) -> Iterator[Collective]:
    """What every rank of a stage calls in STEP: to the owners and back, round by round. How many bytes a rank sends
    follows from the pieces that ZeRO leaves it, and is not said here."""
    size = plan.layout.tp * plan.num_copies(stage)
    if size == 1:
        return
    flops = {
        (parameter.name, expert): parameter_flops(plan.model, parameter, plan.optimizer.muon_steps)
        for parameter, count, _ in matrices_of(plan, stage)
        for expert in range(count)
    }
    for _ in range(2 * max(map(len, owned_matrices(flops, size)))):
        yield Collective("", "all_to_all", AXIS, size, 0)


def muon_set_up(plan: Plan, stage: int) -> Iterator[Collective]:
    """What they call before the first step: each says what it holds, first how many bytes that takes."""
    size = plan.layout.tp * plan.num_copies(stage)
    if size > 1 and plan.optimizer.name == "muon":
        yield from [Collective("", "all_gather", AXIS, size, 0)] * 2
