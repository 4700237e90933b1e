"""The sections of a plan that say what is computed, in which numbers, and how ranks share it, besides its model,
cluster and layout."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Literal

from ..base.bounds import DEVICES, LAYERS, SEQUENCES, TOKENS
from ..base.option import Bounded, noun, option
from ..layout.products import PRODUCT_FORMS, in_order
from ..schedule import CATALOG


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
