"""The layout of a Megatron-Bridge configuration: degrees, stages, context parallelism, sharding."""

from __future__ import annotations

import math
from typing import Any

from ..base.bounds import DEVICES, LAYERS
from .table import Sheet

_M = "model."
MOST = int(DEVICES.most)
"""The largest degree."""

_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""data_parallel_sharding_strategy of Megatron's FSDP -> ZeRO stage."""


def put_layout(sheet: Sheet, num_devices: int | None) -> None:
    names = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
    )
    tp, pp, cp, ep = (sheet.value(_M + name) for name in names)
    if bad := [name for name, value in zip(names, (tp, pp, cp, ep), strict=True) if not 1 <= value <= MOST]:
        sheet.refuse(_M + bad[0], f"a degree is 1 to {MOST:,}.")
        return
    size = math.prod((tp, pp, cp))
    if num_devices is None or num_devices % size or not num_devices:
        said = (
            "say how many devices there are"
            if num_devices is None
            else f"--devices {num_devices} does not fit the degrees"
        )
        sheet.lacks("devices", "cluster.num_devices", f"{said}: --devices N, a multiple of tp*pp*cp={size}.")
        return
    dp = num_devices // size
    sheet.put("cluster.num_devices", num_devices)
    for axis, value, name in zip(("tp", "pp", "cp"), (tp, pp, cp), names, strict=False):
        sheet.put(f"layout.{axis}", value, _M + name)
    sheet.put("layout.dp", dp)
    if sheet.value("model.sequence_parallel"):
        sheet.put("layout.sequence_parallel", True, "model.sequence_parallel")
    if sheet.value("model.num_moe_experts"):
        sheet.put("layout.ep", ep, "model.expert_model_parallel_size")
        if sheet.value("model.expert_tensor_parallel_size") is not None:
            sheet.put(
                "layout.etp", sheet.value("model.expert_tensor_parallel_size"), "model.expert_tensor_parallel_size"
            )
    if sheet.value("dist.use_tp_pp_dp_mapping"):
        sheet.put("layout.order", "tp-cp-ep-pp-dp", "dist.use_tp_pp_dp_mapping")
    _put_contexts(sheet, cp)
    _put_stages(sheet, pp)
    _put_sharding(sheet, dp * cp)


def _put_contexts(sheet: Sheet, cp: int) -> None:
    how, inner = sheet.value("model.cp_comm_type"), sheet.value("model.hierarchical_context_parallel_sizes")
    if cp == 1:
        return
    if how == "a2a":
        sheet.put("layout.cp_inner", cp, "model.cp_comm_type")
    elif how == "a2a+p2p" and isinstance(inner, list) and len(inner) == 2 and isinstance(inner[0], int):
        sheet.put("layout.cp_inner", inner[0], "model.hierarchical_context_parallel_sizes")
    elif how in (None, "p2p", "all_gather"):
        sheet.put("runtime.context_parallel", "all_gather" if how == "all_gather" else "ring", "model.cp_comm_type")
    else:
        sheet.refuse("model.cp_comm_type", "keys and values go by p2p, all_gather, a2a, or a2a+p2p with two sizes.")


def _put_stages(sheet: Sheet, pp: int) -> None:
    vpp, layout = (
        sheet.value("model.virtual_pipeline_model_parallel_size") or 1,
        sheet.value("model.pipeline_model_parallel_layout"),
    )
    layers = sheet.value("model.num_layers") or 0
    if not 1 <= vpp <= LAYERS.most:
        sheet.refuse(
            "model.virtual_pipeline_model_parallel_size", "a rank has at least one stage, and no more than layers."
        )
        return
    if pp == 1 or not 0 <= layers <= LAYERS.most:  # the plan itself refuses that many layers
        return
    if layout is not None:
        text = layout if isinstance(layout, str) else "|".join(_cells(layout))
        stages = text.count("|") + 1
        sheet.put("layout.stages", text, "model.pipeline_model_parallel_layout")
        if isinstance(layout, list):
            vpp = max(1, stages // pp)
    first, last = (sheet.value(f"model.num_layers_in_{place}_pipeline_stage") for place in ("first", "last"))
    if (first or last) and layers and layout is None:
        _put_ends(sheet, pp, vpp, layers, first, last)
    for place, flag in (("E", "embedding"), ("L", "loss")):
        name = f"model.account_for_{flag}_in_pipeline_split"
        if sheet.value(name) and layout is None:
            sheet.refuse(name, f"write the cut as pipeline_model_parallel_layout, with {place} where the {flag} lies.")
    if vpp > 1:
        sheet.put("layout.vpp", vpp, "model.virtual_pipeline_model_parallel_size")
        sheet.put("schedule.name", "Interleaved1F1B", "model.virtual_pipeline_model_parallel_size")


def _cells(stages: list[Any]) -> list[str]:
    """The cells of a layout that is a list of lists of names (`embedding`, `decoder`, `mtp`, `loss`)."""
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    return [
        "".join(letters.get(str(name), "?") for name in stage) if isinstance(stage, list) else "?" for stage in stages
    ]


def _put_ends(sheet: Sheet, pp: int, vpp: int, layers: int, first: int | None, last: int | None) -> None:
    """Puts a cut in which the first and the last rank have layers of their own number."""
    ends = sum(each is not None for each in (first, last))
    rest, others = layers - (first or 0) - (last or 0), pp - ends
    if (
        others < 1
        or rest < 0
        or rest % others
        or any((each or 0) % vpp for each in (first, last, rest // max(1, others)))
    ):
        sheet.refuse(
            "model.num_layers_in_first_pipeline_stage", f"{layers} layers do not go evenly on the ranks in between."
        )
        return
    ranks = [
        first if first is not None else rest // others,
        *[rest // others] * (pp - 2),
        last if last is not None else rest // others,
    ]
    counts = [count // vpp for _ in range(vpp) for count in ranks]
    cells = "|".join("t" * count for count in counts)
    sheet.put(
        "layout.stages",
        f"E{cells}L",
        "model.num_layers_in_first_pipeline_stage",
        "model.num_layers_in_last_pipeline_stage",
    )


def _put_sharding(sheet: Sheet, copies: int) -> None:
    fsdp = any(sheet.value(flag) for flag in ("ddp.use_megatron_fsdp", "ddp.use_custom_fsdp", "dist.use_megatron_fsdp"))
    distributed = sheet.value("ddp.use_distributed_optimizer") or sheet.value("optimizer.use_distributed_optimizer")
    sheet.put("runtime.profile", "megatron-fsdp" if fsdp else "megatron-te", "ddp.use_megatron_fsdp")
    if sheet.value("dist.use_torch_fsdp2"):
        sheet.refuse("dist.use_torch_fsdp2", "torch's fully_shard under Megatron-Core is not modelled.")
    zero = 1 if distributed else 0
    if fsdp:
        strategy = sheet.value("ddp.data_parallel_sharding_strategy")
        if strategy not in _STRATEGIES:
            sheet.refuse("ddp.data_parallel_sharding_strategy", f"strategies are {', '.join(_STRATEGIES)}.")
        zero = _STRATEGIES.get(strategy, zero)
    sheet.put("layout.zero", zero, "ddp.use_distributed_optimizer", "ddp.data_parallel_sharding_strategy")
    instances = sheet.value("ddp.num_distributed_optimizer_instances") or 1
    if zero and instances > 1 and copies % instances == 0:
        sheet.put("data_parallel.shard", copies // instances, "ddp.num_distributed_optimizer_instances")
    sheet.put("data_parallel.overlap_grad_reduce", sheet.value("ddp.overlap_grad_reduce"), "ddp.overlap_grad_reduce")
    if zero:
        sheet.put(
            "data_parallel.overlap_param_gather", sheet.value("ddp.overlap_param_gather"), "ddp.overlap_param_gather"
        )
    sheet.put("data_parallel.check_gradients", sheet.value("ddp.check_for_nan_in_grad"), "ddp.check_for_nan_in_grad")
    sheet.put(
        "precision.gradient_dtype",
        "fp32" if sheet.value("ddp.grad_reduce_in_fp32") else "bf16",
        "ddp.grad_reduce_in_fp32",
    )
