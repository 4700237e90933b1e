"""accelerate's YAML configurations (`accelerate config`): FSDP, plain data parallelism, and DeepSpeed's settings in it.
Model and batches come from options."""

from __future__ import annotations

from .account import Imported, Request
from .table import Kind, Row, Sheet, index, quiet
from .written import yaml_settings

_TEXT: Kind = (str, int)
_LAUNCH = "how processes are started; no step changes"
_WRAP = "layers are gathered one by one, which is what wrapping by layer means"

_FSDP = "fsdp_config"
_MESH = "parallelism_config"

TABLE = index(
    Row("num_processes", "mapped", "cluster.num_devices", default=1, kind=int),
    Row("num_machines", "mapped", "cluster.num_devices", default=1, kind=int),
    Row("distributed_type", "mapped", "layout.zero", default="NO", kind=(str, bool)),
    Row("mixed_precision", "mapped", "precision.dtype", default="no", kind=(str, bool)),
    Row("gradient_accumulation_steps", "mapped", "batch.global", default=1, kind=(int, str)),
    Row("gradient_clipping", "mapped", "optimizer.clip_grad_norm", kind=(int, float)),
    Row("use_cpu", "mapped", None, default=False, kind=bool),
    Row(f"{_FSDP}.fsdp_sharding_strategy", "mapped", "layout.zero", default="FULL_SHARD", kind=_TEXT),
    Row(f"{_FSDP}.fsdp_reshard_after_forward", "mapped", "layout.zero", default=None, kind=(bool, str, int)),
    Row(f"{_FSDP}.fsdp_offload_params", "mapped", None, default=False, kind=bool),
    Row(f"{_FSDP}.fsdp_activation_checkpointing", "mapped", "recompute.mode", default=False, kind=bool),
    Row(f"{_FSDP}.fsdp_version", "mapped", "runtime.profile", default=1, kind=int),
    Row("dynamo_config.dynamo_backend", "mapped", "runtime.compile", default="NO", kind=str),
    Row("dynamo_backend", "mapped", "runtime.compile", default="NO", kind=str),
    *(
        Row(f"{_MESH}.parallelism_config_{name}_size", "mapped", key, default=1, kind=int)
        for name, key in (
            ("dp_replicate", "layout.dp, data_parallel.shard"),
            ("dp_shard", "layout.dp, layout.zero"),
            ("tp", "layout.tp"),
            ("cp", "layout.cp"),
        )
    ),
    *quiet(
        _MESH,
        "parallelism_config_cp_comm_strategy parallelism_config_sp_size",
        "how ranks of one sequence exchange",
        "not-modelled",
    ),
    *quiet(
        _FSDP,
        "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params "
        "fsdp_transformer_cls_names_to_wrap",
        _WRAP,
    ),
    *quiet(
        _FSDP,
        "fsdp_backward_prefetch fsdp_backward_prefetch_policy fsdp_forward_prefetch fsdp_limit_all_gathers",
        "the next layer is gathered under this one, as modelled",
    ),
    *quiet(
        _FSDP,
        "fsdp_cpu_ram_efficient_loading fsdp_state_dict_type fsdp_sync_module_states fsdp_use_orig_params "
        "fsdp_ignored_modules",
        "how weights are loaded and saved; no step changes",
    ),
    Row("compute_environment", "no-effect", None, "where it runs", kind=str),
    *quiet(
        "",
        "machine_rank main_training_function main_process_ip main_process_port rdzv_backend same_network "
        "tpu_env tpu_name tpu_zone "
        "tpu_use_cluster tpu_use_sudo tpu_config.* debug enable_cpu_affinity command_file commands gpu_ids "
        "use_mps_device "
        "fsdp_launch main_process_socket_ifname num_cpu_threads_per_process mpirun_config.* additional_args",
        _LAUNCH,
    ),
    *quiet(
        "",
        "tpu_config mpirun_config dynamo_config fsdp_config deepspeed_config megatron_lm_config ipex_config",
        "it is empty",
    ),
    *(
        Row(name, "not-modelled", why=why, plain=(off, None))
        for name, off, why in (
            ("downcast_bf16", "no", "activations and weights in bf16 on TPUs"),
            ("ipex", False, "Intel's extension"),
        )
    ),
    *quiet(
        "",
        "ipex_config.* fp8_config.* dynamo_config.* cluster_config.* aws_config.*",
        "it is not modelled in this grain",
        "not-modelled",
    ),
    Row("deepspeed_config.zero_stage", "mapped", "layout.zero", default=2, kind=int),
    Row("deepspeed_config.gradient_accumulation_steps", "mapped", "batch.global", default=1, kind=(int, str)),
    Row(
        "deepspeed_config.gradient_clipping", "mapped", "optimizer.clip_grad_norm", default=None, kind=(int, float, str)
    ),
    Row("deepspeed_config.offload_optimizer_device", "mapped", "offload.optimizer", default="none", kind=str),
    Row("deepspeed_config.offload_param_device", "mapped", None, default="none", kind=str),
    Row(
        "deepspeed_config.deepspeed_config_file",
        "refused",
        None,
        "the settings are in that file: import it, with --devices",
        kind=str,
    ),
    *quiet(
        "deepspeed_config",
        "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter "
        "deepspeed_inclusion_filter zero3_init_flag "
        "zero3_save_16bit_model seq_parallel_communication_data_type deepspeed_moe_layer_cls_names "
        "offload_optimizer_nvme_path offload_param_nvme_path",
        _LAUNCH,
    ),
    Row("megatron_lm_config.megatron_lm_tp_degree", "mapped", "layout.tp", default=1, kind=int),
    Row("megatron_lm_config.megatron_lm_pp_degree", "mapped", "layout.pp", default=1, kind=int),
    Row("megatron_lm_config.megatron_lm_num_micro_batches", "mapped", "batch.global", default=1, kind=int),
    Row(
        "megatron_lm_config.megatron_lm_gradient_clipping",
        "mapped",
        "optimizer.clip_grad_norm",
        default=1.0,
        kind=(int, float),
    ),
    Row("megatron_lm_config.megatron_lm_recompute_activations", "mapped", "recompute.mode", default=False, kind=bool),
    Row(
        "megatron_lm_config.megatron_lm_sequence_parallelism",
        "mapped",
        "layout.sequence_parallel",
        default=False,
        kind=bool,
    ),
    Row("megatron_lm_config.megatron_lm_use_distributed_optimizer", "mapped", "layout.zero", default=False, kind=bool),
)
"""Settings of accelerate (commands/config/config_args.py and utils/dataclasses.py of v1.10), by dotted name."""

_STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
_NUMBERED = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_DTYPES = {"no": "fp32", "false": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
_DEVICES_PER_NODE = 8


def account(request: Request) -> Imported:
    """The account of a configuration. Raises `PlanError` for a text that is none, and `MissingExtraError` without
    PyYAML."""
    sheet = Sheet(TABLE, yaml_settings(request.text, request.source), request.source, "accelerate")
    sheet.assumed.append(
        "model, sequence and batches are not in the file: --model, --sequence, --micro-batch, --global-batch."
    )
    sheet.put("cluster.preset", "dgx-h100")
    sheet.assumed.append("hardware is not in the file: dgx-h100 is assumed; --cluster names another.")
    _put_layout(sheet, request.num_devices)
    _put_rest(sheet)
    return sheet.imported("accelerate", "")


def _put_layout(sheet: Sheet, num_devices: int | None) -> None:
    kind = str(sheet.value("distributed_type") or "NO").upper()  # YAML reads NO as false
    zero = {
        "FSDP": None,
        "DEEPSPEED": sheet.value("deepspeed_config.zero_stage"),
        "MULTI_GPU": 0,
        "NO": 0,
        "MEGATRON_LM": 0,
    }
    if kind not in zero:
        sheet.refuse("distributed_type", "FSDP, MULTI_GPU, DEEPSPEED, MEGATRON_LM and NO are read.")
        return
    devices = num_devices or sheet.value("num_processes")
    if devices < 1:
        sheet.refuse("num_processes", "there is one process at least.")
        return
    sheet.put("cluster.num_devices", devices, "num_processes")
    if sheet.value("num_machines") > 1:
        sheet.say(
            "num_machines",
            "not-modelled",
            f"nodes have as many devices as the cluster says, {_DEVICES_PER_NODE} in dgx-h100",
        )
    else:
        sheet.say("num_machines", "no-effect", "one node")
    tp, cp = (sheet.value(f"{_MESH}.parallelism_config_{axis}_size") for axis in ("tp", "cp"))
    pp = 1
    if kind == "MEGATRON_LM":
        tp, pp = (sheet.value(f"megatron_lm_config.megatron_lm_{axis}_degree") for axis in ("tp", "pp"))
        sheet.put(
            "layout.sequence_parallel",
            sheet.value("megatron_lm_config.megatron_lm_sequence_parallelism") and tp > 1,
            "megatron_lm_config.megatron_lm_sequence_parallelism",
        )
    if min(tp, cp, pp) < 1 or devices % (tp * cp * pp):
        sheet.refuse("num_processes", f"{devices} processes are no multiple of the other degrees, {tp * cp * pp}.")
        return
    for axis, degree in (("tp", tp), ("cp", cp), ("pp", pp)):
        if degree > 1:
            sheet.put(f"layout.{axis}", degree)
    dp = devices // (tp * cp * pp)
    sheet.put("layout.dp", dp, "num_processes")
    stage = zero[kind] if kind != "FSDP" else _zero_of_fsdp(sheet)
    if kind == "MEGATRON_LM" and sheet.value("megatron_lm_config.megatron_lm_use_distributed_optimizer"):
        stage = 1
    if stage is None or not 0 <= stage <= 3:
        sheet.refuse("deepspeed_config.zero_stage", "ZeRO has the stages 0 to 3.")
        return
    stage = stage if dp * cp > 1 else 0
    sheet.put("layout.zero", stage, "distributed_type")
    _put_hybrid(sheet, kind, dp, cp, stage)
    sheet.put("runtime.profile", _profile(sheet, kind, stage), f"{_FSDP}.fsdp_version")


def _profile(sheet: Sheet, kind: str, stage: int) -> str:
    if kind == "MEGATRON_LM":
        return "megatron-te"
    if kind == "DEEPSPEED":
        return "deepspeed-zero3" if stage == 3 else "fsdp"
    return "torchtitan" if kind == "FSDP" and sheet.value(f"{_FSDP}.fsdp_version") == 2 else "fsdp"


def _strategy(sheet: Sheet) -> str:
    """The name of a strategy that is said by name or number."""
    given = str(sheet.value(f"{_FSDP}.fsdp_sharding_strategy")).upper()
    return _NUMBERED[int(given) - 1] if given.isdecimal() and 1 <= int(given[:3]) <= len(_NUMBERED) else given


def _zero_of_fsdp(sheet: Sheet) -> int:
    flag = f"{_FSDP}.fsdp_sharding_strategy"
    reshard = sheet.value(f"{_FSDP}.fsdp_reshard_after_forward")
    if isinstance(reshard, bool) and not sheet.is_written(flag):
        return 3 if reshard else 2
    name = str(reshard) if isinstance(reshard, str) and not sheet.is_written(flag) else _strategy(sheet)
    if (stage := _STRATEGIES.get(name.upper())) is None:
        sheet.refuse(flag, f"strategies are {', '.join(_STRATEGIES)}.")
        return 3
    return stage


def _put_hybrid(sheet: Sheet, kind: str, dp: int, cp: int, stage: int) -> None:
    """Puts how many ranks share parameters, where not all do: those of a node, or as the mesh says."""
    replicate = sheet.value(f"{_MESH}.parallelism_config_dp_replicate_size")
    if kind != "FSDP" or not stage:
        return
    if replicate > 1 and dp % replicate == 0:
        sheet.put("data_parallel.shard", dp // replicate * cp, f"{_MESH}.parallelism_config_dp_replicate_size")
    elif _strategy(sheet).startswith("HYBRID") and dp % _DEVICES_PER_NODE == 0 and dp > _DEVICES_PER_NODE:
        sheet.put("data_parallel.shard", _DEVICES_PER_NODE, f"{_FSDP}.fsdp_sharding_strategy")


def _put_rest(sheet: Sheet) -> None:
    written = str(sheet.value("mixed_precision")).lower()
    if (dtype := _DTYPES.get(written)) is None:
        sheet.refuse("mixed_precision", f"formats are {', '.join(_DTYPES)}.")
    else:
        sheet.put("precision.dtype", dtype, "mixed_precision")
    checkpointed = sheet.value(f"{_FSDP}.fsdp_activation_checkpointing")
    megatron = sheet.value("megatron_lm_config.megatron_lm_recompute_activations")
    if checkpointed or megatron:
        sheet.put("recompute.mode", "full" if checkpointed else "selective", f"{_FSDP}.fsdp_activation_checkpointing")
    compiled = [str(sheet.value(flag)).upper() for flag in ("dynamo_config.dynamo_backend", "dynamo_backend")]
    if any(each not in ("NO", "FALSE") for each in compiled):
        sheet.put("runtime.compile", True, "dynamo_config.dynamo_backend", "dynamo_backend")
    if sheet.value("use_cpu"):
        sheet.refuse("use_cpu", "training on processors is not what is assumed: give --cluster, and leave it out.")
    else:
        sheet.say("use_cpu", "no-effect", "it is off")
    if sheet.value(f"{_FSDP}.fsdp_offload_params"):
        why = "parameters and state rest in host memory; a plan offloads Adam's moments alone"
        sheet.refuse(f"{_FSDP}.fsdp_offload_params", f"{why} (offload.optimizer).")
    else:
        sheet.say(f"{_FSDP}.fsdp_offload_params", "no-effect", "it is off")
    _put_deepspeed(sheet)
    for flag in ("gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps"):
        sheet.say(flag, "not-modelled", "the microbatches of a step follow from --global-batch and --micro-batch")
    sheet.say("megatron_lm_config.megatron_lm_num_micro_batches", "not-modelled", "it follows from --global-batch")
    for flag in ("gradient_clipping", "deepspeed_config.gradient_clipping"):
        if isinstance(sheet.value(flag), int | float):
            sheet.put("optimizer.clip_grad_norm", float(sheet.value(flag)), flag)


def _put_deepspeed(sheet: Sheet) -> None:
    device = sheet.value("deepspeed_config.offload_optimizer_device")
    if device == "cpu":
        sheet.put("offload.optimizer", 1.0, "deepspeed_config.offload_optimizer_device")
        why = "DeepSpeed updates weights on the host; modelled are moments that are brought to the device"
        sheet.say("deepspeed_config.offload_optimizer_device", "not-modelled", why)
    elif device not in ("none", None):
        sheet.refuse("deepspeed_config.offload_optimizer_device", "state on disks is not modelled (offload.optimizer).")
    if sheet.value("deepspeed_config.offload_param_device") not in ("none", None):
        why = "parameters in host memory or on disks: a plan offloads Adam's moments and activations alone"
        sheet.refuse("deepspeed_config.offload_param_device", f"{why} ([offload]).")
