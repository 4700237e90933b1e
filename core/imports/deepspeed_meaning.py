"""DeepSpeed's JSON configurations. The model, the sequence and what a trainer fills in ("auto") come from options."""

from __future__ import annotations

from typing import Any

from .account import Imported, Request
from .deepspeed_rates import ROWS, put_rates
from .table import Kind, Row, Sheet, index, quiet, unless
from .written import json_settings

_NUMBER: Kind = (int, float)
_AUTO = "auto"
"""What the Hugging Face trainer replaces by its own arguments."""

_LOGS = "what is printed and recorded; no step changes"
_PREFETCH = "how far ahead parameters are gathered is not modelled in this grain"

TABLE = index(
    Row("train_batch_size", "mapped", "batch.global", kind=int),
    Row("train_micro_batch_size_per_gpu", "mapped", "batch.micro", kind=int),
    Row("gradient_accumulation_steps", "mapped", "batch.global", kind=int),
    Row("gradient_clipping", "mapped", "optimizer.clip_grad_norm", default=0.0, kind=_NUMBER),
    Row("zero_optimization.stage", "mapped", "layout.zero", default=0, kind=int),
    Row("zero_optimization.overlap_comm", "mapped", "data_parallel.overlap_grad_reduce", kind=bool),
    Row("zero_optimization.offload_optimizer.device", "mapped", "offload.optimizer", default="none", kind=str),
    Row("zero_optimization.offload_param.device", "mapped", None, default="none", kind=str),
    Row("zero_optimization.cpu_offload", "mapped", "offload.optimizer", default=False, kind=bool),
    Row("zero_optimization.offload_optimizer.ratio", "mapped", "offload.optimizer", default=1.0, kind=_NUMBER),
    Row("zero_optimization.mics_shard_size", "mapped", "data_parallel.shard", default=-1, kind=int),
    Row("tensor_parallel.autotp_size", "mapped", "layout.tp", default=0, kind=int),
    Row("fp16.enabled", "mapped", "precision.dtype", default=False, kind=bool),
    Row("bf16.enabled", "mapped", "precision.dtype", default=False, kind=bool),
    Row("fp16.loss_scale", "mapped", "precision.loss_scale", default=0, kind=_NUMBER),
    Row("fp16.initial_scale_power", "mapped", "precision.initial_loss_scale", default=16, kind=int),
    Row("fp16.loss_scale_window", "mapped", "precision.loss_scale_window", default=1000, kind=int),
    Row("fp16.hysteresis", "mapped", "precision.loss_scale_hysteresis", default=2, kind=int),
    Row("fp16.min_loss_scale", "mapped", "precision.min_loss_scale", default=1, kind=_NUMBER),
    *quiet("fp16", "auto_cast consecutive_hysteresis fp16_master_weights_and_grads", "details of fp16", "not-modelled"),
    *quiet(
        "bf16",
        "immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
        "details of bf16",
        "not-modelled",
    ),
    Row("optimizer.type", "mapped", "optimizer.name", kind=str),
    Row("optimizer.params.lr", "mapped", "train.learning_rate", kind=_NUMBER),
    Row("optimizer.params.betas", "mapped", "optimizer.betas", default=[0.9, 0.999], kind=list),
    Row("optimizer.params.eps", "mapped", "optimizer.eps", default=1e-8, kind=_NUMBER),
    Row("optimizer.params.weight_decay", "mapped", "optimizer.weight_decay", default=0.0, kind=_NUMBER),
    *quiet(
        "optimizer",
        "params.torch_adam params.adam_w_mode params.bias_correction params.amsgrad legacy_fusion",
        "which kernel updates weights",
        "not-modelled",
    ),
    *ROWS,
    *quiet(
        "zero_optimization",
        "allgather_bucket_size allgather_partitions reduce_bucket_size reduce_scatter stage3_max_live_parameters "
        "stage3_max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold "
        "stage3_model_persistence_threshold sub_group_size max_live_parameters max_reuse_distance prefetch_bucket_size "
        "param_persistence_threshold use_all_reduce_for_fetch_params zero3_leaf_modules "
        "stage3_module_granularity_threshold",
        _PREFETCH,
        "not-modelled",
    ),
    *quiet(
        "zero_optimization",
        "contiguous_gradients round_robin_gradients",
        "gradients are copied as they come, as modelled",
    ),
    *quiet(
        "zero_optimization",
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "gather_16bit_weights_on_model_save "
        "load_from_fp32_weights elastic_checkpoint ignore_unused_parameters legacy_stage1 "
        "override_module_apply memory_efficient_linear "
        "log_trace_cache_warnings",
        "checkpoints and checks; no step changes",
    ),
    *unless(
        "zero_optimization",
        {
            "zero_hpz_partition_size": 1,
            "zero_quantized_weights": False,
            "zero_quantized_nontrainable_weights": False,
            "zero_quantized_gradients": False,
            "mics_hierarchical_params_gather": False,
            "cpu_offload_params": False,
            "cpu_offload_use_pin_memory": False,
        },
        "ZeRO++ and older names of offloading change what is sent, which a plan has no key for",
    ),
    *quiet(
        "zero_optimization",
        "offload_optimizer.* offload_param.* zenflow.*",
        "buffers of the copies to the host",
        "not-modelled",
    ),
    *quiet("zero_optimization", "cpu_offload_param", "parameters on the host", "not-modelled"),
    *quiet(
        "activation_checkpointing",
        "partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints "
        "synchronize_checkpoint_boundary profile",
        "it counts where the model calls DeepSpeed's own checkpointing; say what is computed again by --recompute",
        "not-modelled",
    ),
    *quiet(
        "",
        "prescale_gradients gradient_predivide_factor seq_parallel_communication_data_type graph_harvesting",
        "the order of factors",
        "not-modelled",
    ),
    Row("communication_data_type", "mapped", "precision.gradient_dtype", kind=str),
    *(
        Row(name, "not-modelled", why=why, plain=(off, None))
        for name, off, why in (
            ("sparse_gradients", False, "gradients of embeddings as rows"),
            ("fp32_allreduce", False, "gradients are added in fp32"),
            ("amp.enabled", False, "Apex's mixed precision"),
            ("torch_autocast.enabled", False, "autocast of torch"),
            ("use_node_local_storage", False, "checkpoints on the nodes"),
            ("zero_force_ds_cpu_optimizer", True, "the optimizer runs on the host, which is not modelled"),
            ("compile.enabled", False, "compiled kernels: say --set runtime.compile=true"),
            ("data_types.grad_accum_dtype", "fp32", "gradients are accumulated in another format"),
        )
    ),
    *quiet(
        "",
        "amp.* torch_autocast.* data_types.* compile.* elasticity.* data_efficiency.* curriculum_learning.* "
        "compression_training.* "
        "progressive_layer_drop.* sparse_attention.* eigenvalue.* hybrid_engine.* quantize_training.* "
        "pipeline.* checkpoint.* aio.* "
        "sequence_parallel.* tensor_parallel.* nebula.* autotuning.* weight_quantization.* zenflow.* "
        "sequence_parallel_size "
        "mixture_of_experts.* moe.*",
        "a feature of DeepSpeed that a plan has no key for",
        "not-modelled",
    ),
    *quiet(
        "",
        "load_universal_checkpoint checkpoint dump_state disable_allgather zero_allow_untested_optimizer "
        "seed dataloader_drop_last "
        "use_data_before_expert_parallel_ inference_batch_sizes",
        "what is checked and saved; no step changes",
    ),
    *quiet(
        "",
        "steps_per_print wall_clock_breakdown memory_breakdown tensorboard.* wandb.* csv_monitor.* comet.* "
        "monitor_config.* "
        "comms_logger.* comms_config.* _comment flops_profiler.* debug timers.*",
        _LOGS,
    ),
)
"""DeepSpeed's settings (docs/_pages/config-json.md and deepspeed/runtime/config.py of v0.16), by dotted name."""

_SHARED = {"adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam", "torchadam"}
_DTYPES = {"fp32": "fp32", "fp16": None, "bf16": "bf16", "bfp16": "bf16"}


def account(request: Request) -> Imported:
    """The account of a DeepSpeed JSON. Raises `PlanError` for a text that is none."""
    written = json_settings(request.text, request.source)
    auto = [each for each in written if each.value == _AUTO]
    sheet = Sheet(TABLE, [each for each in written if each.value != _AUTO], request.source, "DeepSpeed")
    _put_all(sheet, request)
    put_rates(sheet, filled_in=any(each.flag.startswith("scheduler.") for each in auto))
    for each in auto:
        sheet.leave(each, "auto: the trainer fills it in; options of the plan say it here")
    return sheet.imported("deepspeed", "")


def _put_all(sheet: Sheet, request: Request) -> None:
    sheet.assumed.append("the model and the sequence are not in the file: --model and --sequence name them.")
    stage = sheet.value("zero_optimization.stage")
    if not 0 <= stage <= 3:
        sheet.refuse("zero_optimization.stage", "ZeRO has the stages 0 to 3.")
        return
    sheet.put("layout.zero", stage, "zero_optimization.stage")
    profile = "deepspeed-zero3" if stage == 3 else "fsdp"
    sheet.put("runtime.profile", profile)
    sheet.assumed.append(
        f"kernels and overlap are those of the profile {profile}, the nearest to a plain loop under "
        f"DeepSpeed; --profile names another."
    )
    sheet.put("cluster.preset", "dgx-h100")
    sheet.assumed.append("hardware is not in the file: dgx-h100 is assumed; --cluster names another.")
    _put_batch(sheet, request.num_devices)
    _put_precision(sheet)
    _put_optimizer(sheet)
    _put_offload(sheet)
    if sheet.value("zero_optimization.overlap_comm") is not None and stage:
        sheet.put(
            "data_parallel.overlap_grad_reduce",
            sheet.value("zero_optimization.overlap_comm"),
            "zero_optimization.overlap_comm",
        )
    if sheet.value("zero_optimization.mics_shard_size") > 0 and stage:
        sheet.put(
            "data_parallel.shard", sheet.value("zero_optimization.mics_shard_size"), "zero_optimization.mics_shard_size"
        )


def _put_batch(sheet: Sheet, num_devices: int | None) -> None:
    """Puts devices, layout and batches: a step is accumulation steps times microbatches of all replicas."""
    whole, micro, times = (
        sheet.value(name)
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    for name, value in (
        ("train_batch_size", whole),
        ("train_micro_batch_size_per_gpu", micro),
        ("gradient_accumulation_steps", times),
    ):
        if value is not None and value < 1:
            sheet.refuse(name, "this is 1 at least.")
            return
    tp = max(1, sheet.value("tensor_parallel.autotp_size"))
    if num_devices is None and whole and micro and whole % (micro * (times or 1)) == 0:
        num_devices = tp * (whole // (micro * (times or 1)))
        sheet.assumed.append(
            f"as many devices as the batches of the file come out even for, {num_devices}; --devices says "
            f"another number."
        )
    if num_devices is None:
        sheet.lacks(
            "devices", "cluster.num_devices", "the file does not say how many devices there are: give --devices."
        )
        return
    dp, rest = divmod(num_devices, tp)
    if rest or not dp:
        sheet.refuse("tensor_parallel.autotp_size", f"--devices {num_devices} is no multiple of {tp}.")
        return
    sheet.put("cluster.num_devices", num_devices)
    sheet.put("layout.tp", tp, "tensor_parallel.autotp_size")
    sheet.put("layout.dp", dp)
    if micro is None and whole is not None:
        micro = max(1, whole // (dp * (times or 1)))
    if micro is None:
        micro = 1
        sheet.assumed.append(
            "a microbatch is one sequence, which the file does not say; --micro-batch and --global-batch do."
        )
    total = whole or micro * dp * (times or 1)
    sheet.put("batch.micro", micro, "train_micro_batch_size_per_gpu")
    sheet.put("batch.global", total, "train_batch_size", "gradient_accumulation_steps")
    if total % (micro * dp) or (times and whole and whole != micro * dp * times):
        sheet.refuse(
            "train_batch_size",
            f"{total} sequences are not {times or 'whole'} microbatches of {micro} on {dp} replicas.",
        )


def _put_precision(sheet: Sheet) -> None:
    dtype = "bf16" if sheet.value("bf16.enabled") else "fp16" if sheet.value("fp16.enabled") else "fp32"
    if dtype == "fp32" and not sheet.is_written("bf16.enabled", "fp16.enabled"):
        dtype = "bf16"
        sheet.assumed.append("the number format is not in the file: bf16 is taken; --dtype names another.")
    sheet.put("precision.dtype", dtype, "bf16.enabled", "fp16.enabled")
    names = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
    if dtype != "fp16":
        for name in names:
            sheet.say(f"fp16.{name}", "no-effect", "it counts in fp16 only")
    else:
        if sheet.value("fp16.loss_scale"):
            sheet.put("precision.loss_scale", float(sheet.value("fp16.loss_scale")), "fp16.loss_scale")
        sheet.put(
            "precision.initial_loss_scale",
            2.0 ** min(1000, sheet.value("fp16.initial_scale_power")),
            "fp16.initial_scale_power",
        )
        sheet.put("precision.loss_scale_window", sheet.value("fp16.loss_scale_window"), "fp16.loss_scale_window")
        sheet.put("precision.loss_scale_hysteresis", sheet.value("fp16.hysteresis"), "fp16.hysteresis")
        sheet.put("precision.min_loss_scale", float(max(1, sheet.value("fp16.min_loss_scale"))), "fp16.min_loss_scale")
    reduced = sheet.value("communication_data_type")
    if reduced is not None:
        if (known := _DTYPES.get(reduced)) is not None:
            sheet.put("precision.gradient_dtype", known, "communication_data_type")
        else:
            sheet.say("communication_data_type", "not-modelled", "gradients are reduced in another format")


def _put_optimizer(sheet: Sheet) -> None:
    sheet.put("optimizer.clip_grad_norm", float(sheet.value("gradient_clipping")), "gradient_clipping")
    name = sheet.value("optimizer.type")
    if name is None:
        return
    if name.lower().replace("_", "") not in _SHARED:
        sheet.refuse("optimizer.type", "only AdamW is read from this file; state and time of others differ.")
        return
    if name.lower() == "adam":
        sheet.say("optimizer.type", "mapped", "DeepSpeed's Adam decouples weight decay unless adam_w_mode is false")
    sheet.put("optimizer.name", "adamw", "optimizer.type")
    sheet.put(
        "optimizer.betas",
        [float(each) for each in _floats(sheet.value("optimizer.params.betas"))],
        "optimizer.params.betas",
    )
    sheet.put("optimizer.eps", float(sheet.value("optimizer.params.eps")), "optimizer.params.eps")
    sheet.put(
        "optimizer.weight_decay", float(sheet.value("optimizer.params.weight_decay")), "optimizer.params.weight_decay"
    )
    if sheet.value("optimizer.params.lr") is not None:
        sheet.put("train.learning_rate", float(sheet.value("optimizer.params.lr")), "optimizer.params.lr")


def _floats(values: list[Any]) -> list[float]:
    return [each for each in values if isinstance(each, int | float)]


def _put_offload(sheet: Sheet) -> None:
    optimizer, param = (sheet.value(f"zero_optimization.offload_{name}.device") for name in ("optimizer", "param"))
    if optimizer == "cpu" or sheet.value("zero_optimization.cpu_offload"):
        flag = "zero_optimization.offload_optimizer.device" if optimizer == "cpu" else "zero_optimization.cpu_offload"
        sheet.put("offload.optimizer", float(sheet.value("zero_optimization.offload_optimizer.ratio")), flag)
        sheet.say(
            flag,
            "not-modelled",
            "DeepSpeed updates weights on the host; modelled are moments that are brought to the device",
        )
    elif optimizer not in ("none", None):
        sheet.refuse(
            "zero_optimization.offload_optimizer.device",
            "state on disks is not modelled (offload.optimizer is host memory).",
        )
    if param not in ("none", None):
        why = "parameters in host memory or on disks: a plan offloads Adam's moments and activations alone"
        sheet.refuse("zero_optimization.offload_param.device", f"{why} ([offload]).")
