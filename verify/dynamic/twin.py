"""The twin of a plan: what `verify --dynamic` runs when the plan itself is too large for one host or asks
for what the backend lacks.

A twin keeps what the proof is about (every axis above 1 stays above 1, virtual stages, schedule, whether cuts are even)
and shrinks what only costs time (width, depth, vocabulary, sequence, batch). Each change is said.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...backend.data.token_files import token_file_of
from ...backend.trainer import usual_transport
from ...backend.unsupported import unsupported_graphs
from ...core.base.divisors import divisors
from ...core.base.errors import PlanError
from ...core.base.urls import is_url
from ...core.layout.layout import Layout
from ...core.layout.routed_tokens import RoutedTokens
from ...core.layout.stages import StageLayers, to_string
from ...core.machine.cluster_presets import cluster_preset
from ...core.machine.variation import NO_VARIATION
from ...core.model.model import ModelSpec
from ...core.model.parameters import count_parameters
from ...core.plan.data_names import STDLIB, named_data
from ...core.plan.plan import AnyPlan, ModularPlan, Plan
from ...core.plan.sections import Batch, Numerics
from ...core.plan.train import Train
from ...core.schedule import CATALOG
from ...core.schedule.passes import MAX_ACTIVE_STAGES
from ..run.proof_run import TransportName

MAX_WORLD_SIZE = 8
"""Ranks of a twin: start-up and collectives of processes grow steeply beyond it on a few cores."""

MAX_THREADS = 64
"""Ranks that run as they are where they are threads of one process: 64 take some 15 s on two cores."""

MAX_PARAMETERS = 20_000_000
"""Above this many parameters the model is shrunk."""

MAX_STEP_FLOPS = 2e11
"""Above this much work in a step (6 per parameter and token) model and batch are shrunk: about a minute
per step on two cores."""

NUM_BYTES = 256
"""The smallest vocabulary: training data are bytes."""

SHRUNK_MODEL_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "padding_rows",
    "max_positions",
    "num_experts",
    "experts_per_token",
    "expert_ffn_hidden_size",
    "num_shared_experts",
    "shared_expert_ffn_hidden_size",
    "first_dense_layers",
    "expert_layer_step",
    "num_router_groups",
    "router_groups_per_token",
    "num_mtp_layers",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)

DEGREES = ("tp", "cp", "cp_inner", "pp", "dp", "ep", "etp", "stages")
"""What of a layout may shrink."""

HEAD_DIM = 8
SEQUENCE = 32
TOKEN_BLOCK = 8
"""A quarter of the twin's sequence, so that its token trees have more than one leaf."""


def proof_transport(plan: AnyPlan) -> TransportName:
    """What training takes, or threads where only these run all ranks of a plan as they are."""
    is_of_threads = isinstance(plan, Plan) and MAX_WORLD_SIZE < plan.layout.world_size <= MAX_THREADS
    return "memory" if is_of_threads else usual_transport(plan)


def twin(plan: Plan, most_ranks: int = MAX_WORLD_SIZE, *, captures: bool = False) -> tuple[Plan, list[str]]:
    """A plan that this host can run and that proves the same thing, and one sentence per change; the plan
    itself and [] if it can run.

    Layouts of more than `most_ranks` ranks shrink to `MAX_WORLD_SIZE`; others stay, whatever becomes of the model.
    Steps are captured as graphs where ranks can do that (`captures`).
    """
    supported, changes = _supported(plan, captures=captures)
    if not _too_large(supported, most_ranks):
        return supported, changes
    small = _shrink(supported, most_ranks)
    return small, changes + _sentences(supported, small)


def _too_large(plan: Plan, most_ranks: int) -> bool:
    work = 6.0 * count_parameters(plan.model) * plan.batch.global_size * plan.batch.sequence
    return plan.layout.world_size > most_ranks or count_parameters(plan.model) > MAX_PARAMETERS or work > MAX_STEP_FLOPS


def _supported(plan: Plan, *, captures: bool) -> tuple[Plan, list[str]]:
    """The plan with everything the backend does not run replaced by what it runs, and why."""
    changes: list[str] = []
    cluster = plan.cluster
    layout = _supported_layout(plan)
    if plan.numerics.mode != "exact":
        only = (
            (", and bounds for fast ones do not hold where numbers leave the range of fp16")
            if plan.precision.dtype == "fp16"
            else ""
        )
        changes.append(f"numerics.mode fast -> exact: only exact numerics promise bits{only}.")
    dtype = "bf16" if plan.precision.dtype == "fp8" else plan.precision.dtype
    if plan.precision.dtype != dtype:
        changes.append(
            f"precision.dtype {plan.precision.dtype} -> {dtype}: the backend computes in fp32, bf16 and fp16."
        )
    if plan.precision.gradient_dtype == "bf16" and plan.numerics.mode == "fast":
        changes.append(
            "precision.gradient_dtype bf16 -> none in the run in fast numerics: bounds are those of sums in fp32."
        )
    schedule = plan.schedule
    if layout.zero == 3 and schedule.max_active_stages is None and schedule.file is None:
        schedule = replace(schedule, max_active_stages=MAX_ACTIVE_STAGES)
        changes.append(
            f"schedule.max_active_stages none -> {MAX_ACTIVE_STAGES}: the backend gathers whole stages, "
            "not layer by layer."
        )
    bucket_bytes = plan.data_parallel.bucket_bytes if layout.cp == 1 else None
    early = plan.data_parallel.overlap_grad_reduce if bucket_bytes is not None else None
    data_parallel = replace(plan.data_parallel, bucket_bytes=bucket_bytes, overlap_grad_reduce=early)
    if (shard := data_parallel.shard) is not None and shard % layout.cp:
        data_parallel = replace(data_parallel, shard=layout.cp)
        changes.append(
            f"data_parallel.shard {shard} -> {layout.cp}: exact numerics keep the cp={layout.cp} parts of "
            "a sequence together."
        )
    if plan.data_parallel != replace(data_parallel, shard=plan.data_parallel.shard):
        changes.append(
            "[data_parallel] -> no buckets with cp, and no overlap without buckets: that is what the backend runs."
        )
    if data_parallel.library != "shardproof":
        data_parallel = replace(data_parallel, library="shardproof")
        changes.append(
            "data_parallel.library torch -> shardproof in exact numerics: fully_shard adds in its collectives' order."
        )
    runtime = plan.runtime
    graphs = None if not captures or any(wrong for wrong, _, _ in unsupported_graphs(plan)) else runtime.cuda_graphs
    if runtime.cuda_graphs and not graphs:
        changes.append(
            "runtime.cuda_graphs true -> none: ranks that compute on the processor, or whose layers ask the host, "
            "launch every kernel themselves."
        )
    if runtime.compile:
        changes.append("runtime.compile true -> none in exact numerics: a compiled kernel has bits of its own.")
    if runtime.launch_blocking or runtime.fused_loss or runtime.dropout:
        changes.append("[runtime] launch_blocking, fused_loss and dropout -> none: they are modelled, not run.")
    if dtype not in cluster.peak_flops_per_s:
        changes.append(f"cluster {cluster.name} -> this-host: it has no rate for {dtype}.")
        cluster = cluster_preset("this-host", layout.world_size)
    return (
        replace(
            plan,
            cluster=cluster,
            layout=layout,
            runtime=replace(
                plan.runtime,
                cuda_graphs=graphs,
                cuda_graph_scope=plan.runtime.cuda_graph_scope if graphs else "step",
                compile=None,
                launch_blocking=None,
                fused_loss=None,
                dropout=None,
            ),
            data_parallel=data_parallel,
            schedule=schedule,
            precision=replace(plan.precision, dtype=dtype),
            numerics=_exact(plan, layout, changes),
            variation=NO_VARIATION,
        ),
        changes,
    )


def _exact(plan: Plan, layout: Layout, changes: list[str]) -> Numerics:
    """Exact numerics, with blocks of tokens that context and sequence parallelism and experts can cut."""
    cp, tp, block = plan.layout.cp, plan.layout.tp, plan.leaf_sizes.reduction_token_block
    sequence, numerics = plan.batch.sequence // cp, replace(plan.numerics, mode="exact")
    if cp > 1:
        gradient, reduction = (
            _dividing(plan, name, sequence // 2, changes) for name in ("gradient_token_block", "reduction_token_block")
        )
        numerics = replace(numerics, gradient_token_block=gradient, reduction_token_block=reduction)
    block = numerics.reduction_token_block or block
    if (plan.layout.sequence_parallel or _tokens_part(plan)) and plan.leaf_sizes.tokens(sequence).num_leaves < tp:
        finer = max(1, sequence // tp)
        finer = finer if cp == 1 else max(size for size in divisors(sequence // 2) if size <= finer)
        changes.append(
            f"numerics.reduction_token_block {block} -> {finer}: {tp} ranks cut sums over tokens between blocks."
        )
        numerics = replace(numerics, reduction_token_block=finer)
    if _splits_blocks(plan, layout, numerics):
        finer, block = numerics.reduction_token_block or block, plan.leaf_sizes.gradient_token_block
        if block != finer:
            changes.append(
                f"numerics.gradient_token_block {block} -> {finer}: tensor-parallel ranks use different "
                "copies of the experts."
            )
        numerics = replace(numerics, gradient_token_block=finer, reduction_token_block=finer)
    return numerics


def _dividing(plan: Plan, name: str, chunk: int, changes: list[str]) -> int | None:
    """A size of blocks of tokens that divides the chunks of context parallelism: the plan's
    own, or one that is finer."""
    current: int = getattr(plan.leaf_sizes, name)
    finer = max(size for size in divisors(chunk) if size <= current)
    if finer == current:
        given: int | None = getattr(plan.numerics, name)
        return given
    changes.append(
        f"numerics.{name} {current} -> {finer}: context parallelism cuts sequences into chunks of {chunk} tokens."
    )
    return finer


def _tokens_part(plan: Plan) -> bool:
    """True when tensor-parallel ranks send tokens of one sequence to different copies of the experts."""
    return plan.model.is_moe and plan.layout.expert_tp * plan.layout.ep % plan.layout.tp != 0


def _splits_blocks(plan: Plan, layout: Layout, numerics: Numerics) -> bool:
    """True when copies of the experts would see parts of a block of tokens that is a leaf of their gradients."""
    sizes = plan.leaf_sizes
    block = numerics.reduction_token_block or sizes.reduction_token_block
    tokens = RoutedTokens(plan.batch.sequence, layout.tp, layout.cp, True, sizes.gradient_token_block, block)
    return plan.model.is_moe and tokens.split_piece(layout) is not None


def _supported_layout(plan: Plan) -> Layout:
    """The axes that the backend runs."""
    layout = plan.layout
    stages = None if layout.stages is None else re.sub(r"m(\*\d+)?", "", layout.stages)
    return replace(layout, stages=stages)


def _shrink(plan: Plan, most_ranks: int) -> Plan:
    layout = _same_degrees(plan) if MAX_WORLD_SIZE < plan.layout.world_size <= most_ranks else _small_layout(plan)
    model = _small_model(plan, layout)
    parts = model.is_moe and layout.expert_tp * layout.ep % layout.tp != 0
    micro = min(plan.batch.micro_size, 2)
    num_microbatches = _small_microbatches(plan, layout)
    sequence = SEQUENCE if plan.batch.sequence % 2 == 0 else SEQUENCE - 1
    if layout.cp > 1:  # two blocks of tokens in a chunk
        parts, sequence = True, 2 * layout.cp * TOKEN_BLOCK
    return replace(
        plan,
        model=replace(model, max_positions=sequence),
        cluster=cluster_preset("this-host", layout.world_size),
        layout=layout,
        batch=Batch(global_size=micro * num_microbatches * layout.dp, micro_size=micro, sequence=sequence),
        # rates stay as they are, whatever the batches that they count
        optimizer=plan.rates.fixed,
        data_parallel=replace(plan.data_parallel, shard=_small_shard(plan, layout)),
        numerics=Numerics(
            "exact", gradient_token_block=TOKEN_BLOCK // (2 if parts else 1), reduction_token_block=TOKEN_BLOCK // 2
        ),
        recompute=replace(plan.recompute, layers=_small_layers(plan.recompute.layers, model)),
        offload=replace(plan.offload, activations=min(plan.offload.activations, model.num_layers)),
        train=_small_train(plan.train),
    )


def _small_train(train: Train) -> Train:
    """Without weights to load, without token files, whose ids are of a vocabulary that a twin has not, and without data
    that are not on this machine, as those of other people's configurations may be."""
    sources = [*named_data(train.data), *named_data(train.validation_data or "")]
    names = [source.name for source in sources if source.name and source.name != STDLIB]
    if any(is_url(name) or token_file_of(name) or not Path(name).exists() for name in names):
        train = replace(train, data=Train().data, validation_data=None, split=None)
    return replace(train, load=None)


def _small_shard(plan: Plan, layout: Layout) -> int | None:
    """The size of groups that shard together: the largest that is no larger than the plan's, and of which there are
    several where the plan has several."""
    if (shard := plan.data_parallel.shard) is None:
        return None
    several = shard < plan.layout.dp * plan.layout.cp
    sizes = [size for size in divisors(layout.dp) if size * layout.cp <= shard and not (several and size == layout.dp)]
    return max(sizes, default=1) * layout.cp


def _small_layers(layers: tuple[int, ...] | None, model: ModelSpec) -> tuple[int, ...] | None:
    """Those of the layers that are recomputed whole which the twin has; one at least, where there was any."""
    if not layers:
        return layers
    return tuple(layer for layer in layers if layer < model.num_layers) or (model.num_layers - 1,)


def _same_degrees(plan: Plan) -> Layout:
    """The layout with the layers of a small model; a smaller one where a twin's sequence has no tokens for every
    tensor-parallel rank."""
    layout = plan.layout
    if layout.tp > SEQUENCE // TOKEN_BLOCK * 2:
        return _small_layout(plan)
    return layout if layout.stages is None else replace(layout, stages=_small_stages(plan, layout.num_stages))


def _small_layout(plan: Plan) -> Layout:
    """Degrees with a product of at most 8: above 1 where they were, powers of two where they were, as
    large as fits, pp first."""
    layout = plan.layout
    shortest = layout.pp if plan.schedule.file is not None and layout.world_size > MAX_WORLD_SIZE else min(2, layout.pp)
    pipelines = [pp for pp in range(shortest, layout.pp + 1) if pp == layout.pp or _can_be_built(plan, pp)]
    wanted = (layout.pp, layout.tp, layout.cp, layout.dp)
    choices: list[Sequence[int]] = [
        pipelines,
        *(range(min(2, degree), min(degree, MAX_WORLD_SIZE) + 1) for degree in wanted[1:]),
    ]
    if levels := _keeps_levels(layout):
        choices[2] = [degree for degree in choices[2] if len(divisors(degree)) > 2]
    size = max(MAX_WORLD_SIZE, math.prod(min(2, degree) for degree in wanted))
    legal = [degrees for degrees in itertools.product(*choices) if math.prod(degrees) <= size]
    if not legal:
        raise PlanError(
            f"schedule.file={plan.schedule.file!r} fixes pp={layout.pp}, which leaves no layout of at most "
            f"{MAX_WORLD_SIZE} ranks with "
            f"tp and dp above 1 as in the plan. Verify it with a smaller tp or dp, or statically (without --dynamic)."
        )

    def merit(degrees: tuple[int, ...]) -> tuple:
        same_parity = sum(
            _is_power_of_two(small) == _is_power_of_two(large) for small, large in zip(degrees, wanted, strict=True)
        )
        return same_parity, math.prod(degrees), degrees

    pp, tp, cp, dp = max(legal, key=merit)
    copies = tp * cp * dp
    etp = None if layout.expert_tp == layout.tp else min(layout.expert_tp, 2 if copies % 2 == 0 else 1)
    ep = max(degree for degree in divisors(copies // (tp if etp is None else etp)) if degree <= layout.ep)
    cp_inner = 1 if layout.cp_inner == 1 else divisors(cp)[1] if levels else cp
    small = replace(layout, pp=pp, tp=tp, cp=cp, cp_inner=cp_inner, dp=dp, ep=ep, etp=etp, stages=None)
    return small if layout.stages is None else replace(small, stages=_small_stages(plan, small.num_stages))


def _keeps_levels(layout: Layout) -> bool:
    """Whether both levels of context parallelism fit a twin, the smallest of which has four ranks for them."""
    others = math.prod(min(2, degree) for degree in (layout.pp, layout.tp, layout.dp))
    return 1 < layout.cp_inner < layout.cp and 4 * others <= MAX_WORLD_SIZE


def _small_stages(plan: Plan, num_stages: int) -> str:
    """A layout string of `num_stages` whose stages are sampled from the plan's: empty stays empty, short stays
    short, long is one more."""
    counts = [len(stage.layers) for stage in plan.stages]
    shortest = min(count for count in counts if count) if any(counts) else 0
    picked = [counts[round(i * (len(counts) - 1) / max(1, num_stages - 1))] for i in range(num_stages)]
    first, stages = 0, []
    for stage, count in enumerate(picked):
        last = first + (0 if count == 0 else 1 if count == shortest else 2)
        stages.append(StageLayers(stage, first, last, embedding=stage == 0, head=stage == num_stages - 1))
        first = last
    return to_string(tuple(stages))


def _small_model(plan: Plan, layout: Layout) -> ModelSpec:
    """The same family with one or two layers per stage, a few narrow heads, and ffn and vocabulary cuts that are
    even where they were."""
    model, tp, small_tp = plan.model, plan.layout.tp, layout.tp
    if layout.stages is not None:
        num_layers = sum(part.count("t") for part in layout.stages.split("|"))
    else:
        num_layers = layout.num_stages * min(
            2 if layout.num_stages <= 2 else 1, -(-model.num_layers // plan.layout.num_stages)
        )
    groups = small_tp * max(2 if model.num_kv_heads > tp else 1, layout.cp_inner)
    per_group = min(model.query_heads_per_group, 2)
    heads = groups * per_group
    square = model.hidden_size == model.num_heads * model.head_dim
    hidden = heads * HEAD_DIM if square else heads * HEAD_DIM + 8
    padding_rows = min(model.padding_rows, 1)
    return replace(
        model,
        name=f"{model.name}-twin",
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=_like(model.ffn_hidden_size, tp, small_tp, at_least=2 * hidden),
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=HEAD_DIM,
        vocab_size=_like(model.vocab_size, tp, small_tp, at_least=_num_ids(plan) + padding_rows),
        padding_rows=padding_rows,
        num_mtp_layers=min(model.num_mtp_layers, 2),
        **(_small_experts(model, num_layers, layout) if model.is_moe else {}),
        **(_small_latent(model) if model.is_mla else {}),
    )


def _num_ids(plan: Plan) -> int:
    """The smallest vocabulary of a twin: all bytes, and what sequences are filled up with."""
    return max(
        NUM_BYTES, plan.train.ignore_token + 1 if plan.train.padded and plan.train.ignore_token is not None else 0
    )


def _small_latent(model: ModelSpec) -> dict[str, Any]:
    """Low ranks that are neither the hidden size nor a head's, and values as wide as a query or
    narrower, as they were."""
    turned = HEAD_DIM // 2
    return {
        "q_lora_rank": min(model.q_lora_rank, HEAD_DIM + 4),
        "kv_lora_rank": min(model.kv_lora_rank, HEAD_DIM + 2),
        "qk_nope_head_dim": HEAD_DIM - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": HEAD_DIM if model.v_head_dim >= model.head_dim else HEAD_DIM - 2,
    }


def _small_experts(model: ModelSpec, num_layers: int, layout: Layout) -> dict[str, Any]:
    """A few narrow experts, in two groups where there were groups; dense layers, grouped choice
    and shared experts stay."""
    grouped, width = model.num_router_groups > 0, HEAD_DIM * math.lcm(layout.tp, layout.expert_tp)
    return {
        "num_experts": layout.ep * (4 if layout.ep <= 2 else 2),
        "experts_per_token": min(model.experts_per_token, 2),
        "expert_ffn_hidden_size": width,
        "shared_expert_ffn_hidden_size": None if model.shared_expert_ffn_hidden_size is None else 2 * width,
        "num_shared_experts": min(model.num_shared_experts, 1),
        "first_dense_layers": min(model.first_dense_layers, 1, num_layers - 1),
        "expert_layer_step": min(model.expert_layer_step, 2),
        "num_router_groups": 2 if grouped else 0,
        "router_groups_per_token": 1 if grouped else 0,
    }


def _like(size: int, degree: int, small_degree: int, *, at_least: int) -> int:
    """The smallest size >= `at_least` that `small_degree` divides exactly if `degree` divides `size`, and
    holds that many parts."""
    even = size % degree == 0
    candidate = max(at_least, small_degree)
    while small_degree > 1 and (candidate % small_degree == 0) != even:
        candidate += 1
    return candidate


def _can_be_built(plan: Plan, pp: int) -> bool:
    """Whether the plan's schedule exists for `pp` ranks and a few rounds of microbatches."""
    condition = CATALOG[plan.schedule.name].condition
    return plan.schedule.file is not None or any(condition(pp, number) is None for number in range(1, 4 * pp + 1))


def _small_microbatches(plan: Plan, layout: Layout) -> int:
    """A few microbatches, or the next larger number for which the schedule exists."""
    wanted, condition = _few_microbatches(plan, layout), CATALOG[plan.schedule.name].condition
    if plan.schedule.file is not None:
        return plan.num_microbatches
    return next(number for number in range(wanted, wanted + 4 * layout.pp) if condition(layout.pp, number) is None)


def _few_microbatches(plan: Plan, layout: Layout) -> int:
    """Fewer microbatches than ranks if it was so, else twice the ranks; one more where they were no
    multiple of the ranks."""
    num_microbatches, pp = plan.num_microbatches, plan.layout.pp
    if num_microbatches < pp:
        return max(1, min(num_microbatches, layout.pp - 1))
    if layout.pp == 1:
        return min(num_microbatches, 3)
    if num_microbatches % pp:
        return 2 * layout.pp + 1
    return (2 if num_microbatches >= 2 * pp else 1) * layout.pp


def _sentences(before: Plan, after: Plan) -> list[str]:
    """What shrank, with both numbers."""
    pairs = [
        (
            "cluster",
            f"{before.cluster.num_devices} devices of {before.cluster.name}",
            (f"{after.cluster.num_devices} ranks of this-host"),
        ),
        *((f"layout.{name}", getattr(before.layout, name), getattr(after.layout, name)) for name in DEGREES),
        *((f"model.{name}", getattr(before.model, name), getattr(after.model, name)) for name in SHRUNK_MODEL_FIELDS),
        ("batch.global", before.batch.global_size, after.batch.global_size),
        ("batch.rampup", before.batch.rampup, after.batch.rampup),
        ("batch.schedule", before.batch.schedule, after.batch.schedule),
        ("batch.micro", before.batch.micro_size, after.batch.micro_size),
        ("batch.sequence", before.batch.sequence, after.batch.sequence),
        ("microbatches per rank", before.num_microbatches, after.num_microbatches),
        ("leaf sizes", _blocks(before), _blocks(after)),
        ("recompute.layers", before.recompute.layers, after.recompute.layers),
        ("offload.activations", before.offload.activations, after.offload.activations),
        ("train.data", before.train.data, after.train.data),
        ("train.load", before.train.load, after.train.load),
    ]
    return [f"{name} {old} -> {new}: to fit this host." for name, old, new in pairs if old != new]


def _blocks(plan: Plan) -> str:
    sizes = plan.leaf_sizes
    return (
        f"{sizes.gradient_token_block}/{sizes.reduction_token_block} tokens, {sizes.ffn.block} ffn, "
        f"{sizes.vocab.block} vocabulary"
    )


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def provable(plan: ModularPlan, unsupported: list[str]) -> tuple[ModularPlan, list[str]]:
    """What of a plan of modules is run, and how it differs from the plan. Raises `PlanError` for one that the backend,
    for the reasons given, or this host does not run: modules are not shrunk."""
    problems = list(unsupported)
    for what, size, most in (
        ("ranks", plan.world_size, 2 * MAX_WORLD_SIZE),
        ("parameters", plan.num_parameters, MAX_PARAMETERS),
    ):
        if size > most:
            problems.append(
                f"the modules have {size} {what}, and the dynamic proof runs at most {most}. Prove smaller modules "
                "of the same cuts."
            )
    if problems:
        raise PlanError(problems)
    changes = []
    if plan.numerics.mode == "fast":
        changes.append("numerics.mode fast -> exact: bits of fast numerics depend on the layout.")
        plan = replace(plan, numerics=replace(plan.numerics, mode="exact"))
    return plan, changes
