"""fp8 by delayed scaling: what it takes that ranks agree on the largest magnitudes of operands
after every pass of a stage.

Transformer Engine joins the magnitudes of all layers that a device holds, whichever of its stages ran, takes their
maxima over a group by one all-reduce that nothing overlaps with, and moves histories and scales on by one kernel: when
a stage's forward ends, and again when its backward does (pytorch/fp8.py at v1.13, `fp8_autocast_exit` and
`reduce_and_update_fp8_tensors`). The group is Megatron-Core's (parallel_state.py, `get_amax_reduction_group`): all
replicas of a pipeline rank, or with `tp_only_amax_red` one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ...core.machine.cluster import ClusterSpec
from ...core.plan.plan import Plan
from ...core.program import Collective
from ..compute.compute import elementwise_s

AmaxRanks = Literal["model", "replicas"]
"""Who agrees: the tensor- and context-parallel ranks of a replica, or those of all replicas."""

AXES_OF_RANKS: Mapping[AmaxRanks, str] = {"model": "tp_cp", "replicas": "tp_cp_dp"}

PRODUCTS_OF_LAYER = 4
"""Linear layers of a transformer layer, besides further experts, whose few bytes change nothing."""

AMAXES = {True: 2, False: 3}
"""Magnitudes kept for one of them, backward (the output's gradient, the input's) and forward (input, weight, output),
fp32 each (pytorch/constants.py and csrc/common.h, `FP8FwdTensors` and `FP8BwdTensors`)."""

AMAX_BYTES = 4
UPDATE_KERNELS = 2
"""One that joins magnitudes to a buffer, one that updates histories and scales
(common/recipe/delayed_scaling.cu, `kernel_bulk`)."""

AMAX_CALLS = 3
"""Calls of the host for them: the join, the all-reduce, the update, each with lists of all the device's tensors."""


def amax_reduction(plan: Plan, ranks: AmaxRanks, num_layers: int, *, backward: bool) -> Collective:
    """The all-reduce after a pass on a device that holds so many layers."""
    layout = plan.layout
    size = layout.tp * layout.cp * (layout.dp if ranks == "replicas" else 1)
    num_bytes = num_layers * PRODUCTS_OF_LAYER * AMAXES[backward] * AMAX_BYTES
    return Collective("amax", "all_reduce", AXES_OF_RANKS[ranks], size, 2 * num_bytes * (size - 1) // size)


def update_s(cluster: ClusterSpec) -> float:
    """Seconds of the kernels around it."""
    return elementwise_s(cluster, 0.0, UPDATE_KERNELS)
