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
from ...core.plan.plan import (
    Batch,
    DataParallel,
    Numerics,
    Optimizer,
    Plan,
    Precision,
    Recompute,
    Runtime,
    ScheduleChoice,
)
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
    told = _Told(row, replace(stack, defaults={**stack.defaults, **instead}) if instead else stack)
    try:
        plan = _plan(told)
    except RowError:
        raise
    except ShardproofError as error:
        raise RowError(f"no plan: {error}") from error
    return PublishedPlan(plan, tuple(told.assumed))


class _Told:
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


def _plan(told: _Told) -> Plan:
    _refuse_unmodelled(told)
    layout = _layout(told)
    model = _model(told, layout)
    layout = _cut(told, model, layout)
    said = told.text("schedule").split(",")
    schedule = SCHEDULES.get(said[0] or "none")
    if schedule is None:
        raise RowError(f"schedule {said[0]!r} is not in the catalog")
    synchronises = not (said[0] in POST_VALIDATED and len(said) == 1)
    return Plan(
        model=model,
        cluster=_cluster(told),
        layout=layout,
        batch=_batch(told, layout),
        runtime=_runtime(told),
        precision=_precision(told),
        recompute=_recompute(told, model, layout),
        schedule=ScheduleChoice("1F1B" if schedule == "Interleaved1F1B" and layout.vpp == 1 else schedule),
        numerics=_numerics(model, layout),
        optimizer=Optimizer(clip_grad_norm=Optimizer().clip_grad_norm if synchronises else 0.0),
        data_parallel=_data_parallel(told, layout),
    )


def _refuse_unmodelled(told: _Told) -> None:
    """Raises `RowError` for what no plan can say."""
    name = told.text("model.name").lower()
    if "mamba" in name or "nemotron_3" in name:
        raise RowError("state-space layers are not modelled")
    if told.flag("parallel_block") or told.flag("sliding_window_attention"):
        raise RowError("parallel blocks are not modelled, and how long the sliding window is was not published")
    if told.row.family == "megascale_ablation" and told.text("notes").startswith("+"):
        raise RowError("parallel blocks are not modelled; every row of the ablation adds to those before")
    if told.text("flags.vocab_method") in ("Vocab-1", "Vocab-2", "Interlaced"):
        raise RowError("a vocabulary cut over pipeline ranks is not modelled")
    if told.row["kind"] == "finetune_step" and "SFT" not in told.text("source_ref"):
        raise RowError("fine-tuning steps with frozen parts are not modelled")


def _model(told: _Told, layout: Layout) -> ModelSpec:
    name, hidden, heads, vocab = (told.need(f"model.{field}") for field in ("name", "hidden", "heads", "vocab"))
    if told.stack.pads_vocabulary:
        vocab = -(-vocab // (128 * layout.tp)) * 128 * layout.tp
    if told.stack.cuts_vocabulary:
        vocab = vocab // layout.tp * layout.tp
    if told.row.source.startswith("Vocabulary Parallelism"):
        # the rows infer 2^15 from "32K"; sail-sg/VocabularyParallelism, artifact/exp_one_host.csv: 32,000
        vocab = vocab // 1024 * 1000
    fields: dict[str, Any] = {**conventions(str(name)), **told.stack.model, **_experts(told)}
    if told.row.source.startswith("nanotron"):
        # scripts/scaling_benchmarks.py: models below 4B tie
        fields["tied_embeddings"] = told.need("model.ffn") < 10_000
    latent = "kv_lora_rank" in fields
    return ModelSpec(
        name=str(name),
        num_layers=told.get("model.layers") or _layers_from_size(told, layout),
        hidden_size=hidden,
        ffn_hidden_size=told.need("model.ffn"),
        num_heads=heads,
        num_kv_heads=heads if latent else told.get("model.kv_heads") or heads,
        head_dim=192 if latent else told.get("model.head_dim") or hidden // heads,
        vocab_size=vocab,
        max_positions=told.need("model.seq"),
        **fields,
    )


def _experts(told: _Told) -> dict[str, Any]:
    """Fields of mixtures of experts and latent attention."""
    moe = told.get("model.moe")
    if not moe:
        return {}
    width = moe.get("moe_ffn") or told.need("model.ffn")
    fields = {
        "num_experts": moe["experts"],
        "experts_per_token": moe["topk"],
        "num_shared_experts": moe.get("shared") or (moe.get("shared_ffn") or 0) // width,
        "expert_ffn_hidden_size": width,
        "first_dense_layers": moe.get("dense_layers") or 0,
    }
    return {**fields, **(MLA if "MLA" in str(moe.get("attention")) else {})}


def _layers_from_size(told: _Told, layout: Layout) -> int:
    """Layers of a GPT from its published size, as a multiple of the pipeline stages: 12 h^2 weights
    each, and the token table."""
    size, hidden, vocab = told.need("model.params_b"), told.need("model.hidden"), told.need("model.vocab")
    layers = max(1, round((size * 1e9 - vocab * hidden) / (12 * hidden**2) / layout.pp)) * layout.pp
    told.assumed.append(f"model.layers={layers}")
    return layers


def _batch(told: _Told, layout: Layout) -> Batch:
    """The batch; microbatches as large as their number leaves them where their size is not published."""
    sequences, micro = told.need("batch.global"), told.get("batch.micro")
    if micro is None and (count := told.get("batch.num_microbatches")):
        micro = sequences // (layout.dp * count)
    return Batch(sequences, micro or told.need("batch.micro"), told.need("model.seq"))


def _layout(told: _Told) -> Layout:
    sharding, notes = told.text("parallel.sharding"), told.text("notes")
    pp, tp, cp = told.need("parallel.pp"), told.need("parallel.tp"), told.get("parallel.cp", 1)
    dp = told.get("parallel.dp") or told.need("hardware.count") // (tp * pp * cp)
    interleaved = pp > 1 and (
        "nterleaved" in told.text("schedule") or "V-" in told.text("schedule") or told.row["parallel.vpp"]
    )
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=told.get("parallel.ep") or 1,
        etp=_expert_tp(told, tp, cp, dp),
        vpp=_chunks(told, pp) if interleaved else 1,
        sequence_parallel=bool(told.get("parallel.sp")) and tp > 1,
        zero=next((stage for words, stage in ZERO if words in sharding), 0),
        order=told.get("order")
        or ("tp-cp-ep-pp-dp" if "TP-PP-DP" in notes or "DP placed last" in notes else DEFAULT_ORDER),
    )


def _expert_tp(told: _Told, tp: int, cp: int, dp: int) -> int | None:
    """The experts' tensor parallelism; whole experts where cut ones would not lie on the ranks of a stage."""
    etp: int | None = told.get("parallel.etp")
    if etp is None and tp * cp * dp % (tp * (told.get("parallel.ep") or 1)):
        told.assumed.append("parallel.etp=1")
        return 1
    return etp


def _chunks(told: _Told, pp: int) -> int:
    """Stages per pipeline rank, from the table, from the schedule's shape or from the layers that a chunk holds."""
    if told.text("schedule").startswith("V-"):
        return 2
    if (chunks := told.get("parallel.vpp")) is not None:
        return int(chunks)
    if told.row["model.layers"] and (each := told.get("layers_per_chunk")):
        return int(told.row["model.layers"] // (pp * each))
    return int(told.need("parallel.vpp"))


def _cut(told: _Told, model: ModelSpec, layout: Layout) -> Layout:
    """The layout with an uneven cut where stages do not divide the layers, or the source says that they were balanced.

    Embedding and head count as a layer each when that makes it even (MLPerf's ASYM_PP flags; Zero Bubble; Llama 3), and
    a module that predicts another token as a third (NeMo, scripts/performance/llm/pretrain_deepseek_v3.py), else the
    first stages hold one layer more (DeepSpeed's `partition_uniform`).
    """
    stages, layers = layout.num_stages, model.num_layers
    if said := re.search(r"layers_per_stage=(\[\[.*?\]\])", told.text("notes")):
        counts = _counted(json.loads(said[1]))
    elif told.text("flags.vocab_method") == "Redis":
        counts = _balanced(model, stages, told.need("model.seq"))
    elif told.stack.profile == "nanotron" and stages > 1:
        counts = _by_cost(model, stages)
    elif layers % stages == 0:
        return layout
    elif (layers + 2 + model.num_mtp_layers) % stages == 0:
        each = (layers + 2 + model.num_mtp_layers) // stages
        counts = [each - 1, *[each] * (stages - 2), each - 1 - model.num_mtp_layers]
    else:
        each, more = divmod(layers, stages)
        counts = [each + (stage < more) for stage in range(stages)]
        told.assumed.append("the first stages hold one layer more")
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


def _precision(told: _Told) -> Precision:
    said = told.need("precision")
    formats = (("nvfp4", ""), ("fp8", "fp8"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"))
    dtype = next((ours for word, ours in formats if word in str(said)), "")
    if not dtype:
        raise RowError(f"precision {said!r} is not modelled")
    # Composer: `mixed_precision: PURE` reduces in the format of the weights, `DEFAULT` in fp32.
    reduced = {"PURE": "bf16", "DEFAULT": "fp32"}.get(told.text("flags.mp_mode"), told.stack.gradient_dtype)
    scaling = None
    if told.stack.profile == "torchtitan":
        scaling = next((reach for word, reach in (("rowwise", "row"), ("mxfp8", "block")) if word in str(said)), None)
    return Precision(dtype, reduced, scaling=scaling)  # type: ignore[arg-type]


def _recompute(told: _Told, model: ModelSpec, layout: Layout) -> Recompute:
    """torchtitan's `selective` by layer recomputes every second layer; by operation it goes by no modules
    (`Profile.selective_operators`). XLA's policies of saving projections repeat norms, core and the MLP up to its last
    product; attention's output, which MaxText's policy does not save, is not counted (1% to 2% of a step)."""
    said = str(told.need("recompute"))
    if told.row["recompute"] is None and (modules := recipe_of(told.row).modules):
        return Recompute("selective", modules=modules)
    if not said.startswith("selective"):
        return Recompute("full" if said.startswith("full") else "none")
    if told.stack.profile not in ("torchtitan", "xla"):
        return Recompute("selective")
    if "(layer)" in said:
        return Recompute("full", num_layers=max(1, model.num_layers // layout.num_stages // 2))
    if told.stack.profile == "torchtitan":
        return Recompute("selective", modules=("core_attn",) if "core" in said else ("norm",))
    return Recompute("selective", modules=("core_attn", "norm", "mlp") if "save_qkv" in said else ("norm", "mlp"))


def _runtime(told: _Told) -> Runtime:
    tp_overlap = told.flag("tp_comm_overlap")
    fields = {
        "tp_comm_overlap": told.flag("async_tp") if tp_overlap is None else tp_overlap,
        "p2p_overlap": told.flag("p2p_overlap"),
        "launch_blocking": told.flag("cuda_launch_blocking"),
        "compile": told.flag("torch_compile"),
        "scatter_gather": False if "without scatter/gather" in told.text("notes") else None,
        "cuda_graphs": True if "CUDA graphs" in told.text("notes") else told.flag("cuda_graphs"),
        **recipe_of(told.row).runtime,
        **told.stack.runtime,
    }
    return Runtime(profile=_profile(told), **fields)  # type: ignore[arg-type]


def _profile(told: _Told) -> str:
    """The row's software stack. Composer's `PURE` tables are older than the others:
    scripts/train/benchmarking/sweep.sh of llm-foundry takes an image of torch 1.13.1 before b2a43a1, which left
    them and added the rest, and of 2.1.0 from there on."""
    if told.stack.sharded_profile is not None and "ZeRO-3" in told.text("parallel.sharding"):
        return told.stack.sharded_profile
    return "fsdp-1.13" if told.stack.profile == "fsdp" and told.text("flags.mp_mode") == "PURE" else told.stack.profile


def _data_parallel(told: _Told, layout: Layout) -> DataParallel:
    sharding = told.text("parallel.sharding")
    group = re.search(r"over (\d+) GPUs|HSDP FSDP(\d+)", sharding)
    shard = int(group[1] or group[2]) if group and layout.zero else told.stack.defaults.get("shard")
    overlap = told.flag("grad_reduce_overlap")
    fields = {
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap,
        "shard": shard if shard is not None and shard < layout.dp and layout.dp % shard == 0 else None,
        **told.stack.data_parallel,
    }
    return DataParallel(**fields)


def _cluster(told: _Told) -> ClusterSpec:
    gpu, network = told.text("hardware.gpu"), told.text("hardware.inter")
    machine = next((machine for word, machine in MACHINES if word in gpu), None)
    if machine is None or machine.preset not in CLUSTER_PRESETS:
        raise RowError(f"device {gpu!r} has no preset")
    injection = next((rate for words, rate in NETWORKS if words in network), None)
    base = cluster_preset(machine.preset, told.need("hardware.count"))
    changed = {**machine.fields, **({"node_network_bytes_per_s": injection} if injection else {})}
    if (cards := re.match(r"(\d+)x", network)) and base.devices_per_node == 8:  # racks of NVL72 count cards per tray
        changed["nics_per_node"] = int(cards[1])
    if (products := told.get("fp32_products", "fp32")) != "fp32":
        changed["peak_flops_per_s"] = {**base.peak_flops_per_s, "fp32": base.peak_flops_per_s[products]}
    if (power_share := machine.power_share * told.stack.power_share) < 1:
        slower = power_share**POWER_EXPONENT
        changed["sustained_share"] = base.sustained_share * slower
        changed["sustained_share_by_dtype"] = {
            dtype: share * slower for dtype, share in base.sustained_share_by_dtype.items()
        }
    return replace(
        base, **changed, sources={**base.sources, **dict.fromkeys(changed, (f"{told.row.source}: {gpu}; {network}"))}
    )


def _numerics(model: ModelSpec, layout: Layout) -> Numerics:
    """Leaf sizes that admit the layout's tensor parallelism with equal cuts (they matter only in exact mode)."""
    return Numerics(
        ffn_block=max(1, model.ffn_hidden_size // layout.tp), vocab_block=max(1, -(-model.vocab_size // layout.tp))
    )
