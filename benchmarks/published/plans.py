"""Published rows -> plans: the model, the machine and the layout as published, and what the source's
software does by default."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...core.base.errors import ShardproofError
from ...core.layout.layout import DEFAULT_ORDER, Layout
from ...core.layout.stages import StageLayers, to_string
from ...core.machine.cluster import ClusterSpec
from ...core.machine.cluster_presets import CLUSTER_PRESETS, cluster_preset
from ...core.model.model import ModelSpec
from ...core.plan.optimizer import Optimizer
from ...core.plan.plan import Plan
from ...core.plan.runtime import Recompute, Runtime
from ...core.plan.sections import Batch, DataParallel, Numerics, Precision, ScheduleChoice
from .machines import MACHINES, NETWORKS, POST_VALIDATED, POWER_EXPONENT, SCHEDULES, ZERO
from .recipes import recipe_of
from .row import Row, RowError
from .stacks import MLA, Stack, conventions, stack_of


@dataclass(frozen=True)
class PublishedPlan:
    """A row as a plan, and which fields were filled with a default of its source's software."""

    plan: Plan
    assumed: tuple[str, ...]


def plan_of(row: Row, instead: Mapping[str, Any] | None = None) -> PublishedPlan:
    """The plan that a published row ran, with `instead` in place of its software's defaults for fields that were not
    published. Raises `RowError` with what is missing or not modelled."""
    stack = stack_of(row)
    if stack is None:
        raise RowError(f"the software of {row.source!r} is not described")
    row_facts = _RowFacts(row, replace(stack, defaults={**stack.defaults, **instead}) if instead else stack)
    try:
        plan = _plan(row_facts)
    except RowError:
        raise
    except ShardproofError as error:
        raise RowError(f"no plan: {error}") from error
    return PublishedPlan(plan, tuple(row_facts.assumed))


class _RowFacts:
    """A row's fields, null ones filled from its stack's defaults; remembers which were."""

    def __init__(self, row: Row, stack: Stack):
        self.row, self.stack = row, stack
        self.assumed: list[str] = []

    def get(self, dotted: str, default: Any = None) -> Any:
        value = self.row[dotted]
        if dotted in self.stack.corrections:
            value = self.stack.corrections[dotted]
            self.assumed.append(f"{dotted}={value}")
        elif value is None and dotted in self.stack.defaults:
            value = self.stack.defaults[dotted]
            self.assumed.append(f"{dotted}={value}")
        return default if value is None else value

    def need(self, dotted: str) -> Any:
        if (value := self.get(dotted)) is None:
            raise RowError(f"{dotted} is not published")
        return value

    def text(self, dotted: str) -> str:
        return str(self.get(dotted, ""))

    def flag(self, name: str) -> bool | None:
        """A switch of the row's `flags`; None when it is not published."""
        value = self.row[f"flags.{name}"]
        return None if value is None else bool(value)


def _plan(row_facts: _RowFacts) -> Plan:
    _refuse_unmodelled(row_facts)
    layout = _layout(row_facts)
    model = _model(row_facts, layout)
    layout = _cut(row_facts, model, layout)
    said = row_facts.text("schedule").split(",")
    schedule = SCHEDULES.get(said[0] or "none")
    if schedule is None:
        raise RowError(f"schedule {said[0]!r} is not in the catalog")
    synchronises = not (said[0] in POST_VALIDATED and len(said) == 1)
    return Plan(
        model=model,
        cluster=_cluster(row_facts),
        layout=layout,
        batch=_batch(row_facts, layout),
        runtime=_runtime(row_facts),
        precision=_precision(row_facts),
        recompute=_recompute(row_facts, model, layout),
        schedule=ScheduleChoice("1F1B" if schedule == "Interleaved1F1B" and layout.vpp == 1 else schedule),
        numerics=_numerics(model, layout),
        optimizer=Optimizer(clip_grad_norm=Optimizer().clip_grad_norm if synchronises else 0.0),
        data_parallel=_data_parallel(row_facts, layout),
    )


def _refuse_unmodelled(row_facts: _RowFacts) -> None:
    """Raises `RowError` for what no plan can say."""
    name = row_facts.text("model.name").lower()
    if "mamba" in name or "nemotron_3" in name:
        raise RowError("state-space layers are not modelled")
    if row_facts.flag("parallel_block") or row_facts.flag("sliding_window_attention"):
        raise RowError("parallel blocks are not modelled, and how long the sliding window is was not published")
    if row_facts.row.family == "megascale_ablation" and row_facts.text("notes").startswith("+"):
        raise RowError("parallel blocks are not modelled; every row of the ablation adds to those before")
    if row_facts.text("flags.vocab_method") in ("Vocab-1", "Vocab-2", "Interlaced"):
        raise RowError("a vocabulary cut over pipeline ranks is not modelled")
    if row_facts.row["kind"] == "finetune_step" and "SFT" not in row_facts.text("source_ref"):
        raise RowError("fine-tuning steps with frozen parts are not modelled")


def _model(row_facts: _RowFacts, layout: Layout) -> ModelSpec:
    name, hidden, heads, vocab = (row_facts.need(f"model.{field}") for field in ("name", "hidden", "heads", "vocab"))
    if row_facts.stack.pads_vocabulary:
        vocab = -(-vocab // (128 * layout.tp)) * 128 * layout.tp
    if row_facts.stack.cuts_vocabulary:
        vocab = vocab // layout.tp * layout.tp
    if row_facts.row.source.startswith("Vocabulary Parallelism"):
        # the rows infer 2^15 from "32K"; sail-sg/VocabularyParallelism, artifact/exp_one_host.csv: 32,000
        vocab = vocab // 1024 * 1000
    fields: dict[str, Any] = {**conventions(str(name)), **row_facts.stack.model, **_experts(row_facts)}
    if row_facts.row.source.startswith("nanotron"):
        # scripts/scaling_benchmarks.py: models below 4B tie
        fields["tied_embeddings"] = row_facts.need("model.ffn") < 10_000
    latent = "kv_lora_rank" in fields
    return ModelSpec(
        name=str(name),
        num_layers=row_facts.get("model.layers") or _layers_from_size(row_facts, layout),
        hidden_size=hidden,
        ffn_hidden_size=row_facts.need("model.ffn"),
        num_heads=heads,
        num_kv_heads=heads if latent else row_facts.get("model.kv_heads") or heads,
        head_dim=192 if latent else row_facts.get("model.head_dim") or hidden // heads,
        vocab_size=vocab,
        max_positions=row_facts.need("model.seq"),
        **fields,
    )


def _experts(row_facts: _RowFacts) -> dict[str, Any]:
    """Fields of mixtures of experts and latent attention."""
    moe = row_facts.get("model.moe")
    if not moe:
        return {}
    width = moe.get("moe_ffn") or row_facts.need("model.ffn")
    fields = {
        "num_experts": moe["experts"],
        "experts_per_token": moe["topk"],
        "num_shared_experts": moe.get("shared") or (moe.get("shared_ffn") or 0) // width,
        "expert_ffn_hidden_size": width,
        "first_dense_layers": moe.get("dense_layers") or 0,
    }
    return {**fields, **(MLA if "MLA" in str(moe.get("attention")) else {})}


def _layers_from_size(row_facts: _RowFacts, layout: Layout) -> int:
    """Layers of a GPT from its published size, as a multiple of the pipeline stages: 12 h^2 weights
    each, and the token table."""
    size, hidden, vocab = (
        row_facts.need("model.params_b"),
        row_facts.need("model.hidden"),
        row_facts.need("model.vocab"),
    )
    layers = max(1, round((size * 1e9 - vocab * hidden) / (12 * hidden**2) / layout.pp)) * layout.pp
    row_facts.assumed.append(f"model.layers={layers}")
    return layers


def _batch(row_facts: _RowFacts, layout: Layout) -> Batch:
    """The batch; microbatches as large as their number leaves them where their size is not published."""
    sequences, micro = row_facts.need("batch.global"), row_facts.get("batch.micro")
    if micro is None and (count := row_facts.get("batch.num_microbatches")):
        micro = sequences // (layout.dp * count)
    return Batch(sequences, micro or row_facts.need("batch.micro"), row_facts.need("model.seq"))


def _layout(row_facts: _RowFacts) -> Layout:
    sharding, notes = row_facts.text("parallel.sharding"), row_facts.text("notes")
    pp, tp, cp = row_facts.need("parallel.pp"), row_facts.need("parallel.tp"), row_facts.get("parallel.cp", 1)
    dp = row_facts.get("parallel.dp") or row_facts.need("hardware.count") // (tp * pp * cp)
    interleaved = pp > 1 and (
        "nterleaved" in row_facts.text("schedule")
        or "V-" in row_facts.text("schedule")
        or row_facts.row["parallel.vpp"]
    )
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=row_facts.get("parallel.ep") or 1,
        etp=_expert_tp(row_facts, tp, cp, dp),
        vpp=_chunks(row_facts, pp) if interleaved else 1,
        sequence_parallel=bool(row_facts.get("parallel.sp")) and tp > 1,
        zero=next((stage for words, stage in ZERO if words in sharding), 0),
        order=row_facts.get("order")
        or ("tp-cp-ep-pp-dp" if "TP-PP-DP" in notes or "DP placed last" in notes else DEFAULT_ORDER),
    )


def _expert_tp(row_facts: _RowFacts, tp: int, cp: int, dp: int) -> int | None:
    """The experts' tensor parallelism; whole experts where cut ones would not lie on the ranks of a stage."""
    etp: int | None = row_facts.get("parallel.etp")
    if etp is None and tp * cp * dp % (tp * (row_facts.get("parallel.ep") or 1)):
        row_facts.assumed.append("parallel.etp=1")
        return 1
    return etp


def _chunks(row_facts: _RowFacts, pp: int) -> int:
    """Stages per pipeline rank, from the table, from the schedule's shape or from the layers that a chunk holds."""
    if row_facts.text("schedule").startswith("V-"):
        return 2
    if (chunks := row_facts.get("parallel.vpp")) is not None:
        return int(chunks)
    if row_facts.row["model.layers"] and (each := row_facts.get("layers_per_chunk")):
        return int(row_facts.row["model.layers"] // (pp * each))
    return int(row_facts.need("parallel.vpp"))


def _cut(row_facts: _RowFacts, model: ModelSpec, layout: Layout) -> Layout:
    """The layout with an uneven cut where stages do not divide the layers, or the source says that they were balanced.

    Embedding and head count as a layer each when that makes it even (MLPerf's ASYM_PP flags; Zero Bubble; Llama 3), and
    a module that predicts another token as a third (NeMo, scripts/performance/llm/pretrain_deepseek_v3.py), else the
    first stages hold one layer more (DeepSpeed's `partition_uniform`).
    """
    stages, layers = layout.num_stages, model.num_layers
    if said := re.search(r"layers_per_stage=(\[\[.*?\]\])", row_facts.text("notes")):
        counts = _counted(json.loads(said[1]))
    elif row_facts.text("flags.vocab_method") == "Redis":
        counts = _balanced(model, stages, row_facts.need("model.seq"))
    elif row_facts.stack.profile == "nanotron" and stages > 1:
        counts = _by_cost(model, stages)
    elif layers % stages == 0:
        return layout
    elif (layers + 2 + model.num_mtp_layers) % stages == 0:
        each = (layers + 2 + model.num_mtp_layers) // stages
        counts = [each - 1, *[each] * (stages - 2), each - 1 - model.num_mtp_layers]
    else:
        each, more = divmod(layers, stages)
        counts = [each + (stage < more) for stage in range(stages)]
        row_facts.assumed.append("the first stages hold one layer more")
    content, first = [], 0
    for stage, count in enumerate(counts):
        content.append(StageLayers(stage, first, first + count, embedding=stage == 0, head=stage == stages - 1))
        first += count
    return replace(layout, stages=to_string(tuple(content)))


def _counted(stages: list[list[int]]) -> list[int]:
    """Layers per stage from lists in which the embedding and the head are numbered as layers too."""
    counts = [len(each) for each in stages]
    counts[0] -= 1
    counts[-1] -= 1
    return counts


def _by_cost(model: ModelSpec, stages: int) -> list[int]:
    """Layers per stage such that each ends where the weights of the products so far, the head's included, reach its
    share of all (nanotron/helpers.py, get_block_compute_costs; models/base.py, build_model)."""
    hidden = model.hidden_size
    layer = 4 * hidden**2 + (3 if model.gated else 2) * hidden * model.ffn_hidden_size
    share = (model.num_layers * layer + model.vocab_size * hidden) / stages
    ends = [min(model.num_layers, int((stage + 1) * share // layer)) for stage in range(stages - 1)] + [
        model.num_layers
    ]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _balanced(model: ModelSpec, stages: int, sequence: int) -> list[int]:
    """Layers per stage such that the largest stage computes least, the head counted by its FLOPs (`Redis` of arXiv
    2411.05288); what does not divide goes to the stages before the last (sail-sg/VocabularyParallelism,
    transformer_block.py, get_num_layers_to_build)."""
    layer = 12 * model.hidden_size**2 + 2 * sequence * model.hidden_size
    head = model.vocab_size * model.hidden_size / layer
    last = min(
        range(model.num_layers),
        key=lambda count: max(math.ceil((model.num_layers - count) / (stages - 1)), count + head),
    )
    each, more = divmod(model.num_layers - last, stages - 1)
    return [*(each + (stage >= stages - 1 - more) for stage in range(stages - 1)), last]


def _precision(row_facts: _RowFacts) -> Precision:
    said = row_facts.need("precision")
    formats = (("nvfp4", ""), ("fp8", "fp8"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"))
    dtype = next((ours for word, ours in formats if word in str(said)), "")
    if not dtype:
        raise RowError(f"precision {said!r} is not modelled")
    # Composer: `mixed_precision: PURE` reduces in the format of the weights, `DEFAULT` in fp32.
    reduced = {"PURE": "bf16", "DEFAULT": "fp32"}.get(row_facts.text("flags.mp_mode"), row_facts.stack.gradient_dtype)
    scaling = next((reach for word, reach in row_facts.stack.scalings.items() if word in str(said)), None)
    return Precision(dtype, reduced, scaling=scaling)  # type: ignore[arg-type]


def _recompute(row_facts: _RowFacts, model: ModelSpec, layout: Layout) -> Recompute:
    """What the row repeats; `selective` by layer is every second layer."""
    said = str(row_facts.need("recompute"))
    if row_facts.row["recompute"] is None and (modules := recipe_of(row_facts.row).modules):
        return Recompute("selective", modules=modules)
    if not said.startswith("selective"):
        return Recompute("full" if said.startswith("full") else "none")
    if not (selective := row_facts.stack.selective):
        return Recompute("selective")
    if "(layer)" in said:
        return Recompute("full", num_layers=max(1, model.num_layers // layout.num_stages // 2))
    return Recompute("selective", modules=next(modules for word, modules in selective.items() if word in said))


def _runtime(row_facts: _RowFacts) -> Runtime:
    tp_overlap = row_facts.flag("tp_comm_overlap")
    fields = {
        "tp_comm_overlap": row_facts.flag("async_tp") if tp_overlap is None else tp_overlap,
        "p2p_overlap": row_facts.flag("p2p_overlap"),
        "launch_blocking": row_facts.flag("cuda_launch_blocking"),
        "compile": row_facts.flag("torch_compile"),
        "scatter_gather": False if "without scatter/gather" in row_facts.text("notes") else None,
        "cuda_graphs": True if "CUDA graphs" in row_facts.text("notes") else row_facts.flag("cuda_graphs"),
        **recipe_of(row_facts.row).runtime,
        **row_facts.stack.runtime,
    }
    return Runtime(profile=_profile(row_facts), **fields)


def _profile(row_facts: _RowFacts) -> str:
    """The row's software stack."""
    if row_facts.stack.sharded_profile is not None and "ZeRO-3" in row_facts.text("parallel.sharding"):
        return row_facts.stack.sharded_profile
    return row_facts.stack.profile_of_mode.get(row_facts.text("flags.mp_mode"), row_facts.stack.profile)


def _data_parallel(row_facts: _RowFacts, layout: Layout) -> DataParallel:
    sharding = row_facts.text("parallel.sharding")
    group = re.search(r"over (\d+) GPUs|HSDP FSDP(\d+)", sharding)
    shard = int(group[1] or group[2]) if group and layout.zero else row_facts.stack.defaults.get("shard")
    overlap = row_facts.flag("grad_reduce_overlap")
    fields = {
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap,
        "shard": shard if shard is not None and shard < layout.dp and layout.dp % shard == 0 else None,
        **row_facts.stack.data_parallel,
    }
    return DataParallel(**fields)


def _cluster(row_facts: _RowFacts) -> ClusterSpec:
    gpu, network = row_facts.text("hardware.gpu"), row_facts.text("hardware.inter")
    machine = next((machine for word, machine in MACHINES if word in gpu), None)
    if machine is None or machine.preset not in CLUSTER_PRESETS:
        raise RowError(f"device {gpu!r} has no preset")
    injection = next((rate for words, rate in NETWORKS if words in network), None)
    base = cluster_preset(machine.preset, row_facts.need("hardware.count"))
    changed = {**machine.fields, **({"node_network_bytes_per_s": injection} if injection else {})}
    if (cards := re.match(r"(\d+)x", network)) and base.devices_per_node == 8:  # racks of NVL72 count cards per tray
        changed["nics_per_node"] = int(cards[1])
    if (products := row_facts.get("fp32_products", "fp32")) != "fp32":
        changed["peak_flops_per_s"] = {**base.peak_flops_per_s, "fp32": base.peak_flops_per_s[products]}
    if (power_share := machine.power_share * row_facts.stack.power_share) < 1:
        slower = power_share**POWER_EXPONENT
        changed["sustained_share"] = base.sustained_share * slower
        changed["sustained_share_by_dtype"] = {
            dtype: share * slower for dtype, share in base.sustained_share_by_dtype.items()
        }
    return replace(
        base,
        **changed,
        sources={**base.sources, **dict.fromkeys(changed, (f"{row_facts.row.source}: {gpu}; {network}"))},
    )


def _numerics(model: ModelSpec, layout: Layout) -> Numerics:
    """Leaf sizes that admit the layout's tensor parallelism with equal cuts (they matter only in exact mode)."""
    return Numerics(
        ffn_block=max(1, model.ffn_hidden_size // layout.tp), vocab_block=max(1, -(-model.vocab_size // layout.tp))
    )
