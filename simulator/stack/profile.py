"""`Profile`: what a software stack is to the simulator, field by field."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from ...core.machine.cluster import ClusterSpec
from ..engine.graph import Sends
from .casts import TRANSFORMER_ENGINE_CASTS, Casts
from .delayed_scaling import AmaxRanks
from .memory_profile import MemoryProfile

TensorOverlap = Literal["none", "backward", "forward", "all"]
"""Which tensor-parallel collectives overlap with products: none; those of the backward, launched during the
weight-gradient product (Megatron's asynchronous all-reduce); those of the forward, cut into chunks (async TP: 20% less
time for the forward of Llama 3 70B and 8% for all of the step; discuss.pytorch.org/t/209487); or both (Transformer
Engine's userbuffers)."""


AttentionKernel = Literal["best", "flash-2", "flash-1", "triton"]
"""Which fused attention: the best for the device (what its efficiencies are of), FlashAttention-2, the first
FlashAttention, or that in Triton."""

FLASH_ATTENTION_1_SHARE = 0.53
"""Rate of FlashAttention as a share of FlashAttention-2: 25-40% against 50-73% of the peak (Dao 2023, abstract)."""

TRITON_SHARES = {False: 0.62, True: 0.56}
"""Rates of the first FlashAttention in Triton, forward and backward, as shares of FlashAttention-2. Measured: 0.358 and
0.243 of an A100's peak in bf16 with 4,096 tokens and heads of 64 (triton-lang/triton,
python/test/regression/test_performance.py of 2023), where FlashAttention-2 reaches 0.579 and 0.431
(`compute.attention_s`). Dao 2023, section 4.1, finds FlashAttention-2 1.3 to 1.5 times as fast forward and about twice
backward as a later one, which is faster forward (0.47) and slower backward (0.23)."""


ADAMW_BYTES = 42.0
"""Traffic per parameter of a fused AdamW with clipping, fp32 gradients and 16-bit weights: gradient read for the norm
(4), gradient, master weight and two moments read (16), the latter three and the weight written (14), the gradient
cleared (4), and 4 for its scaling by the clipping coefficient."""


@dataclass(frozen=True)
class Profile:
    """A software stack. Sizes in bytes."""

    name: str

    schedules: tuple[str, ...] = ("1F1B",)
    """What it runs, of those in `core.schedule.CATALOG`: a search tries these unless one is pinned. A stack without
    pipelines has one stage."""

    # Messages between stages.

    sends: Sends = "rendezvous"
    """What ends a send."""

    recv_buffers: int = 2
    """How many receives are posted ahead."""

    p2p_overlap: bool = True
    """Messages overlap with compute; without it sender and receiver stand still meanwhile."""

    p2p_overlap_interleaved_only: bool = False
    """They do so with several stages on a rank only, unless a plan says otherwise."""

    scatter_gather: bool = False
    """Without sequence parallelism a message crosses nodes in tp parts and is gathered on the links of the receiving
    node (Narayanan et al. 2021, section 4.1)."""

    # Collectives of layers.

    tensor_overlap: TensorOverlap = "none"

    tensor_overlap_asked: TensorOverlap = "none"
    """What `runtime.tp_comm_overlap = true` makes of it."""

    context_overlap: bool = False
    """Keys and values are sent while attention works on those that are there."""

    keeps_gathered: bool = False
    """Tokens gathered for a forward are kept, or repeated with it, not gathered once more for the weight gradient."""

    dispatch_once: bool = False
    """A token is sent once to each node that has some of its experts (inside a node: to each device), not to each
    expert."""

    expert_overlap: bool = False
    """A forward's exchanges of tokens between experts overlap with the backward of another microbatch, and the
    reverse."""

    overlaps_in_pairs: Literal["always", "asked"] = "always"
    """`always` where a pair of a schedule does so unasked; `asked` where pairs alone do so, with `expert_overlap`."""

    # Gradients and weights between replicas.

    gradient_dtype: Literal["fp32", "bf16", "fp32-of-bf16"] = "fp32"
    """What gradients are added up and reduced in. `fp32-of-bf16` is fp16 for fp16 weights and fp32 for others
    (accumulate_allreduce_grads_in_fp32 in megatron/arguments.py, v2.5 as later; DeepSpeed's BF16_Optimizer)."""

    overlap_grad_reduce: bool = False
    """Gradients are reduced during the last backward, by buckets."""

    overlap_param_gather: bool = False
    """Weights are gathered during the first forward, by buckets."""

    bucket_elements: float = 40e6
    """Parameters of a bucket."""

    bucket_elements_per_copy: float = 0.0
    """So many times the copies of the weights, if that is more."""

    reduces_last: bool = False
    """Without that overlap, gradients of all stages are reduced when a rank has finished its last microbatch."""

    reduces_by_program: bool = False
    """After a microbatch it reduces what `core.program` says, as our backend; others reduce everything then."""

    check_gradients: bool = False
    """The host waits for each bucket to be looked through for NaN (`simulator.cost.once_a_step`)."""

    fp8_tables_last: bool = False
    """With fp8 weights tables are reduced last and gathered first."""

    tables_in_one_gather: bool = False
    """Under ZeRO-3 embedding and head are gathered and reduced as one unit, before the first layer and after the
    last."""

    gathers_by_tensor: bool = False
    """ZeRO-3 gathers weights and scatters gradients tensor by tensor, each in a list with a part for every rank, and
    nothing overlaps with it."""

    gather_ahead_elements: float = inf
    """ZeRO-3 starts gathers, a block's dense weights and its experts apart, until so many parameters are under way, and
    lets as many gradients wait for their reduction."""

    one_queue: bool = False
    """With sequence parallelism all kernels reach the device through one queue, where what adds up reduced gradients
    holds back the kernels behind it, so that nothing overlaps with a reduction."""

    gather_copy_bytes: float = 0.0
    """What a device moves per parameter to unpack gathered weights."""

    reduce_copy_bytes: float = 0.0
    """What it moves to pack and scale 16-bit gradients before they are reduced and scattered."""

    reduce_cast_bytes: float = 0.0
    """What it moves in addition where they are reduced in fp32."""

    # The optimizer's step.

    optimizer_bytes: float = ADAMW_BYTES
    """Memory traffic of the step per parameter."""

    optimizer_by_tensor: bool = False
    """ZeRO 1 copies gradients and weights tensor by tensor (`simulator.cost.once_a_step`)."""

    # Kernels of layers.

    fused_attention: bool = True
    """One kernel keeps scores out of memory and skips the masked half."""

    unfuses_altered_softmax: bool = False
    """Attention whose probabilities pass a dropout, or whose scores are capped or share with sinks, is not fused."""

    attention_kernel: AttentionKernel = "best"

    fused_elementwise: bool = False
    """Norms, rotation and gated activations are one kernel each; without, each of their steps is one."""

    fused_squared_relu: bool = True
    """That activation is one kernel too, not one for its maximum and one for its square."""

    scaled_rotation_in_steps: bool = False
    """Where rotation also scales queries and keys (YaRN) each of its steps is a kernel all the same."""

    expert_bias_in_steps: bool = False
    """Biases of the experts' results are added expert by expert, in kernels of their own."""

    fused_loss: bool = False
    """The cross-entropy runs in few passes over the logits."""

    fused_gradients: bool = False
    """Weight-gradient products add to the sum over microbatches themselves."""

    fuses_fast_gradients: bool = False
    """They do in fast numerics; exact ones keep what they add apart."""

    separate_projections: bool = False
    """Queries, keys, values, gate and up are products of their own, whose input gradients are added up."""

    dropout: bool = False
    """Residuals and attention probabilities pass a dropout."""

    router_dtype: Literal["fp32", "weights"] = "fp32"
    """Number format of the operands of routers' products; scores are fp32 in either case."""

    casts: Casts = TRANSFORMER_ENGINE_CASTS
    """How operands of products come to 8 bits."""

    amax_reduction: AmaxRanks | Literal["none"] = "none"
    """With fp8, the ranks that agree on the largest magnitudes of operands after every pass (`delayed_scaling`); none
    where scales are those of the tensors at hand."""

    # Recomputation.

    selective_operators: bool = False
    """Selective recomputation keeps the results of every second product, and of attention unless the plan's modules
    name its core, and repeats all else."""

    recomputation_stops_early: bool = False
    """Repeating a layer or module ends when all that gradients need is there again."""

    # The host.

    host_calls: float = 1.0
    """Host time per kernel in units of the cluster's `host_dispatch_s`: Python modules, autograd nodes, views and small
    kernels not counted."""

    host_kernels_counted: bool = False
    """How many kernels each layer runs on a CPU is counted (`simulator.cost.host_blocks`)."""

    engine_share: float = 0.0
    """What the runtime takes in addition, as a share of the seconds of a stage."""

    cuda_graphs: bool = False
    """Launches cost the host nothing."""

    graph_scope: Literal["step", "layer"] = "step"
    """With graphs: what is launched as one, a step, or a layer of one microbatch, which costs the host a few launches
    more."""

    launch_blocking: bool = False
    """The host launches nothing before the last kernel has ended."""

    memory: MemoryProfile = field(default_factory=MemoryProfile)
    """Which tensors it holds."""

    def attention_share(self, cluster: ClusterSpec, *, backward: bool = False) -> float:
        """Rate of the stack's fused attention as a share of the best one on a device."""
        match self.attention_kernel:
            case "best":
                return 1.0
            case "flash-2":
                return cluster.flash_attention_2_share
            case "flash-1":
                return cluster.flash_attention_2_share * FLASH_ATTENTION_1_SHARE
            case "triton":
                return cluster.flash_attention_2_share * TRITON_SHARES[backward]

    def reduce_copies(self, dtype: str) -> float:
        """Bytes per parameter that a device moves to get gradients ready to be reduced, for
        weights of a number format."""
        return self.reduce_copy_bytes + (self.reduce_cast_bytes if self.gradient_bytes(dtype) == 4 else 0.0)

    @property
    def send_rule(self) -> Sends:
        """What ends a send, for `simulator.engine.graph`."""
        return self.sends if self.p2p_overlap else "blocking"

    def gradient_bytes(self, dtype: str) -> int:
        """Bytes of one gradient element as it is reduced, for weights of a number format."""
        in_fp32 = self.gradient_dtype == "fp32" or (self.gradient_dtype == "fp32-of-bf16" and dtype != "fp16")
        return 4 if in_fp32 or dtype == "fp32" else 2

    def bucket_of(self, copies: int) -> float:
        """Parameters of one bucket where so many copies add up their gradients."""
        return max(self.bucket_elements, self.bucket_elements_per_copy * copies)
