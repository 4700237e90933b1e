"""The gradient of a tied token table: the sum of what its first stage uses it for, looking tokens up, and
its last, making logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...core.layout.stage_parameters import stage_usages
from ...core.model.parameters import TOKEN_TABLE
from ...core.plan.plan import Plan
from ...core.program.buckets import owned_interval
from ...core.program.holdings import local_elements, num_shards
from ...core.program.tensors import sequences_are_cut
from ..base.recorder import Recorder
from ..gradients.gradients import finish_tied
from ..transport.base import Group
from ..transport.mesh import Mesh


def tied_gradients(
    plan: Plan, mesh: Mesh, reduced: Mapping[int, Mapping[str, Tensor]], recorder: Recorder
) -> dict[int, Tensor]:
    """The gradient by stage, from what the stages of this rank have `reduced`: whole, or with ZeRO the part that the
    rank keeps of the stage. Empty on ranks without an end, where nothing is tied, and where a stage has added both uses
    itself. Ranks of both ends come together."""
    usages = [
        (stage, usage)
        for stage in reduced
        for usage in stage_usages(plan.model, plan.stages[stage])
        if usage.role and usage.key in reduced[stage]
    ]
    sums = {usage.role: reduced[stage][usage.key] for stage, usage in usages}
    if not sums:
        return {}
    if mesh.embedding is None:
        return {
            stage: finish_tied(sums["embedding"], sums["output"])
            for stage in dict.fromkeys(stage for stage, _ in usages)
        }
    with recorder.layer(TOKEN_TABLE.removesuffix(".weight")):
        if len(sums) == 1:
            ((stage, usage),) = usages
            return {stage: finish_tied(*mesh.embedding.all_gather(sums[usage.role]))}
        return _crossed(plan, mesh, sums["embedding"], sums["output"], mesh.embedding)


def _crossed(plan: Plan, mesh: Mesh, embedding: Tensor, output: Tensor, group: Group) -> dict[int, Tensor]:
    """Every member of `group` holds both ends, in different replicas, and keeps another part of either's sum [n].

    Members are the replicas of the first stage, in order. What replica r of the last stage keeps is the same run of the
    table as what replica r of the first does, on another member.
    """
    first, last = plan.placement.ranks[0], plan.placement.ranks[-1]
    replica_of_last = [last.index(pp_rank) for pp_rank in first]
    lengths = [_owned(plan, mesh, pp_rank) for pp_rank in first]
    shapes = [(lengths[member] + lengths[replica_of_last[member]],) for member in range(group.size)]
    parts = [
        values.split([lengths[member], len(values) - lengths[member]])
        for member, values in enumerate(group.all_gather(torch.cat([embedding, output]), shapes))
    ]
    here = group.rank
    of_output = {replica: parts[member][1] for member, replica in enumerate(replica_of_last)}
    return {
        stage: finish_tied(parts[replica][0], of_output[replica])
        for stage, replica in ((0, here), (len(plan.placement.ranks) - 1, replica_of_last[here]))
    }


def _owned(plan: Plan, mesh: Mesh, pp_rank: int) -> int:
    """How many elements of the table's sum the replica of the first stage on a pipeline rank keeps."""
    here = mesh.coordinates
    elements = local_elements(
        plan, next(usage.parameter for usage in stage_usages(plan.model, plan.stages[0]) if usage.role), here["tp"]
    )
    copy = plan.copy_of(0, dp_rank=here["dp"], pp_rank=pp_rank, cp_rank=here["cp"])
    parts = num_shards(plan, 0).dense
    lo, hi = owned_interval(elements, parts, plan.layout.cp if sequences_are_cut(plan) else 1, copy % parts)
    return hi - lo
