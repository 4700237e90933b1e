"""A plan as a configuration of torchtitan: TOML of v0.2.2, the last release that had it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ..model.model import ModelSpec
from ..plan.build import Draft
from ..plan.plan import Plan, any_plan
from ..plan.toml import Given
from ..plan.write import sparse_model, toml_value
from .account import Request
from .differences import lost_keys
from .exported import Exported
from .torchtitan_meaning import account
from .torchtitan_models import MODELS
from .torchtitan_numbers import F8, MX, OPTIMIZERS, stages_of
from .torchtitan_pipeline import MULTI, SINGLE, VEES
from .torchtitan_rates import rate_settings
from .torchtitan_table import TABLE

FILE = "torchtitan.toml"

_WHYS = {
    "cluster.preset": "hardware is not in torchtitan's files",
    "model": "torchtitan takes shapes from its registry: register a flavor with the plan's numbers",
    "layout.order": "torchtitan's mesh has one order: pp, dp, cp, tp",
    "layout.zero": "FSDP2 shards parameters (zero 2 and 3), DDP nothing (0), and cp above 1 means FSDP",
    "layout.stages": "stages are lists of modules; another way to write the same cut is not kept",
    "layout.sequence_parallel": "sequences are cut whenever the tensor-parallel degree is above 1",
    "schedule.name": "torch.distributed.pipelining has no such schedule",
    "recompute": "torchtitan computes again by operations, whole layers, or every n-th layer",
    "runtime.profile": "the plan is for torchtitan now",
    "precision.dtype": "torchtitan computes in bf16 (products in fp8) with FSDP, and in fp32 without it in tp and pp",
    "train.data": "which text is learned is training.dataset, of a name that torchtitan knows",
    "checkpoint": "torchtitan has checkpoints of its own, at an interval",
    "log": "what a run shows of its steps changes none of them",
    "experimental": "it is about what our own backend has not yet proved in use",
    "batch.micro": "a rank's batch is whole microbatches",
}
_USUAL = "torchtitan has no setting for it"


def write(plan: Plan) -> Exported:
    """The TOML of a plan, and what it does not say: the keys that differ when it is read again. Raises `PlanError` for
    a plan that torchtitan refuses."""
    text = _toml(dict(_settings(plan)))
    lost = lost_keys(plan, _read_back(plan, text), _WHYS, _USUAL)
    if _flavor_of(plan.model) is None:
        lost = (("model.preset", f"{_WHYS['model']}, here as {plan.model.name}"), *lost)
    return Exported("torchtitan", ((FILE, text),), lost)


def _read_back(plan: Plan, text: str) -> Plan:
    """The plan that the text means, with the model of the plan where the text's has to be registered. Raises
    `PlanError` for a plan that torchtitan does not run, such as experts over ranks that do not share their
    parameters."""
    known = _flavor_of(plan.model) is not None
    model = {} if known else {key: Given(value, FILE) for key, value in sparse_model(plan.model).items()}
    imported = account(Request(text, FILE, plan.world_size, model))
    imported.raise_refused()
    read = any_plan({**imported.values, **({} if known else {"model": model})}, FILE)
    assert isinstance(read, Plan)
    return read


def _toml(settings: Mapping[str, Any]) -> str:
    """Settings by section, in the order of the table."""
    sections: dict[str, list[str]] = {}
    for flag in sorted(settings, key=list(TABLE).index):
        section, _, name = flag.rpartition(".")
        sections.setdefault(section, []).append(f"{name} = {toml_value(settings[flag])}")
    return "\n".join("\n".join([f"[{section}]", *lines, ""]) for section, lines in sections.items())


def _settings(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Setting -> value, for all that a plan says."""
    yield from _model(plan)
    yield from _mesh(plan)
    yield from _pipeline(plan)
    yield from _numbers(plan)
    sections = {name: getattr(plan, name) for name in ("batch", "train", "optimizer")}
    for row in TABLE.values():
        if row.same and row.key is not None:
            section, _, name = row.key.partition(".")
            yield row.flag, getattr(sections[section], name)
    yield from rate_settings(plan)
    if plan.optimizer.name != "adamw":
        yield "optimizer.name", next(name for name, own in OPTIMIZERS.items() if own == plan.optimizer.name)
    yield "optimizer.beta1", plan.optimizer.betas[0]
    yield "optimizer.beta2", plan.optimizer.betas[1]
    if plan.checkpoint.folder is not None:
        yield "checkpoint.enable", True
        yield "checkpoint.folder", plan.checkpoint.folder
        yield "checkpoint.interval", plan.checkpoint.every or max(1, plan.train.steps)
        yield "checkpoint.keep_latest_k", plan.checkpoint.keep or 0


def _model(plan: Plan) -> Iterator[tuple[str, Any]]:
    family, flavor = _flavor_of(plan.model) or ("llama3", plan.model.name)
    yield "model.name", family
    yield "model.flavor", flavor


def _flavor_of(model: ModelSpec) -> tuple[str, str] | None:
    """The family and flavor with this shape; None where there is none, and one has to be registered."""
    return _flavors().get(replace(model, **_FREE))


_FREE: dict[str, Any] = {"name": "", "max_positions": 1}
"""What no step depends on."""


@lru_cache(maxsize=1)
def _flavors() -> dict[ModelSpec, tuple[str, str]]:
    """Shape -> family and flavor, of all; the first of equal ones."""
    found: dict[ModelSpec, tuple[str, str]] = {}
    for family, flavors in MODELS.items():
        for flavor, fields in flavors.items():
            given = {key: Given(value, "") for key, value in fields.items()}
            if (model := Draft({"model": given, "batch": {"sequence": Given(1, "")}}, "").model()) is not None:
                found.setdefault(replace(model, **_FREE), (family, flavor))
    return found


def _mesh(plan: Plan) -> Iterator[tuple[str, Any]]:
    layout, prefix = plan.layout, "parallelism."
    shard = 1 if _is_ddp(plan) else layout.dp
    if layout.zero and plan.data_parallel.shard is not None and plan.data_parallel.shard % layout.cp == 0:
        shard = plan.data_parallel.shard // layout.cp
    yield f"{prefix}data_parallel_shard_degree", shard
    yield f"{prefix}data_parallel_replicate_degree", layout.dp // shard
    yield f"{prefix}tensor_parallel_degree", layout.tp
    yield f"{prefix}context_parallel_degree", layout.cp
    yield f"{prefix}pipeline_parallel_degree", layout.pp
    yield f"{prefix}fsdp_reshard_after_forward", "always" if layout.zero == 3 else "never"
    if plan.model.is_moe:
        yield f"{prefix}expert_parallel_degree", layout.ep
        if layout.ep > 1:
            yield f"{prefix}expert_tensor_parallel_degree", layout.expert_tp
        if plan.runtime.dispatch_once:
            yield f"{prefix}expert_parallel_comm_backend", "deepep"
    if layout.cp > 1 and plan.runtime.context_parallel is not None:
        how = {"all_gather": "allgather", "ring": "alltoall"}[plan.runtime.context_parallel]
        yield f"{prefix}context_parallel_rotate_method", how
    if plan.runtime.tp_comm_overlap is not None:
        yield f"{prefix}enable_async_tensor_parallel", plan.runtime.tp_comm_overlap


def _is_ddp(plan: Plan) -> bool:
    """Whether nothing is sharded, which torchtitan takes without other parallelism only."""
    return plan.layout.zero == 0 and plan.layout.tp * plan.layout.pp * plan.layout.cp == 1


def _pipeline(plan: Plan) -> Iterator[tuple[str, Any]]:
    layout, batch, prefix = plan.layout, plan.batch, "parallelism."
    if batch.global_size % (batch.micro_size * layout.dp) == 0:
        yield "training.global_batch_size", batch.global_size
    if layout.pp == 1:
        yield "training.local_batch_size", batch.micro_size
        return
    yield "training.local_batch_size", plan.num_microbatches * batch.micro_size
    yield f"{prefix}pipeline_parallel_microbatch_size", batch.micro_size
    name = next((name for name in (*SINGLE.values(), *MULTI.values()) if name == plan.schedule.name), None)
    if plan.schedule.file is not None:
        yield (
            f"{prefix}pipeline_parallel_schedule",
            "PipelineScheduleMulti" if layout.vpp > 1 else "PipelineScheduleSingle",
        )
        yield f"{prefix}pipeline_parallel_schedule_csv", plan.schedule.file
    else:
        yield f"{prefix}pipeline_parallel_schedule", name or ("Interleaved1F1B" if layout.vpp > 1 else "1F1B")
    parts = []
    for stage in plan.stages:
        layers = [f"layers.{layer}" for layer in stage.layers]
        parts.append(["tok_embeddings"] * stage.embedding + layers + ["norm", "output"] * stage.head)
    yield f"{prefix}module_fqns_per_model_part", parts


def _numbers(plan: Plan) -> Iterator[tuple[str, Any]]:
    dtype = plan.precision.dtype
    yield "training.mixed_precision_param", "float32" if dtype == "fp32" else "bfloat16"
    if plan.precision.gradient_dtype == "fp32":
        yield "training.mixed_precision_reduce", "float32"
    layout = plan.layout
    has_fsdp = not _is_ddp(plan) and layout.dp * layout.cp > 1
    if dtype == "fp8" and (has_fsdp or layout.tp * layout.pp == 1):
        block = plan.precision.scaling == "block"
        yield "model.converters", ["quantize.linear.mx" if block else "quantize.linear.float8"]
        recipe = {"tensor": "tensorwise", "row": "rowwise"}.get(plan.precision.scaling or "")
        if block:
            yield f"{MX}.recipe_name", "mxfp8_cublas"
        elif recipe is not None:
            yield f"{F8}.recipe_name", recipe
        if not block and recipe != "rowwise":
            yield f"{F8}.enable_fsdp_float8_all_gather", True
    compiled, fused = plan.runtime.compile, plan.runtime.fused_loss
    if compiled is not None or fused:
        yield "compile.enable", bool(compiled or fused)
        yield "compile.components", ["model"] * bool(compiled) + ["loss"] * bool(fused)
    yield from _recompute(plan)


def _recompute(plan: Plan) -> Iterator[tuple[str, Any]]:
    mode, layers = plan.recompute.mode, plan.recompute.layers
    step = None if mode != "full" or layers is None else _step_of(plan, layers)
    yield "activation_checkpoint.mode", mode if step is None else "selective"
    if mode == "selective" or step is not None:
        yield "activation_checkpoint.selective_ac_option", "op" if step is None else str(step)


def _step_of(plan: Plan, layers: tuple[int, ...]) -> int | None:
    """The number of which every n-th layer of each rank is one of these; None where there is none."""
    layout, stages = plan.layout, plan.stages
    ranks = []
    for pp_rank in range(layout.pp):
        mine = stages_of(pp_rank, layout.pp, len(stages), vee=plan.schedule.name in VEES)
        ranks.append([layer for stage in mine for layer in stages[stage].layers])
    for step in range(2, max(map(len, ranks)) + 1):
        if sorted(layer for rank in ranks for layer in rank[step - 1 :: step]) == sorted(layers):
            return step
    return None
