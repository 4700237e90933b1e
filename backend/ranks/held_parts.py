"""What a rank holds of the parameters, and what of it rests in host memory."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.model.parameters import TOKEN_TABLE, Parameter
from ...core.plan.plan import Plan
from ..base.host_copies import HostCopies
from ..data_parallel.base import DataParallel
from ..optimizers.held import Held
from ..optimizers.offloaded_moments import num_offloaded
from ..transport.mesh import Mesh


def held_by(plan: Plan, mesh: Mesh, data_parallel: Mapping[int, DataParallel]) -> list[Held]:
    """What this rank holds, stage by stage, and which of it enters the norm: replicas over tp, second replicas of
    stages, and the second tied table do not. With ZeRO it holds pieces, each of which is on no other copy, or counts on
    the first that has it."""
    here, placement = mesh.coordinates, plan.placement
    return [
        Held(
            each.parameter,
            each.slices,
            each.tensor,
            counts=_counts(plan, mesh, stage, each.parameter)
            and (own.counts(each.parameter) if plan.layout.zero else placement.replica_of(stage, here["pp"]) == 0),
            rounded=own.rounded(each),
            stage=stage,
        )
        for stage, own in data_parallel.items()
        for each in own.pieces
    ]


def _counts(plan: Plan, mesh: Mesh, stage: int, parameter: Parameter) -> bool:
    own_tp = mesh.etp.rank if parameter.expert else mesh.coordinates["tp"]
    return (parameter.cut is not None or own_tp == 0) and not _is_second_table(plan, stage, parameter.name)


def _is_second_table(plan: Plan, stage: int, name: str) -> bool:
    return plan.model.shares_table and name == TOKEN_TABLE and not plan.stages[stage].embedding


def send_masters(data_parallel: Mapping[int, DataParallel], copies: HostCopies, share: float) -> None:
    """The fp32 weights of the first parameters, at least that share of the rank's, rest in host memory."""
    left = num_offloaded([each.tensor.nbytes for own in data_parallel.values() for each in own.pieces], share)
    for own in data_parallel.values():
        own.send_masters(copies, min(left, len(own.pieces)))
        left -= min(left, len(own.pieces))
