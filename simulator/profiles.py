"""`Profile`: how a software stack communicates, overlaps and fuses. One entry per stack, each field with its source.

`runtime.profile` names the stack; plan keys that a stack lets its users choose (overlap switches, the attention kernel, CUDA graphs,
the bucket size) override its defaults in `profile_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from ..core.cluster import ClusterSpec
from ..core.plan import DataParallel, Plan, Runtime
from .graph import Sends

TensorOverlap = Literal["none", "backward", "all"]
"""Which tensor-parallel collectives run beside products: none; those of the backward, launched beside the weight-gradient product
(Megatron's asynchronous all-reduce); or, cut into chunks, those of the forward too (Transformer Engine's userbuffers, async TP)."""


AttentionKernel = Literal["best", "flash-2", "flash-1"]
"""Which fused attention: the best for the device (what its efficiencies are of), FlashAttention-2, or the first FlashAttention."""

FLASH_ATTENTION_1_SHARE = 0.53
"""Rate of FlashAttention as a share of FlashAttention-2: 25-40% against 50-73% of the peak (Dao 2023, abstract)."""


@dataclass(frozen=True)
class Profile:
    """A software stack. Sizes in bytes.

    `sends`, `recv_buffers`: what ends a send, and how many receives are posted ahead. `p2p_overlap`: messages travel beside compute;
    without it sender and receiver stand still meanwhile. `scatter_gather`: without sequence parallelism a message crosses nodes in
    tp parts and is gathered on the links of the receiving node (Narayanan et al. 2021, section 4.1).
    `tensor_overlap`: see `TensorOverlap`; `tensor_overlap_asked` is what `runtime.tp_comm_overlap = true` makes of it.
    `overlap_grad_reduce`, `overlap_param_gather`: gradients are reduced beside the last backward, weights gathered beside the first
    forward, both by buckets of about `bucket_elements` parameters, or `bucket_elements_per_copy` times the copies if that is more.
    `reduces_last`: without that overlap, gradients of all stages are reduced when a rank has finished its last microbatch.
    `fused_attention`: one kernel that keeps scores out of memory and skips the masked half; `attention_kernel`: which.
    `fused_elementwise`: norms, rotation and gated activations are one kernel each; without, each of their steps is one.
    `fused_loss`: the cross-entropy runs in few passes over the logits. `fused_gradients`: weight-gradient products add to the sum over
    microbatches themselves. `context_overlap`: keys and values travel while attention works on those that are there.
    `dropout`: residuals and attention probabilities pass a dropout. `gradient_dtype`: what gradients are reduced in; "weights" is the
    format of the weights. `optimizer_bytes`: memory traffic of the step per parameter. `cuda_graphs`: launches cost the host nothing.
    `launch_blocking`: the host launches nothing before the last kernel has ended.
    `router_dtype`: number format of the operands of routers' products; scores are fp32 in either case.
    `engine_share`: what the runtime takes beside, as a share of the seconds of a stage.
    `host_calls`: host time per kernel in units of the cluster's `host_dispatch_s`: Python modules, autograd nodes, views and small
    kernels not counted.
    """

    name: str
    sends: Sends = "rendezvous"
    recv_buffers: int = 2
    p2p_overlap: bool = True
    scatter_gather: bool = False
    tensor_overlap: TensorOverlap = "none"
    tensor_overlap_asked: TensorOverlap = "none"
    overlap_grad_reduce: bool = False
    reduces_last: bool = False
    overlap_param_gather: bool = False
    bucket_elements: float = 40e6
    bucket_elements_per_copy: float = 0.0
    fused_attention: bool = True
    attention_kernel: AttentionKernel = "best"
    fused_elementwise: bool = False
    fused_loss: bool = False
    fused_gradients: bool = False
    context_overlap: bool = False
    dropout: bool = False
    gradient_dtype: Literal["fp32", "bf16", "weights"] = "fp32"
    optimizer_bytes: float = 42.0
    cuda_graphs: bool = False
    launch_blocking: bool = False
    host_calls: float = 1.0
    engine_share: float = 0.0
    router_dtype: Literal["fp32", "weights"] = "fp32"

    def attention_share(self, cluster: ClusterSpec) -> float:
        """Rate of the stack's fused attention as a share of the best one on a device."""
        if self.attention_kernel == "best":
            return 1.0
        return cluster.flash_attention_2_share * (FLASH_ATTENTION_1_SHARE if self.attention_kernel == "flash-1" else 1.0)

    @property
    def send_rule(self) -> Sends:
        """What ends a send, for `simulator.graph`."""
        return self.sends if self.p2p_overlap else "blocking"

    def gradient_bytes(self, dtype: str) -> int:
        """Bytes of one gradient element as it is reduced, for weights of a number format."""
        return 4 if self.gradient_dtype == "fp32" or dtype == "fp32" else 2

    def bucket_of(self, copies: int) -> float:
        """Parameters of one bucket where so many copies add up their gradients."""
        return max(self.bucket_elements, self.bucket_elements_per_copy * copies)


ADAMW_BYTES = 42.0
"""Traffic per parameter of a fused AdamW with clipping, fp32 gradients and 16-bit weights: gradient read for the norm (4), gradient,
master weight and two moments read (16), the latter three and the weight written (14), the gradient cleared (4), and 4 for its
scaling by the clipping coefficient."""

FP16_OPTIMIZER_BYTES = 58.0
"""The same for Megatron's fp16 optimizer with dynamic loss scale (megatron/optimizer/optimizer.py, v2.5): gradients copied to fp32
(2 + 4), unscaled while looked through for overflow (8), read for the norm (4), clipped (8), Adam (28), weights copied back (4)."""

MEGATRON_HOST_CALLS = 9.75
"""Fitted: on the vTrain single-node rows a layer takes at least 3.0 ms forward and backward at tp=1 and 3.3 ms at tp=2 and 4, whatever
its size, for 39 to 43 counted kernels: 78 us a kernel. One number for the stack, from 32
independent measurements (see docs/validation.md)."""

_MEGATRON_2021 = Profile(
    # Megatron-LM v2.x to v3.x and its forks: p2p_communication.py waits for every message; the "local" data parallelism reduces one
    # flat buffer after the pipeline has drained; scores pass through memory with a fused scale-mask-softmax; dropout 0.1.
    # `tp_comm_overlap` stands for async-tensor-model-parallel-allreduce of v3 (Korthikanti et al. 2022, section 6.1).
    name="megatron-2021",
    recv_buffers=1,
    p2p_overlap=False,
    reduces_last=True,
    scatter_gather=True,
    tensor_overlap_asked="backward",
    fused_attention=False,
    fused_elementwise=True,
    dropout=True,
    gradient_dtype="weights",
    optimizer_bytes=FP16_OPTIMIZER_BYTES,
    host_calls=MEGATRON_HOST_CALLS,
)

DEEPSPEED_ENGINE_SHARE = 0.18
"""What DeepSpeed's pipeline engine takes longer than Megatron-LM's own, whatever the microbatch. Fitted: the mean over the seven families
of the calibration half of the BLOOM chronicles (29 rows), +- 0.03. Without any fit the same model on the same machine says so: 530B on
Selene takes 0.214 s a microbatch in MT-NLG (arXiv 2201.11990) and 0.181 s in SC21, table 1."""

_MEGATRON_DEEPSPEED = replace(_MEGATRON_2021, name="megatron-deepspeed", engine_share=DEEPSPEED_ENGINE_SHARE)

_MEGATRON_TE = Profile(
    # Megatron-Core with Transformer Engine: LinearWithGradAccumulationAndAsyncCommunication overlaps backward collectives;
    # tp_comm_overlap adds userbuffers; distributed optimizer, buckets of max(40e6, 1e6 * dp) parameters
    # (megatron/core/distributed/distributed_data_parallel_config.py); overlap_p2p_comm is for interleaved schedules only;
    # gradient_accumulation_fusion and cross_entropy_loss_fusion; TE's ring attention posts the next keys and values before it works
    # on the present ones (attention/dot_product_attention/context_parallel.py).
    name="megatron-te",
    tensor_overlap="backward",
    tensor_overlap_asked="all",
    reduces_last=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    bucket_elements_per_copy=1e6,
    host_calls=MEGATRON_HOST_CALLS,
    fused_elementwise=True,
    fused_loss=True,
    fused_gradients=True,
    context_overlap=True,
    router_dtype="weights",  # transformer/moe/router.py: bf16 by default; with --moe-router-dtype fp32 16-bit operands, fp32 result
)

_TORCHTITAN = Profile(
    # torchtitan: FSDP2 gathers and reduces per transformer block on its own streams (torchtitan/models/llama3/infra/parallelize.py);
    # async TP is asked for; batched p2p of torch.distributed.pipelining waits where its list says so; scaled_dot_product_attention
    # takes FlashAttention-2 (torch/nn/functional.py).
    name="torchtitan",
    tensor_overlap_asked="all",
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    attention_kernel="flash-2",
    fused_loss=True,
    context_overlap=True,
)

PROFILES: Mapping[str, Profile] = {
    profile.name: profile for profile in (Profile(name="shardproof"), _MEGATRON_TE, _TORCHTITAN, _MEGATRON_2021, _MEGATRON_DEEPSPEED)
}
"""`runtime.profile` -> behaviour. `shardproof` is our own backend (`backend.pipeline.messages`, `backend.data_parallel`)."""


def profile_of(plan: Plan) -> Profile:
    """The stack that a plan runs on, with the plan's own switches in place of the stack's defaults."""
    profile, model = _resolved(plan.runtime, plan.data_parallel, plan.precision.gradient_dtype, plan.layout.vpp), plan.model
    if not (model.hidden_dropout or model.attention_dropout):
        return profile
    unfused = profile.name == "shardproof" and model.attention_dropout > 0  # backend.tensor_parallel.dropout
    return replace(profile, dropout=True, fused_attention=profile.fused_attention and not unfused)


@lru_cache(maxsize=256)
def _resolved(runtime: Runtime, data_parallel: DataParallel, gradient_dtype: str | None, vpp: int) -> Profile:
    profile = PROFILES[runtime.profile]
    switches = {
        "p2p_overlap": runtime.p2p_overlap,
        "cuda_graphs": runtime.cuda_graphs,
        "scatter_gather": runtime.scatter_gather,
        "launch_blocking": runtime.launch_blocking,
        "fused_elementwise": runtime.compile,
        "overlap_grad_reduce": data_parallel.overlap_grad_reduce,
        "overlap_param_gather": data_parallel.overlap_param_gather,
    }
    given: dict[str, Any] = {name: value for name, value in switches.items() if value is not None}
    if runtime.attention is not None:
        given["fused_attention"] = runtime.attention != "unfused"
        if runtime.attention != "unfused":
            given["attention_kernel"] = "best" if runtime.attention == "fused" else runtime.attention
    if runtime.tp_comm_overlap is not None:
        given["tensor_overlap"] = profile.tensor_overlap_asked if runtime.tp_comm_overlap else profile.tensor_overlap
    if data_parallel.bucket_bytes is not None:
        given |= {"bucket_elements": data_parallel.bucket_bytes / 4, "bucket_elements_per_copy": 0.0}
    if gradient_dtype is not None:
        given["gradient_dtype"] = gradient_dtype
    if profile.name == "megatron-te" and vpp == 1 and "p2p_overlap" not in given:
        given["p2p_overlap"] = False
    return replace(profile, **given)
