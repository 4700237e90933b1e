"""The software stacks by name: `PROFILES`, and what a plan makes of one.

`runtime.profile` names the stack; plan keys that a stack lets its users choose (overlap switches, the attention kernel,
CUDA graphs, the bucket size) override its defaults in `profile_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ...core.model.attention_kinds import has_altered_softmax
from ...core.plan.plan import Plan
from ...core.plan.runtime import Runtime
from ...core.plan.sections import DataParallel, Precision
from ...core.schedule import CATALOG
from .casts import TORCHAO_CASTS
from .megatron import MEGATRON
from .memory_profile import ALLOCATOR_FACTOR, MemoryProfile
from .profile import Profile
from .pytorch import PYTORCH
from .transformer_engine import TRANSFORMER_ENGINE

_OWN = Profile(
    "shardproof",
    schedules=tuple(name for name in CATALOG if name != "ZBAuto"),  # itself a search, tried only when it is pinned
    tensor_overlap_asked="backward",  # backend/tensor_parallel/linear.py
    overlaps_in_pairs="asked",
    reduces_by_program=True,
    fuses_fast_gradients=True,  # backend/numerics/token_product.py
    unfuses_altered_softmax=True,  # backend/model/written_attention.py
    host_kernels_counted=True,
    memory=MemoryProfile(  # backend/model, backend/tensor_parallel
        eager=True,
        stores_tables=True,
        growing_gradients=True,
        separate_gradients=True,
        defers_products=True,
        pairs_in_turn=True,
        counted_masks=True,
        allocator_factor=ALLOCATOR_FACTOR,
    ),
)
"""Our own backend."""

PROFILES: Mapping[str, Profile] = {
    profile.name: profile for profile in (_OWN, *TRANSFORMER_ENGINE, *PYTORCH, *MEGATRON)
}
"""`runtime.profile` -> behaviour; `core.plan.profiles` says in words which stack each is."""


def profile_of(plan: Plan) -> Profile:
    """The stack that a plan runs on, with the plan's own switches in place of the stack's defaults."""
    model = plan.model
    return _resolved(
        plan.runtime,
        plan.data_parallel,
        plan.precision,
        plan.layout.vpp,
        bool(model.hidden_dropout or model.attention_dropout),
        has_altered_softmax(model),
        plan.cluster.collective_library != "nccl",
        plan.numerics.mode == "fast",
    )


def forget() -> None:
    """Lets go of the stacks that plans were resolved to, for whoever changes `PROFILES`."""
    _resolved.cache_clear()


@lru_cache(maxsize=256)
def _resolved(
    runtime: Runtime,
    data_parallel: DataParallel,
    precision: Precision,
    vpp: int,
    dropout: bool,
    altered_softmax: bool,
    on_cpus: bool,
    fast: bool,
) -> Profile:
    stack = PROFILES[runtime.profile]
    profile = replace(stack, **_switches(stack, runtime, data_parallel, precision, vpp))
    if fast and stack.fuses_fast_gradients:
        profile = replace(profile, fused_gradients=True)
    if dropout:
        profile = replace(profile, dropout=True)
    if altered_softmax and stack.unfuses_altered_softmax:
        profile = replace(profile, fused_attention=False)
    return replace(profile, memory=_memory(profile, runtime.fused_loss, precision.dtype, on_cpus=on_cpus))


def _switches(
    stack: Profile, runtime: Runtime, data_parallel: DataParallel, precision: Precision, vpp: int
) -> Mapping[str, Any]:
    """The fields of a stack that a plan chooses itself."""
    switches = {
        "p2p_overlap": False if stack.p2p_overlap_interleaved_only and vpp == 1 else None,
        "cuda_graphs": runtime.cuda_graphs,
        "graph_scope": runtime.cuda_graph_scope,
        "scatter_gather": runtime.scatter_gather,
        "expert_overlap": runtime.ep_comm_overlap,
        "dispatch_once": runtime.dispatch_once,
        "amax_reduction": runtime.amax_reduction,
        "launch_blocking": runtime.launch_blocking,
        "fused_loss": runtime.fused_loss,
        "dropout": runtime.dropout,
        "fused_elementwise": runtime.compile,
        "overlap_grad_reduce": data_parallel.overlap_grad_reduce,
        "overlap_param_gather": data_parallel.overlap_param_gather,
        "check_gradients": data_parallel.check_gradients,
        "gradient_dtype": precision.gradient_dtype,
    }
    given: dict[str, Any] = {name: value for name, value in switches.items() if value is not None}
    if runtime.p2p_overlap is not None:
        given["p2p_overlap"] = runtime.p2p_overlap
    if runtime.attention is not None:
        given["fused_attention"] = runtime.attention != "unfused"
        if runtime.attention != "unfused":
            given["attention_kernel"] = "best" if runtime.attention == "fused" else runtime.attention
    if runtime.tp_comm_overlap is not None:
        given["tensor_overlap"] = stack.tensor_overlap_asked if runtime.tp_comm_overlap else stack.tensor_overlap
    if data_parallel.bucket_bytes is not None:
        given |= {"bucket_elements": data_parallel.bucket_bytes / 4, "bucket_elements_per_copy": 0.0}
    if precision.scaling is not None:
        given["casts"] = TORCHAO_CASTS[precision.scaling]
    return given


def _memory(profile: Profile, fused_loss: bool | None, dtype: str, *, on_cpus: bool) -> MemoryProfile:
    """What a stack with its switches set holds."""
    memory = profile.memory
    if fused_loss is not None:
        memory = replace(memory, cross_entropy_in_place=fused_loss, eager_loss=memory.eager_loss and not fused_loss)
    return replace(
        memory,
        fused_attention=profile.fused_attention,
        dropout=profile.dropout and not memory.counted_masks,
        fp32_gradients=profile.gradient_bytes(dtype) == 4,
        allocator_factor=1.0 if on_cpus else memory.allocator_factor,
    )
