"""The sections of a plan that say how a step uses a device: whose memory and overlap behaviour, what the backward pass
computes again, what rests in host memory."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Literal

from ..base.bounds import LAYERS, SEQUENCES
from ..base.option import Bounded, noun, option
from .stacks import STACKS

RECOMPUTE_MODULES = ("core_attn", "norm", "mlp", "mlp_act", "mla_up_proj", "moe", "moe_act", "shared_experts")
"""What selective recomputation can choose, as Megatron-Core's `--recompute-modules` (there `norm` is `layernorm`):
the attention core, the norms, a dense layer's MLP, the activation of dense MLPs and shared experts (which
Megatron-Core has for experts only), the up-projections of latent attention, the whole MoE layer, the activation of
its experts, the shared experts."""


@noun()
class Runtime(Bounded, section="runtime"):
    """Whose memory and overlap behaviour is modelled, and what of it the run does differently; None is as the
    profile."""

    profile: str = option(
        "whose memory and overlap behaviour is modelled",
        default="shardproof",
        choices=tuple(STACKS),
        listed="profiles",
        read_by="simulator.stack.profiles",
    )
    attention: Literal["fused", "flash-1", "flash-2", "triton", "unfused"] | None = option(
        "one kernel, or products with scores in memory",
        default=None,
        default_note="as the profile",
        more=(
            "`fused` is the best kernel there is, `flash-1` and `flash-2` are FlashAttention 1 and 2, and `triton` is "
            "Triton's."
        ),
        read_by="simulator.stack.profiles",
    )
    compile: bool | None = option(
        "a compiler fuses elementwise kernels",
        default=None,
        default_note="as the profile",
        read_by="simulator.stack.profiles",
    )
    tp_comm_overlap: bool | None = option(
        "tensor-parallel collectives overlap with products",
        default=None,
        default_note="as the profile",
        read_by="simulator.stack.profiles",
    )
    p2p_overlap: bool | None = option(
        "messages between stages overlap with products",
        default=None,
        default_note="as the profile",
        read_by="simulator.stack.profiles",
    )
    p2p_batched: bool | None = option(
        "without p2p_overlap: neighbouring messages of a rank's list begin together, not one by one",
        default=None,
        default_note="true",
        more="Both are modelled in the same way.",
        read_by="backend.pipeline.row_messages",
    )
    cuda_graphs: bool | None = option(
        "the kernels of an action are launched as one",
        default=None,
        default_note="as the profile",
        more=("Our own backend captures on GPUs with NCCL; `runtime.cuda_graph_scope` says how much is one graph."),
        read_by="simulator.stack.profiles",
    )
    ep_comm_overlap: bool | None = option(
        "tokens are exchanged between experts during another microbatch's products",
        default=None,
        default_note="as the profile",
        more="Our own backend overlaps all exchanges of a layer, in the pairs of a schedule.",
        read_by="simulator.stack.profiles",
    )
    context_parallel: Literal["all_gather", "ring"] | None = option(
        "how keys and values reach the ranks that have other parts of a sequence",
        default=None,
        default_note="as the profile",
        more="All at once, or from neighbour to neighbour.",
        read_by="core.program.attention",
    )
    dispatch_once: bool | None = option(
        "a token goes once to each node (or device of a node), not to each of its experts",
        default=None,
        default_note="as the profile",
        more="It goes once to each node, and inside a node once to each device (DeepEP, HybridEP).",
        read_by="simulator.stack.profiles",
    )
    amax_reduction: Literal["none", "model", "replicas"] | None = option(
        (
            "fp8: ranks that agree on the largest magnitudes after every pass, of one replica or of all (delayed "
            "scaling)"
        ),
        default=None,
        default_note="as the profile",
        more=(
            "`none` scales by the tensors at hand; Megatron-Core has the other two with and without `tp_only_amax_red`."
        ),
        read_by="simulator.stack.profiles",
    )
    _: KW_ONLY
    cuda_graph_warmup_steps: int = option(
        "steps that are run kernel by kernel before one is captured",
        default=3,
        minimum=1,
        bound=SEQUENCES,
        more="As many passes over held-out data come before theirs is captured.",
        read_by="backend.ranks.training_rank",
    )
    cuda_graph_scope: Literal["step", "layer"] = option(
        "what is captured as one graph",
        default="step",
        more=(
            "`step`: the forwards and backwards of a step, STEP outside of it (Megatron-Core's `full_iteration`). "
            "`layer`: each layer, for each microbatch in flight; experts, messages, reductions, embedding and head "
            "stay outside."
        ),
        read_by="backend.ranks.training_rank",
    )
    scatter_gather: bool | None = option(
        "messages that all tp ranks hold cross nodes in tp parts",
        default=None,
        default_note="as the profile",
        read_by="simulator.stack.profiles",
    )
    trim_padding: bool = option(
        "microbatches of padded documents end with their longest one",
        default=False,
        more=(
            "They end in whole blocks of tokens: layers and messages are as long as that document, and no bit of the "
            "result changes. What is modelled is the whole sequence."
        ),
        read_by="backend.ranks.batches",
    )
    launch_blocking: bool | None = option(
        "the host waits for every kernel (CUDA_LAUNCH_BLOCKING=1)",
        default=None,
        default_note="as the profile",
        read_by="simulator.stack.profiles",
    )
    dropout: bool | None = option(
        "residuals and attention probabilities pass a dropout, whose share the model need not name",
        default=None,
        default_note="as the profile",
        more="Megatron-LM does so.",
        read_by="simulator.stack.profiles",
    )
    fused_loss: bool | None = option(
        "the loss keeps no fp32 softmax",
        default=None,
        default_note="as the profile",
        more="It writes the gradient of the loss over the logits instead.",
        read_by="simulator.stack.profiles",
    )


@noun()
class Recompute(Bounded, section="recompute"):
    """What the backward pass computes again. `num_layers` or `layers` limit `full`; without either it is all layers."""

    mode: Literal["none", "selective", "full"] = option(
        "what the backward pass computes again",
        default="none",
        more=(
            "`selective` recomputes `modules` of every layer, `full` keeps only each layer's input. In torchtitan "
            "`selective` goes by operations: it keeps the results of every second product and, unless `modules` names "
            'it, of the attention core, and repeats all else (`modules = ["norm"]` says no more than that).'
        ),
        read_by="core.program.recompute",
    )
    num_layers: int | None = option(
        "with full: so many layers of each stage",
        default=None,
        minimum=0,
        bound=LAYERS,
        default_note="all",
        more="They are the first of the stage.",
        read_by="core.program.recompute",
    )
    _: KW_ONLY
    layers: tuple[int, ...] | None = option(
        "with full: only these layers",
        default=None,
        bound=LAYERS,
        default_note="all",
        more="They are counted from 0 over the model.",
        read_by="core.program.recompute",
    )
    distribute: bool = option(
        "with full: tensor-parallel ranks keep a part of each input",
        default=False,
        more="The ranks gather it for the backward (Megatron-LM's `--distribute-saved-activations`).",
        read_by="core.program.recompute",
    )
    modules: tuple[str, ...] = option(
        "with selective: parts of a layer",
        default=("core_attn",),
        choices=RECOMPUTE_MODULES,
        more="`norm` is Megatron-Core's `layernorm`.",
        read_by="core.program.recompute",
    )


@noun()
class Offload(Bounded, section="offload"):
    """What rests in the host's memory while the device does not need it. Bits do not change: it is copied and computed
    with on the device."""

    activations: int = option(
        "so many layers of each stage keep what their backward needs in host memory",
        default=0,
        minimum=0,
        bound=LAYERS,
        more=(
            "They are the first of the stage, so that the copies of the last of them hide under the layers behind it. "
            "Each is copied while the next one computes, and comes back one layer ahead of its backward."
        ),
        read_by="backend.model.transformer",
    )
    optimizer: float = option(
        "share of the optimizer's moments that rests in host memory",
        default=0.0,
        minimum=0,
        maximum=1,
        more=(
            "Whole parameters, at least as much as the share says. Each step brings them to the device in pieces, "
            "updates them there and copies them back."
        ),
        read_by="backend.ranks.training_rank",
    )
    masters: bool = option(
        "fp32 weights of those parameters rest in host memory too",
        default=False,
        more=(
            "Where layers compute in 16 bits: the fp32 weights come and go with the moments, and the device keeps what "
            "layers compute with. ZeRO sends those of whole buckets."
        ),
        read_by="backend.ranks.training_rank",
    )

    @property
    def is_used(self) -> bool:
        """True when anything rests in host memory."""
        return self.activations > 0 or self.optimizer > 0
