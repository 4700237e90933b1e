"""The groups in which ranks bring the matrices of a stage together for Muon."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from ...core.plan.plan import Plan
from ...core.program.orthogonal import AXIS
from ..numerics import Numerics
from ..optimizers.held import Held
from ..optimizers.muon import Muon
from ..transport.base import Transport
from ..transport.mesh import Mesh


def open_muon(transport: Transport, plan: Plan, mesh: Mesh, numerics: Numerics, held: Sequence[Held]) -> Muon | None:
    """What orthogonalises the matrices in `held`; None for other optimizers. All ranks of the world call it together,
    and each group is of all ranks that hold a stage: tensor-parallel ranks, copies, and replicas."""
    if plan.optimizer.name != "muon":
        return None
    parts = []
    for stage in plan.placement.stages_of(mesh.coordinates["pp"]):
        own = [one for one in held if one.stage == stage and plan.optimizer.update_of(one.parameter).name == "muon"]
        ranks = _ranks_of(plan, stage)
        parts.append((transport.group(f"{AXIS}{stage}/{ranks[0]}", AXIS, ranks), own))

    def squares(tensor: Tensor) -> Tensor:
        return numerics.sum_of_squares([tensor]).value

    return Muon(plan.model, plan.optimizer, parts, squares, transport.device)


def _ranks_of(plan: Plan, stage: int) -> list[int]:
    layout = plan.layout
    axes = range(layout.tp), range(layout.cp), range(layout.dp), plan.placement.ranks[stage]
    found = (layout.global_rank(tp=tp, cp=cp, dp=dp, pp=pp) for tp, cp, dp, pp in itertools.product(*axes))
    return sorted(found)
