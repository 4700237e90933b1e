"""Number formats, recomputation, compilation, optimizer and checkpoints of a torchtitan configuration."""

from __future__ import annotations

from ..base.errors import did_you_mean
from .table import Sheet
from .torchtitan_degrees import Degrees
from .torchtitan_pipeline import MULTI, NAME, TOKENS, VEES, is_old
from .torchtitan_rates import put_rates

F8, MX = "quantize.linear.float8", "quantize.linear.mx"
CONVERTERS = "model.converters"
MODE, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
PARAM, REDUCE = "training.mixed_precision_param", "training.mixed_precision_reduce"
ASYNC_TP = "parallelism.enable_async_tensor_parallel"
OVERLAP = "parallelism.pipeline_parallel_expert_parallel_overlap"

_LINEAR = {"float8": F8, "quantize.linear.float8": F8, "quantize.dense.float8": F8, "mx": MX, "quantize.linear.mx": MX}
_LINEAR |= {"quantize.dense.mx": MX}
_EXPERTS = ("quantize.grouped_mm.float8", "quantize.grouped_mm.mx", "quantize.moe.float8", "quantize.moe.mx")
_SCALINGS = {None: "tensor", "tensorwise": "tensor", "rowwise": "row", "rowwise_with_gw_hp": "row"}


def put_numbers(sheet: Sheet, degrees: Degrees, stages: list[int], *, has_experts: bool) -> None:
    """Puts everything but model, layout and batch."""
    _put_precision(sheet, degrees)
    _put_recompute(sheet, degrees.pp, stages)
    _put_compile(sheet, degrees, has_experts=has_experts)
    _put_optimizer(sheet)
    put_rates(sheet)
    _put_checkpoint(sheet)
    for flag in ("experimental.custom_import", "experimental.custom_args_module", "experimental.custom_model_path"):
        _say_imported(sheet, flag)
    _say_imported(sheet, "job.custom_config_module")
    if sheet.value("fault_tolerance.enable"):
        why = "replicas that come and go add their gradients over a process group of their own"
        sheet.say("fault_tolerance.enable", "not-modelled", why)
    else:
        sheet.say("fault_tolerance.enable", "no-effect", "it is off")
    sheet.say("hf_transformers.model", "not-modelled", "it counts with the model of transformers only")


def _say_imported(sheet: Sheet, flag: str) -> None:
    if sheet.value(flag):
        sheet.say(flag, "not-modelled", "what this code changes is not known: nothing is executed")
    else:
        sheet.say(flag, "no-effect", "it is empty")


def _put_precision(sheet: Sheet, degrees: Degrees) -> None:
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    dtype = names[sheet.value(PARAM)]
    if dtype != "fp32" and not degrees.is_sharded and degrees.tp * degrees.pp > 1:
        dtype = "fp32"
        why = "without FSDP, with tensor or pipeline parallelism, torchtitan computes in fp32 (maybe_enable_amp)"
        if sheet.is_written(PARAM):
            sheet.say(PARAM, "no-effect", why)
        sheet.assumed.append(f"{why}.")
    sheet.put("precision.dtype", dtype, PARAM)
    if sheet.is_written(REDUCE):
        sheet.put("precision.gradient_dtype", names[sheet.value(REDUCE)], REDUCE)
    if sheet.value("training.dtype") == "bfloat16":
        why = "weights, gradients and optimizer state are bf16, without fp32 ones: less memory than is modelled"
        sheet.say("training.dtype", "not-modelled", why)
    _put_narrow(sheet, degrees, dtype)
    if sheet.value("training.enable_cpu_offload"):
        why = "weights, gradients and optimizer state rest in host memory; a plan offloads Adam's moments alone"
        sheet.refuse("training.enable_cpu_offload", f"{why} (offload.optimizer).")
    else:
        sheet.say("training.enable_cpu_offload", "no-effect", "it is off")


def _put_narrow(sheet: Sheet, degrees: Degrees, dtype: str) -> None:
    """Puts products in 8 bits where a converter makes them so."""
    given = sheet.value(CONVERTERS)
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else [str(name) for name in given]
    for name in filter(None, names):
        if name not in _LINEAR and name not in _EXPERTS:
            sheet.refuse(CONVERTERS, f"{name!r} is none that is read{did_you_mean(name, (*_LINEAR, *_EXPERTS))}")
            return
    by = next((_LINEAR[name] for name in names if name in _LINEAR), None)
    if by is None and sheet.value(f"{F8}.enable_float8_linear") in (True, "dynamic"):
        by = F8
    if by is None and any(name in _EXPERTS for name in names):
        sheet.refuse(
            CONVERTERS, "experts alone compute in 8 bits; a plan has one format for all products (precision.dtype)."
        )
    for section in (F8, MX):
        if section != by:
            for flag in [flag for flag in sheet.table if flag.startswith(f"{section}.")]:
                sheet.say(flag, "no-effect", "it is not among model.converters")
    if by is None:
        return
    flags = (CONVERTERS, f"{F8}.enable_float8_linear")
    if dtype == "fp32":
        sheet.refuse(
            CONVERTERS, "products in 8 bits of fp32 activations are not modelled: use FSDP, which casts to bf16."
        )
    sheet.put("precision.dtype", "fp8", *flags)
    recipe = sheet.value(f"{by}.recipe_name")
    scaling = "block" if by == MX or recipe == "mxfp8" else _SCALINGS[recipe]
    if by == MX or recipe is not None:
        sheet.put("precision.scaling", scaling, f"{by}.recipe_name", *flags)
    if recipe == "rowwise_with_gw_hp":
        sheet.say(f"{F8}.recipe_name", "not-modelled", "weight gradients are products in bf16; modelled are 8 bits")
    gathered = f"{F8}.enable_fsdp_float8_all_gather"
    if scaling != "tensor" or not degrees.is_sharded:
        sheet.say(gathered, "no-effect", "it counts with FSDP and a scale for a tensor only")
    elif by == F8 and not sheet.value(gathered):
        if sheet.is_written(gathered):
            sheet.say(gathered, "not-modelled", "weights are modelled as gathered in 8 bits")
        else:
            sheet.assumed.append("weights are gathered in bf16 (enable_fsdp_float8_all_gather); modelled are 8 bits.")


def _put_recompute(sheet: Sheet, pp: int, stages: list[int]) -> None:
    mode, option = sheet.value(MODE), str(sheet.value(OPTION)).strip()
    if mode == "memory_budget":
        why = "the compiler chooses by a budget what is computed again; modes that a plan has are none, selective, full"
        sheet.refuse(MODE, f"{why} (recompute.mode).")
        return
    if mode != "selective":
        sheet.put("recompute.mode", mode, MODE)
        sheet.say(OPTION, "no-effect", "it counts with selective only")
    elif option == "op":
        sheet.put("recompute.mode", "selective", OPTION, MODE)
        sheet.put("recompute.modules", ["norm"], OPTION)
    elif not option.isdecimal() or len(option) > 6:
        sheet.refuse(OPTION, "this is 'op', or a number: every n-th layer is computed again.")
    else:
        _put_every(sheet, int(option), pp, stages)


def _put_every(sheet: Sheet, step: int, pp: int, stages: list[int]) -> None:
    """Every `step`-th of the layers that a rank makes, in the order of its stages, is computed again whole."""
    if not stages:
        sheet.assumed.append(
            "which layers are computed again is not known without the model's layers: none is modelled."
        )
        return
    chosen: list[int] = []
    for pp_rank in range(pp):
        count = 0
        for stage in stages_of(pp_rank, pp, len(stages), vee=_is_vee(sheet)):
            first = sum(stages[:stage])
            for layer in range(first, first + stages[stage]):
                count += 1
                if step == 0 or count % step == 0:
                    chosen.append(layer)
    sheet.put("recompute.mode", "full" if chosen else "none", OPTION, MODE)
    if chosen and len(chosen) < sum(stages):
        sheet.put("recompute.layers", sorted(chosen), OPTION)


def stages_of(pp_rank: int, pp: int, num_stages: int, *, vee: bool) -> list[int]:
    """The stages of a rank: round and round, or down and back."""
    rounds = range(num_stages // pp)
    return [turn * pp + (pp - 1 - pp_rank if vee and turn % 2 else pp_rank) for turn in rounds]


def _is_vee(sheet: Sheet) -> bool:
    return MULTI.get(str(sheet.value(NAME)).lower().replace("_", "")) in VEES


def _put_compile(sheet: Sheet, degrees: Degrees, *, has_experts: bool) -> None:
    enabled, parts = sheet.value("compile.enable"), sheet.value("compile.components")
    compiled = bool(enabled and "model" in parts)
    flags = ("compile.enable", "compile.components")
    if sheet.is_written("compile.enable"):
        sheet.put("runtime.compile", compiled, *flags)
    if enabled and "loss" in parts and not is_old(sheet):
        sheet.put("runtime.fused_loss", True, *flags)
    if degrees.tp == 1 or not sheet.is_written(ASYNC_TP):
        sheet.say(ASYNC_TP, "no-effect", "the tensor-parallel degree is 1")
    elif compiled or not sheet.value(ASYNC_TP):
        sheet.put("runtime.tp_comm_overlap", sheet.value(ASYNC_TP), ASYNC_TP)
    else:
        sheet.say(ASYNC_TP, "no-effect", "it takes the compiler, which is off (compile.enable)")
    if degrees.pp > 1:
        is_dual = MULTI.get(str(sheet.value(NAME)).lower().replace("_", "")) == "DualPipeV"
        if is_dual and has_experts and degrees.ep > 1:
            sheet.put("runtime.ep_comm_overlap", sheet.value(OVERLAP), OVERLAP)
        else:
            sheet.say(OVERLAP, "no-effect", "it counts for DualPipeV with expert parallelism only")
    graphs = "training.disable_cuda_graphs"
    if sheet.is_written(graphs, TOKENS):  # since August 2026, when batches came to count tokens, unless it says no
        captured = not sheet.value(graphs) and degrees.pp == 1 and degrees.ep == 1
        sheet.put("runtime.cuda_graphs", captured, graphs)


def leave_unused(sheet: Sheet) -> None:
    """Takes back what only Adam has, where the optimizer is none."""
    if OPTIMIZERS.get(sheet.value("optimizer.name")) == "sgd":
        for flag in ("optimizer.beta1", "optimizer.beta2", "optimizer.eps"):
            sheet.say(flag, "no-effect", "it counts for Adam")
        sheet.values["optimizer"].pop("eps", None)


OPTIMIZERS = {"AdamW": "adamw", "Adam": "adamw", "SGD": "sgd", "Muon": "muon"}
"""`optimizer.name`, a class of `torch.optim` -> that of a plan."""


def _put_optimizer(sheet: Sheet) -> None:
    name = sheet.value("optimizer.name")
    if name == "Adam":
        sheet.say(
            "optimizer.name",
            "not-modelled",
            "weight decay is coupled in Adam: bits differ, time and memory are AdamW's",
        )
    elif name not in OPTIMIZERS:
        sheet.refuse("optimizer.name", f"a plan has {', '.join(OPTIMIZERS)}; state and time of others differ.")
    own = OPTIMIZERS.get(name, "adamw")
    sheet.put("optimizer.name", own, "optimizer.name")
    if own == "sgd":
        sheet.put("optimizer.momentum", 0.0, "optimizer.name")  # torch's default: torchtitan names no other
    else:
        betas = [float(sheet.value(f"optimizer.beta{number}")) for number in (1, 2)]
        sheet.put("optimizer.betas", betas, "optimizer.beta1", "optimizer.beta2")
    if own == "muon":
        sheet.put("optimizer.muon_scale", "original", "optimizer.name")  # torch's default, `adjust_lr_fn`
    for flag in ("optimizer.implementation", "optimizer.fused"):
        if sheet.value(flag) in ("fused", True):
            sheet.say(flag, "no-effect", "the fused kernel is modelled")
    if sheet.value("optimizer.early_step_in_backward") is False:
        sheet.say("optimizer.early_step_in_backward", "no-effect", "it is off")
    if sheet.value("parallelism.disable_loss_parallel") is False:
        sheet.say("parallelism.disable_loss_parallel", "no-effect", "it is off")


def _put_checkpoint(sheet: Sheet) -> None:
    flags = ("checkpoint.folder", "checkpoint.interval", "checkpoint.keep_latest_k")
    if not sheet.value("checkpoint.enable"):
        for flag in ("checkpoint.enable", "checkpoint.async_mode", *flags):
            sheet.say(flag, "no-effect", "no checkpoints are written")
        return
    folder, every, keep = (sheet.value(flag) for flag in flags)
    sheet.put("checkpoint.folder", folder or "checkpoint", "checkpoint.folder", "checkpoint.enable")
    sheet.put("checkpoint.every", every, "checkpoint.interval")
    if keep > 0:
        sheet.put("checkpoint.keep", keep, "checkpoint.keep_latest_k")
    if sheet.value("checkpoint.async_mode") in (None, "disabled"):
        sheet.say("checkpoint.async_mode", "no-effect", "a checkpoint lies between steps")
