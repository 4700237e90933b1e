"""The sections of a plan as data: what a run may choose besides its model, cluster and layout."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Literal

from ..base.bounds import DEVICES, FACTOR, LAYERS, SEQUENCES, TABLE, TOKENS, Bound
from ..base.option import Bounded, noun, option
from ..layout.products import PRODUCT_FORMS, in_order
from ..schedule import CATALOG
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
class Batch(Bounded, section="batch"):
    """Sequences per optimizer step, sequences per microbatch, tokens per sequence."""

    global_size: int = option(
        "sequences per optimizer step", key="global", minimum=1, bound=SEQUENCES, read_by="core.plan.plan"
    )
    micro_size: int = option(
        "sequences per microbatch", key="micro", minimum=1, bound=SEQUENCES, default_note="1", read_by="core.plan.plan"
    )
    sequence: int = option("tokens per sequence", minimum=1, bound=TOKENS, read_by="core.program.tensors")
    _: KW_ONLY
    rampup: tuple[int, ...] | None = option(
        "the first batch, what is added to it, and the samples after which it is the global one",
        default=None,
        default_note="every step has the global batch",
        more=(
            "`[32, 32, 1000000]` begins with 32 sequences and adds 32 in even shares of a million samples, until there "
            "are `global` (Megatron-LM's `--rampup-batch-size`). Every size is whole microbatches, and all "
            "data-parallel ranks have some."
        ),
        read_by="core.plan.batch_sizes",
    )
    schedule: str | None = option(
        "batches by the samples before: 0:256 200K:512",
        default=None,
        default_note="every step has the global batch",
        more=(
            "Pairs of a threshold, which may end in K, M, B or T, and the batch from there on; the last batch is "
            "`global` (Megatron-LM's `--step-batch-size-schedule`)."
        ),
        read_by="core.plan.batch_sizes",
    )
    schedule_unit: Literal["samples", "tokens"] = option(
        "what the thresholds of schedule count", default="samples", read_by="core.plan.batch_sizes"
    )

    @property
    def stays(self) -> bool:
        """True when every step has the same batch."""
        return self.rampup is None and self.schedule is None


@noun()
class Precision(Bounded, section="precision"):
    """Number formats, and how losses are scaled with fp16.

    The losses that gradients are taken of are scaled by `loss_scale`, or where that is None by what begins at
    `initial_loss_scale`, halves after `loss_scale_hysteresis` overflows, down to `min_loss_scale`, and doubles after
    `loss_scale_window` steps without any (`backend.base.loss_scale`).
    """

    dtype: Literal["fp32", "bf16", "fp16", "fp8"] = option(
        "number format of products",
        default="bf16",
        more="It is that of weights and activations; optimizer state is fp32.",
        read_by="core.program.tensors",
    )
    gradient_dtype: Literal["fp32", "bf16"] | None = option(
        "format of reduced gradients",
        default=None,
        default_note="as the profile",
        more="They are accumulated in it too.",
        read_by="simulator.stack.profiles",
    )
    loss_scale: float | None = option(
        "with fp16: factor of the loss",
        default=None,
        above=0,
        default_note="adapts itself",
        read_by="backend.base.loss_scale",
    )
    initial_loss_scale: float = option(
        "with fp16: the factor that adapting begins with", default=4096.0, above=0, read_by="backend.base.loss_scale"
    )
    min_loss_scale: float = option(
        "with fp16: the smallest factor", default=1.0, above=0, read_by="backend.base.loss_scale"
    )
    loss_scale_window: int = option(
        "with fp16: steps without an overflow until the factor doubles",
        default=1000,
        minimum=1,
        read_by="backend.base.loss_scale",
    )
    loss_scale_hysteresis: int = option(
        "with fp16: overflows until the factor halves", default=2, minimum=1, read_by="backend.base.loss_scale"
    )
    scaling: Literal["tensor", "row", "block"] | None = option(
        "with fp8 in torchtitan: how far a scale reaches",
        default=None,
        default_note="tensor",
        more=(
            "A scale is that of a tensor, of a row or column, or of 32 numbers of one (mxfp8). Only torchtitan's are "
            "modelled apart (`simulator.stack.casts`)."
        ),
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


@noun()
class ScheduleChoice(Bounded, section="schedule"):
    """A catalog name, or a CSV file that replaces it."""

    name: str = option("pipeline schedule", default="1F1B", choices=tuple(CATALOG), read_by="core.plan.schedule_choice")
    file: str | None = option(
        "a schedule CSV instead of a name", default=None, kind="path", read_by="core.plan.schedule_choice"
    )
    max_active_stages: int | None = option(
        "zero=3 gathers whole stages, so many at a time",
        default=None,
        minimum=1,
        bound=LAYERS,
        default_note="layer by layer",
        more=(
            "They are gathered by UNSHARD, as torch.distributed.pipelining does; without it every F and B gathers its "
            "layers one by one."
        ),
        read_by="core.plan.schedule_choice",
    )


ALL_PRODUCTS, NO_PRODUCTS = "all", "none"
"""In `numerics.triton_products`: every form, and not one."""


@noun()
class Numerics(Bounded, section="numerics"):
    """`exact` makes bits independent of the layout; `fast` uses the library's products and collectives.
    Blocks are leaf sizes."""

    mode: Literal["fast", "exact"] = option(
        "exact: bits independent of the layout", default="fast", read_by="backend.numerics"
    )
    gradient_token_block: int | None = option(
        "tokens per leaf of weight gradients",
        default=None,
        minimum=1,
        default_note="128, at most the sequence",
        read_by="core.plan.plan",
    )
    reduction_token_block: int | None = option(
        "tokens per leaf of norm and bias gradients",
        default=None,
        minimum=1,
        default_note="32, at most the former",
        read_by="core.plan.plan",
    )
    head_block: int | None = option(
        "key/value heads per leaf",
        default=None,
        minimum=1,
        default_note="1",
        more="Leaves that are wider make fewer, larger products of attention's matrices; a rank has whole ones.",
        read_by="core.plan.plan",
    )
    ffn_block: int | None = option(
        "MLP units per leaf",
        default=None,
        minimum=1,
        default_note="fine enough for every tp up to 8",
        read_by="core.plan.plan",
    )
    vocab_block: int | None = option(
        "vocabulary rows per leaf",
        default=None,
        minimum=1,
        default_note="fine enough for every tp up to 8",
        read_by="core.plan.plan",
    )
    triton_products: tuple[str, ...] | None = option(
        "exact: products by our Triton kernels; the others are the library's",
        default=None,
        choices=(NO_PRODUCTS, ALL_PRODUCTS, *PRODUCT_FORMS),
        default_note="measured on each GPU at the start; none on processors",
        more=(
            "Bits are others, so the choice is recorded with them. `none` leaves all of them to the library. "
            "On processors the kernels are interpreted, where TRITON_INTERPRET=1 is set: for tiny models."
        ),
        read_by="backend.numerics.product_choice",
    )

    @property
    def kernel_forms(self) -> tuple[str, ...]:
        """The `PRODUCT_FORMS` that our kernels make; none where that is still to be measured."""
        given = self.triton_products or ()
        if NO_PRODUCTS in given:
            return ()
        return PRODUCT_FORMS if ALL_PRODUCTS in given else in_order(given)


@noun()
class DataParallel(Bounded, section="data_parallel"):
    """How gradients are added up and parameters spread over data-parallel ranks; None is as the profile."""

    overlap_grad_reduce: bool | None = option(
        "gradients are reduced under the last backward passes",
        default=None,
        default_note="as the profile",
        read_by="simulator.stack.profiles",
    )
    overlap_param_gather: bool | None = option(
        "parameters are gathered under the first forward passes",
        default=None,
        default_note="as the profile",
        read_by="simulator.stack.profiles",
    )
    bucket_bytes: int | None = option(
        "gradients that are reduced at a time",
        default=None,
        minimum=1,
        default_note="as the profile",
        read_by="simulator.stack.profiles",
    )
    check_gradients: bool | None = option(
        "the host waits for each bucket to be looked through for NaN",
        default=None,
        default_note="as the profile",
        more="It does so before the bucket is reduced (Megatron's `check_for_nan_in_grad`).",
        read_by="simulator.stack.profiles",
    )
    shard: int | None = option(
        "ranks that ZeRO shards over (hybrid sharding)",
        default=None,
        minimum=1,
        bound=DEVICES,
        default_note="all data-parallel ranks",
        read_by="core.program.holdings",
    )
    library: Literal["shardproof", "torch"] = option(
        "with zero=2 or 3: whose code keeps parameters in parts (torch: its fully_shard, FSDP2)",
        default="shardproof",
        read_by="backend.ranks.training_rank",
    )


@noun()
class Train(Bounded, section="train"):
    """What `train` and `verify --dynamic` run.

    Smoothing, z losses and multi-token prediction change what is minimised
    (`backend.tensor_parallel.cross_entropy.LossChoice`), not held-out losses.
    """

    steps: int = option("optimizer steps", default=20, minimum=0, read_by="backend.trainer")
    data: str = option(
        "a text file, a folder, a token file, a URL of one, or python-stdlib",
        default="python-stdlib",
        kind="data",
        more=(
            "A token file has the name PREFIX of PREFIX.bin and PREFIX.idx, or is a plain .bin file. Several have "
            'weights: "0.3 news 0.7 books".'
        ),
        read_by="backend.data.corpus",
    )
    _: KW_ONLY
    split: str | None = option(
        "shares of documents for training, validation and tests, in their order: 949,50,1",
        default=None,
        default_note="90,10",
        more="Test documents are left out. Without, every tenth file of a folder is for validation.",
        read_by="backend.data.corpus",
    )
    validation_data: str | None = option(
        "validation text or tokens of its own, named as data",
        default=None,
        kind="data",
        default_note="part of data",
        read_by="backend.data.corpus",
    )
    data_cache: str | None = option(
        "where each host keeps what it has read of data at URLs",
        default=None,
        kind="path",
        default_note="a folder of this user's in TMPDIR",
        more="On a disk of the host. All runs of a user share it.",
        read_by="backend.data.token_files",
    )
    data_cache_bytes: int = option(
        "how large the pieces in data_cache may be together",
        default=16 * 2**30,
        minimum=1,
        more="Indices and texts, which are fetched whole, take as much again at most.",
        read_by="backend.data.token_files",
    )
    load: str | None = option(
        "a folder of Hugging Face (config.json, safetensors), Megatron-LM (torch_dist) or torchtitan",
        default=None,
        kind="path",
        default_note="drawn from seed",
        read_by="backend.ranks.training_rank",
    )
    seed: int = option("seed of weights and data order", default=1234, minimum=0, read_by="backend.ranks.batches")
    learning_rate: float = option(
        "the learning rate, after any warm-up and before any decay",
        default=3e-4,
        minimum=0,
        bound=FACTOR,
        read_by="backend.ranks.training_rank",
    )
    packed: bool = option(
        "attention and positions begin again with every document",
        default=False,
        more="Attention sees no earlier document.",
        read_by="backend.ranks.batches",
    )
    padded: bool = option(
        "a sequence is one document, filled up with ignore_token",
        default=False,
        more="It is cut where it is too long; what fills it up counts for nothing.",
        read_by="backend.ranks.batches",
    )
    ignore_token: int | None = option(
        "an id that is not learned: tokens with this target count for nothing",
        default=None,
        minimum=0,
        bound=TABLE,
        default_note="all count",
        more="Also in the mean: a batch then has as many tokens as have other targets.",
        read_by="backend.tensor_parallel.cross_entropy",
    )
    mtp_loss_weight: float = option(
        "weight of multi-token prediction's mean loss",
        default=0.1,
        minimum=0,
        bound=FACTOR,
        more="The mean is over its modules (DeepSeek-V3, equation 25).",
        read_by="backend.model.multi_token",
    )
    label_smoothing: float = option(
        "share of the target spread over the whole vocabulary",
        default=0.0,
        minimum=0,
        below=1,
        bound=FACTOR,
        more="Held-out losses are without it.",
        read_by="backend.tensor_parallel.cross_entropy",
    )
    z_loss: float = option(
        "factor of (log Z)^2 in every token's loss, Z the sum of exp(logits)",
        default=0.0,
        minimum=0,
        bound=FACTOR,
        more="Held-out losses are without it.",
        read_by="backend.tensor_parallel.cross_entropy",
    )
    router_aux_loss: float = option(
        "factor of the loss for unequally busy experts, per sequence",
        default=0.0,
        minimum=0,
        bound=FACTOR,
        read_by="backend.model.router",
    )
    router_z_loss: float = option(
        "factor of (log Z)^2 of every router's logits",
        default=0.0,
        minimum=0,
        bound=FACTOR,
        read_by="backend.model.router",
    )
    router_jitter: float = option(
        "a router's inputs are scaled by up to 1 - and 1 + this",
        default=0.0,
        minimum=0,
        below=1,
        bound=FACTOR,
        more="By how much is drawn at random.",
        read_by="backend.model.router",
    )
    expert_bias_rate: float = option(
        "what a step adds to or takes from an expert's bias",
        default=0.001,
        minimum=0,
        bound=FACTOR,
        more="It adds where an expert had less than its even share of the tokens, and takes where it had more.",
        read_by="backend.ranks.training_rank",
    )
    eval_every: int | None = option(
        "steps between two held-out losses",
        default=None,
        minimum=1,
        default_note="four of them, evenly spread",
        more="There is one before the first step and one after the last, too.",
        read_by="backend.trainer",
    )
    sample_every: int | None = option(
        "steps between two texts from the model",
        default=None,
        minimum=1,
        default_note="none",
        more="The model goes on with the first held-out tokens, after the last step too. Each token takes "
        "the forwards of a held-out batch.",
        read_by="backend.monitoring.sampling",
    )
    sample_tokens: int = option(
        "tokens of such a text, as far as batch.sequence has room for them",
        default=64,
        minimum=1,
        bound=TOKENS,
        read_by="backend.monitoring.sampling",
    )
    sample_temperature: float = option(
        "what its logits are divided by before it is drawn; 0 takes the most likely token",
        default=0.0,
        minimum=0,
        bound=FACTOR,
        more="What is drawn is a function of train.seed, the step and the place in the text.",
        read_by="backend.monitoring.sampling",
    )
    timeout_s: float = option(
        "without any rank ending an action, after which all are ended",
        default=1800.0,
        above=0,
        bound=Bound(1e8, "three years; what waits for threads counts in 64-bit nanoseconds", least=1e-3),
        more="What each was waiting for is reported.",
        read_by="backend.trainer",
    )
    setup_timeout_s: float = option(
        "from the start of ranks to the first step, after which all are ended",
        default=1800.0,
        above=0,
        bound=Bound(1e8, "three years; what waits for threads counts in 64-bit nanoseconds", least=1e-3),
        more="A checkpoint or weights that are loaded are part of it.",
        read_by="backend.trainer",
    )

    @property
    def adds_router_losses(self) -> bool:
        """True when routers add to the loss that is minimised."""
        return self.router_aux_loss > 0 or self.router_z_loss > 0


@noun()
class Checkpoint(Bounded, section="checkpoint"):
    """Where training saves all that it goes on from (`backend.checkpoint`), and how often; None is nowhere."""

    folder: str | None = option(
        "where training saves what it can go on from",
        default=None,
        kind="path",
        default_note="nowhere",
        read_by="backend.checkpoint.resume",
    )
    every: int | None = option(
        "steps between two checkpoints",
        default=None,
        minimum=1,
        default_note="one after the last step",
        more="There is one after the last step too.",
        read_by="backend.checkpoint.saver",
    )
    keep: int | None = option(
        "how many of the newest stay",
        default=None,
        minimum=1,
        default_note="all",
        read_by="backend.checkpoint.storage_choice",
    )
    copies: int | None = option(
        "folder is on each host's own disk, and so many other hosts have a copy of its files",
        default=None,
        minimum=1,
        bound=DEVICES,
        default_note="all hosts see folder",
        more="As many hosts may be lost with their disks.",
        read_by="backend.checkpoint.storage_choice",
    )
    asynchronous: bool = option(
        "whether training goes on while a checkpoint is written",
        default=True,
        more="Every rank then holds a copy of its part in host memory.",
        read_by="backend.checkpoint.saver",
    )
    timeout_s: float = option(
        "until every rank has written its part of a checkpoint, after which the run is ended",
        default=1800.0,
        above=0,
        bound=Bound(1e8, "three years; what waits for threads counts in 64-bit nanoseconds", least=1e-3),
        more="The rank that has not is named.",
        read_by="backend.checkpoint.saver",
    )
    stop_budget_s: float = option(
        "after SIGTERM or SIGUSR1, until the step is done and saved",
        default=25.0,
        above=0,
        bound=Bound(1e8, "three years; what waits for threads counts in 64-bit nanoseconds", least=1e-3),
        more="The run is ended then, saved or not: torchrun, Slurm and Kubernetes kill 30 s after SIGTERM.",
        read_by="backend.trainer",
    )
