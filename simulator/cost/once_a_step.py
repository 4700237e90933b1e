"""What Megatron's data parallelism costs the host once a step while the device stands still: buckets that are looked
through before they are reduced, and an optimizer that goes tensor by tensor. Calls are counted in its code; their time
is the cluster's. Modelled.
"""

from __future__ import annotations

from ...core.layout.stage_parameters import stage_parameters
from ...core.plan.plan import Plan
from ...core.program import local_elements, num_shards
from ..compute.compute import host_s, traffic_s
from ..stack.profile import Profile

CHECK_CALLS = 6
"""Calls of the check of one bucket: its norm, the comparison with NaN and the copy of the answer that the host
waits for, then the same for infinity in two steps (Megatron-Core 0.13.1, distributed/param_and_grad_buffer.py,
check_grads). Counted."""

AFTER_CHECK = 2
"""Kernels of the stack that the host launches after a check before the device has work again: the bucket's collective
and the first of the next layer's backward. Counted."""

TENSOR_CALLS = {"fp8": 10}
"""Calls for each tensor of which a rank updates a part: two views and a copy of its gradient, a cast, four views and a
quantisation of its weight (Transformer Engine 2.5, pytorch/tensor/utils.py, cast_master_weights_to_fp8). Counted."""

TENSOR_CALLS_16_BIT = 6
"""The same without fp8: two views and a copy each way (Megatron-Core 0.13.1, optimizer/distrib_optimizer.py,
_copy_model_grads_to_main_grads and _copy_main_params_to_model_params). Counted."""


def waited_s(plan: Plan, profile: Profile, stage: int) -> float:
    """Seconds in a step in which the device waits for what the host does about a stage, the reading of its
    gradients included. None under ZeRO 2 and 3, which have other code; no check where a graph replays the whole step,
    since it cannot wait for the host."""
    cluster, dtype, zero = plan.cluster, plan.precision.dtype, plan.layout.zero
    if zero >= 2:
        return 0.0
    sizes = tensor_sizes(plan, stage)
    buckets, calls, seconds = num_buckets(plan, profile, stage), 0.0, 0.0
    if profile.check_gradients and not (profile.cuda_graphs and profile.graph_scope == "step"):
        calls += buckets * (CHECK_CALLS + AFTER_CHECK * profile.host_calls)
        seconds += traffic_s(cluster, sum(map(sum, sizes)) * profile.gradient_bytes(dtype))
    if profile.optimizer_by_tensor and zero:
        tensors = sum(map(len, sizes))
        updated = min(tensors, buckets + tensors / num_shards(plan, stage).dense)
        calls += updated * TENSOR_CALLS.get(dtype, TENSOR_CALLS_16_BIT)
    return seconds + host_s(cluster, calls)


def num_buckets(plan: Plan, profile: Profile, stage: int) -> int:
    """Buckets of a stage's gradients: each ends with the tensor that fills it, and without overlap there is one
    (Megatron-Core 0.13.1, distributed/param_and_grad_buffer.py, _ParamAndGradBuffer)."""
    if not profile.overlap_grad_reduce:
        return 1
    least, buckets = profile.bucket_of(plan.num_copies(stage)), 0
    for sizes in tensor_sizes(plan, stage):
        held = 0
        for size in sizes:
            held += size
            if held >= least:
                buckets, held = buckets + 1, 0
        buckets += held > 0
    return buckets


def tensor_sizes(plan: Plan, stage: int) -> tuple[list[int], ...]:
    """Elements of each tensor of a rank's part of a stage, the last first, buffer by buffer: those of other formats and
    of experts, of which each has its own, lie apart."""
    buffers: dict[tuple[bool, bool], list[int]] = {}
    experts = plan.model.num_experts // plan.layout.ep
    for parameter in reversed(stage_parameters(plan.model, plan.stages[stage])):
        narrow = (
            plan.precision.dtype == "fp8"
            and len(parameter.shape) > 1
            and not parameter.name.startswith(("embedding", "head"))
        )
        count = experts if parameter.expert else 1
        size = local_elements(plan, parameter) // count
        buffers.setdefault((parameter.expert, narrow), []).extend([size] * count)
    return tuple(buffers.values())
