"""Settings of torchtitan that lie apart from a step: what is printed, recorded, tried, debugged and waited for; and
other names that settings had before v0.2.2, and have since."""

from __future__ import annotations

from .table import Row, quiet

_WEIGHTS = "weights and data are read or written by the plan's own [train] and [checkpoint]; no step changes"
_PRINTS = "what is printed and recorded; no step changes"
_TIMEOUT = "how long a collective may take before the run ends; no step changes"
_F8, _MX = "quantize.linear.float8", "quantize.linear.mx"

PROFILING = (
    "enable_memory_snapshot enable_profiling memory_snapshot_freq memory_snapshot_max_entries profile_every_x_iter "
    "profile_freq profiler_active profiler_repeat profiler_skip_first profiler_skip_first_wait profiler_warmup "
    "run_profiler save_memory_snapshot_folder save_traces_folder trace_post_processor"
)

APART = (
    Row("comm.mode", "no-effect", None, "fake and local modes are for trying a configuration", kind=str),
    *quiet("comm", "init_timeout_seconds train_timeout_seconds timeout_seconds", _TIMEOUT),
    *quiet("comm", "save_traces_file_prefix save_traces_folder trace_buf_size", _PRINTS),
    Row("debug.deterministic", "not-modelled", None, "deterministic kernels, some of which are slower", kind=bool),
    *quiet(
        "debug",
        "deterministic_warn_only print_config save_config_file spmd_typechecking enable_structured_logging",
        _PRINTS,
    ),
    *quiet("debug", "detect_anomaly batch_invariant", "slower kernels, for debugging", "not-modelled"),
    *quiet("debug", "moe_force_load_balance", "experts are equally busy, as they are modelled"),
    *quiet("estimate", "memory mode", _PRINTS),
    *quiet("memory_estimation", "disable_fake_mode enable enabled", _PRINTS),
    Row("fault_tolerance.enable", "mapped", None, default=False, kind=bool),
    *quiet(
        "fault_tolerance",
        "fragment_sync_delay fragment_update_alpha group_size min_replica_size module_fqns_per_model_fragment "
        "num_fragments process_group process_group_timeout_ms replica_id semi_sync_method should_quantize sync_steps",
        "it counts with fault_tolerance.enable only",
    ),
    *quiet(
        "job",
        "config_file description dump_folder print_args print_config save_config_file save_config_folder "
        "use_for_integration_test",
        _PRINTS,
    ),
    *quiet("global", "dump_folder", _PRINTS),
    *quiet(
        "metrics",
        "disable_color_printing disable_logging_from_checkpoint enable_color_printing enable_tensorboard enable_wandb "
        "log_freq rank_0_only save_for_all_ranks save_tb_folder use_for_integration_test",
        _PRINTS,
    ),
    *quiet(
        "optimizer", "fused implementation", "which kernel updates weights; modelled is the fused one", "not-modelled"
    ),
    *quiet("profiling", PROFILING, _PRINTS),
    *quiet("training", "checkpoint_folder checkpoint_interval checkpoint_interval_type", _WEIGHTS),
    *quiet(
        "training",
        "enable_selective_ac",
        "before activation_checkpoint.mode; attention was computed again",
        "not-modelled",
    ),
    *quiet("parallelism", "spmd_backend full_dtensor", "how programs of ranks are written; one step is meant"),
    *quiet(
        "parallelism",
        "enable_fsdp_symm_mem",
        "gathers by copies instead of kernels, which take no multiprocessors",
        "not-modelled",
    ),
    *quiet("parallelism", "context_parallel_ptrr_mask_key", "it counts with the balancer ptrr"),
    *quiet(
        "parallelism",
        "hybridep_non_blocking_expert_capacity_factor",
        "room that experts have for tokens",
        "not-modelled",
    ),
    *quiet(
        "validation",
        "all_timesteps classifier_free_guidance_scale dataset dataset_path denoising_steps enable "
        "enable_classifier_free_guidance enabled freq local_batch_size save_img_count save_img_folder seq_len steps",
        "steps over held-out text lie between those that are predicted",
    ),
    *quiet(
        "validation.dataloader",
        "num_workers persistent_workers pin_memory prefetch_factor",
        "text is read during a step",
    ),
    *quiet("", "dump_folder hf_assets_path", _PRINTS),
    *quiet("", "loss", "the same loss, whole or in chunks: chunks keep fewer logits than is modelled", "not-modelled"),
    *quiet(
        "",
        "tokenizer dataloader validator metrics profiler profiling",
        "apart from a step: what is read, printed and tried",
    ),
    *quiet("", "override", "what is replaced in the model is not read", "not-modelled"),
    *quiet(
        "",
        "metrics.* profiling.* validation.* job.*",
        "no setting of torchtitan's releases, in a section of which none changes a step",
    ),
    *quiet("model_spec", "model.*", "the shape is that of the flavor, of which torchtitan makes these"),
    *quiet(
        "",
        "dataloader.* tokenizer.* loss.* validator.* override.*",
        "apart from a step: what is read, printed and tried",
    ),
)


def _moved(old: str, new: str, names: str) -> dict[str, str]:
    return {f"{old}.{name}": f"{new}.{name}" for name in names.split()}


_F8_NAMES = (
    "recipe_name enable_float8_linear enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp "
    "filter_fqns emulate force_recompute_fp8_weight_in_bwd scaling_type_input scaling_type_weight "
    "scaling_type_grad_output"
)
_MX_NAMES = "recipe_name filter_fqns mxfp8_dim1_cast_kernel_choice use_fp8_dim1_cast_triton_kernel"

SPELLINGS = {
    **_moved(
        "experimental",
        "parallelism",
        "context_parallel_degree context_parallel_rotate_method enable_async_tensor_parallel pipeline_parallel_degree "
        "pipeline_parallel_microbatches pipeline_parallel_schedule pipeline_parallel_schedule_csv "
        "pipeline_parallel_split_mode pipeline_parallel_split_points",
    ),
    **_moved(
        "training",
        "parallelism",
        "data_parallel_replicate_degree data_parallel_shard_degree tensor_parallel_degree pipeline_parallel_degree "
        "disable_loss_parallel fsdp_reshard_after_forward",
    ),
    "parallelism.enable_compiled_autograd": "experimental.enable_compiled_autograd",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.sequence_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.batch_size": "training.local_batch_size",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.warmup_pct": "lr_scheduler.warmup_pct",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "training.max_context_length": "training.seq_len",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.debug_moe_force_load_balance": "debug.moe_force_load_balance",
    "training.compile": "compile.enable",
    "compile.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "training.fp8_linear": f"{_F8}.enable_float8_linear",
    "training.enable_fp8_linear": f"{_F8}.enable_float8_linear",
    "training.enable_fsdp_fp8_all_gather": f"{_F8}.enable_fsdp_float8_all_gather",
    **_moved(
        "training", _F8, "enable_float8_linear enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp"
    ),
    **{f"training.float8_{name}": f"{_F8}.{name}" for name in _F8_NAMES.split() if name.startswith("scaling")},
    **_moved("float8", _F8, _F8_NAMES),
    **_moved("quantize.dense.float8", _F8, _F8_NAMES),
    **_moved("mx", _MX, _MX_NAMES),
    **_moved("quantize.dense.mx", _MX, _MX_NAMES),
    "float8.moe_fqns": "quantize.grouped_mm.float8.fqns",
    "float8.moe_fqns_prototype": "quantize.grouped_mm.float8.fqns",
    "mx.moe_fqns_prototype": "quantize.grouped_mm.mx.fqns",
    "quantize.moe.float8.fqns": "quantize.grouped_mm.float8.fqns",
    "quantize.moe.mx.fqns": "quantize.grouped_mm.mx.fqns",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "model_spec.name": "model.name",
    "model_spec.flavor": "model.flavor",
    **{f"profiler.{name}": f"profiling.{name}" for name in PROFILING.split()},
    "activation_checkpoint.force_recompute_mm_shapes_by_fqns": (
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"
    ),
}
"""Other names of settings, older and newer ones -> the name in the table."""
