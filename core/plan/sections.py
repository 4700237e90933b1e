"""The sections of a plan as data: what a run may choose besides its model, cluster and layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..base.bounds import Bounded

ProfileName = Literal[
    "shardproof",
    "megatron-te",
    "megatron-fsdp",
    "nemo-24.05",
    "nemo-25.02",
    "torchtitan",
    "fsdp",
    "fsdp-1.13",
    "xla",
    "nanotron",
    "megatron-2021",
    "megatron-2022",
    "megatron-2023",
    "megatron-deepspeed",
    "megatron-deepspeed-2023",
    "deepspeed-zero3",
    "zero-bubble",
    "zero-bubble-te",
    "zero-bubble-flash",
]

PROFILES: tuple[str, ...] = get_args(ProfileName)
"""Software stacks whose memory and overlap can be modelled, our own first; `simulator.stack.profiles`
says what each one does."""

RECOMPUTE_MODULES = ("core_attn", "norm", "mlp", "mlp_act", "mla_up_proj", "moe", "moe_act", "shared_experts")
"""What selective recomputation can choose, as Megatron-Core's `--recompute-modules` (there `norm` is `layernorm`):
the attention core, the norms, a dense layer's MLP, the activation of dense MLPs and shared experts (which
Megatron-Core has for experts only), the up-projections of latent attention, the whole MoE layer, the activation of
its experts, the shared experts."""


@dataclass(frozen=True)
class Runtime:
    """Whose memory and overlap behaviour is modelled, and what of it the run does differently; None is as the profile.

    `attention` is one fused kernel (the best there is, FlashAttention 1 or 2, or Triton's) or products with all scores
    in memory; `compile` fuses elementwise kernels; `tp_comm_overlap` and `p2p_overlap` run tensor-parallel collectives
    and messages between stages during products; `cuda_graphs` launches a stage's kernels as one; `scatter_gather` sends
    messages that all tensor-parallel ranks hold in parts; with `launch_blocking` the host waits for every kernel
    (CUDA_LAUNCH_BLOCKING=1); `fused_loss` writes the gradient of the loss over the logits instead of keeping an fp32
    softmax; `dropout` says whether a stack drops elements of residuals and attention probabilities where the model
    names no share (Megatron-LM does). `context_parallel` says how keys and values reach the other ranks of a sequence:
    all at once, or from neighbour to neighbour. `ep_comm_overlap` runs the exchanges of tokens between experts during
    the computation of another microbatch (our own backend all exchanges of a layer, in the pairs of a schedule);
    `dispatch_once` sends a token once to each node, inside a node once to each device, and not once to each of its
    experts (DeepEP, HybridEP). `amax_reduction` says which ranks agree on the largest magnitudes of fp8 operands after
    every pass of a stage: none (scales of the tensors at hand), those of one replica of the model, or of all replicas
    (delayed scaling, Megatron-Core with and without `tp_only_amax_red`).

    Where messages between stages do not overlap with products, `p2p_batched` says whether those that follow each other
    in a rank's list begin together (as without it) or one ends before the next begins; both are modelled in the same
    way. With `trim_padding` a microbatch of padded documents ends with its longest one, in whole blocks of tokens:
    layers and messages are as long as it is, and no bit of the result changes; what is modelled is the whole sequence.
    """

    profile: ProfileName = "shardproof"
    attention: Literal["fused", "flash-1", "flash-2", "triton", "unfused"] | None = None
    compile: bool | None = None
    tp_comm_overlap: bool | None = None
    p2p_overlap: bool | None = None
    p2p_batched: bool | None = None
    cuda_graphs: bool | None = None
    scatter_gather: bool | None = None
    launch_blocking: bool | None = None
    fused_loss: bool | None = None
    dropout: bool | None = None
    context_parallel: Literal["all_gather", "ring"] | None = None
    ep_comm_overlap: bool | None = None
    dispatch_once: bool | None = None
    amax_reduction: Literal["none", "model", "replicas"] | None = None
    trim_padding: bool = False


@dataclass(frozen=True)
class Batch(Bounded, section="batch"):
    """Sequences per optimizer step, sequences per microbatch, tokens per sequence."""

    global_size: int
    micro_size: int
    sequence: int


@dataclass(frozen=True)
class Precision(Bounded, section="precision"):
    """Number format of weights and activations in products; optimizer state is fp32.

    `gradient_dtype` is the format in which gradients are accumulated and reduced; None is as the profile. `scaling`
    says how far one scale of fp8 operands reaches: a tensor, a row or column, or 32 numbers of one (mxfp8); None is as
    the profile. Only torchtitan's are modelled apart (`simulator.stack.casts`).

    With fp16 the losses that gradients are taken of are scaled: by `loss_scale`, or where that is None by what begins
    at `initial_loss_scale`, halves after `loss_scale_hysteresis` overflows, down to `min_loss_scale`, and doubles after
    `loss_scale_window` steps without any (`backend.base.loss_scale`).
    """

    dtype: Literal["fp32", "bf16", "fp16", "fp8"] = "bf16"
    gradient_dtype: Literal["fp32", "bf16"] | None = None
    loss_scale: float | None = None
    initial_loss_scale: float = 4096.0
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000
    loss_scale_hysteresis: int = 2
    scaling: Literal["tensor", "row", "block"] | None = None


@dataclass(frozen=True)
class Recompute(Bounded, section="recompute"):
    """`selective` recomputes `modules` of every layer, `full` keeps only each layer's input. In torchtitan `selective`
    goes by operations: it keeps the results of every second product and, unless `modules` names it, of the attention
    core, and repeats all else (`modules = ["norm"]` says no more than that).

    `num_layers` limits `full` to the first so many layers of every stage, `layers` to those with these numbers, counted
    from 0 over the model; without either it is all of them. With `distribute` each tensor-parallel rank keeps its part
    of such an input only, and the ranks gather it for the backward (Megatron-LM's `--distribute-saved-activations`).
    """

    mode: Literal["none", "selective", "full"] = "none"
    num_layers: int | None = None
    modules: tuple[str, ...] = ("core_attn",)
    layers: tuple[int, ...] | None = None
    distribute: bool = False


@dataclass(frozen=True)
class ScheduleChoice(Bounded, section="schedule"):
    """A catalog name, or a CSV file that replaces it.

    `max_active_stages` lets ZeRO-3 gather whole stages by UNSHARD, so many at a time, as torch.distributed.pipelining
    does; without it every F and B gathers its layers one by one.
    """

    name: str = "1F1B"
    file: str | None = None
    max_active_stages: int | None = None


@dataclass(frozen=True)
class Numerics(Bounded, section="numerics"):
    """`exact` makes bits independent of the layout; `fast` uses the library's products and collectives.
    Blocks are leaf sizes."""

    mode: Literal["exact", "fast"] = "fast"
    gradient_token_block: int | None = None
    reduction_token_block: int | None = None
    ffn_block: int | None = None
    vocab_block: int | None = None


@dataclass(frozen=True)
class Optimizer(Bounded, section="optimizer"):
    """AdamW (Loshchilov & Hutter 2019) and global-norm clipping; `clip_grad_norm=0` turns clipping off."""

    name: Literal["adamw"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_grad_norm: float = 1.0


@dataclass(frozen=True)
class DataParallel(Bounded, section="data_parallel"):
    """How gradients are added up and parameters spread over data-parallel ranks; None is as the profile.

    `overlap_grad_reduce` reduces buckets of `bucket_bytes` under the last backward passes, `overlap_param_gather`
    gathers updated parameters under the first forward passes. `check_gradients` looks each bucket through for NaN
    before it is reduced, for which the host waits (Megatron's `check_for_nan_in_grad`). `shard` is the size of the
    groups that ZeRO shards over (hybrid sharding); None is all data-parallel ranks. `library` is whose code keeps
    parameters in parts: ours, or torch's `fully_shard` (FSDP2).
    """

    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    bucket_bytes: int | None = None
    check_gradients: bool | None = None
    shard: int | None = None
    library: Literal["shardproof", "torch"] = "shardproof"


@dataclass(frozen=True)
class Train(Bounded, section="train"):
    """What `train` and `verify --dynamic` run. `data` is a text file, a folder, or `python-stdlib`.

    `label_smoothing` and `z_loss` change what is minimised (`backend.tensor_parallel.cross_entropy.LossChoice`), not
    held-out losses. Tokens whose target is `ignore_token` count for nothing, also in the mean: a batch then has as many
    tokens as have other targets. With `packed` a sequence is made of documents: attention sees no earlier one, and
    positions begin again with each. With `padded` it is one document, cut where it is too long and else filled up with
    `ignore_token`, which counts for nothing. Weights start from `seed`, or are those of the Hugging Face folder `load`.

    `mtp_loss_weight` is the share of multi-token prediction in what is minimised, the mean over its modules
    (DeepSeek-V3, equation 25).

    `router_aux_loss` and `router_z_loss` are factors of what every router adds to the loss, `router_jitter` the largest
    share by which a router's inputs are scaled at random, and `expert_bias_rate` what a step adds to the bias of an
    expert that had less than its even share of the tokens, or takes from one that had more (`backend.model.router`).

    When no rank has ended an action for `timeout_s`, all are ended, and what each was waiting for is reported.
    """

    steps: int = 20
    data: str = "python-stdlib"
    seed: int = 1234
    learning_rate: float = 3e-4
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_token: int | None = None
    packed: bool = False
    padded: bool = False
    load: str | None = None
    mtp_loss_weight: float = 0.1
    router_aux_loss: float = 0.0
    router_z_loss: float = 0.0
    router_jitter: float = 0.0
    expert_bias_rate: float = 0.001
    timeout_s: float = 1800.0

    @property
    def adds_router_losses(self) -> bool:
        """True when routers add to the loss that is minimised."""
        return self.router_aux_loss > 0 or self.router_z_loss > 0


@dataclass(frozen=True)
class Checkpoint(Bounded, section="checkpoint"):
    """Where training saves all that it goes on from (`backend.checkpoint`); None is nowhere.

    It does so after its last step and, with `every`, after each step that `every` divides. The newest
    `keep` stay; None keeps all.
    """

    folder: str | None = None
    every: int | None = None
    keep: int | None = None
