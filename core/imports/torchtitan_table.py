"""Every setting of torchtitan from February 2024 to August 2026 (v0.1.0 to v0.2.2 and what lay before and after), and
what becomes of it in a plan.

Names, types and defaults are those of torchtitan/config_manager.py, config/job_config.py and config/configs.py over the
history of its main branch, read at b5bcd76; a setting goes by its name in v0.2.2, the last release with TOML, and
`torchtitan_apart.SPELLINGS` has the names that it had before and after.
"""

from __future__ import annotations

from dataclasses import replace

from .table import Row, index, quiet, same
from .torchtitan_apart import APART
from .torchtitan_rates import ROWS

_WEIGHTS = "weights and data are read or written by the plan's own [train] and [checkpoint]; no step changes"
_LIBRARY = "kernels are chosen by the profile"

_DEGREES = (
    Row("parallelism.data_parallel_replicate_degree", "mapped", "layout.dp, data_parallel.shard", default=1, kind=int),
    Row("parallelism.data_parallel_shard_degree", "mapped", "layout.dp, layout.zero", default=-1, kind=int),
    Row("parallelism.tensor_parallel_degree", "mapped", "layout.tp, layout.sequence_parallel", default=1, kind=int),
    Row("parallelism.context_parallel_degree", "mapped", "layout.cp", default=1, kind=int),
    Row("parallelism.pipeline_parallel_degree", "mapped", "layout.pp", default=1, kind=int),
    Row("parallelism.expert_parallel_degree", "mapped", "layout.ep", default=1, kind=int),
    Row("parallelism.expert_tensor_parallel_degree", "mapped", "layout.etp", default=1, kind=int),
    Row(
        "parallelism.fsdp_reshard_after_forward",
        "mapped",
        "layout.zero",
        default="default",
        kind=str,
        choices=("default", "always", "never"),
    ),
    Row("training.data_parallel_type", "mapped", "layout.zero", default="fsdp", kind=str, choices=("fsdp", "ddp")),
    Row("parallelism.enable_sequence_parallel", "mapped", "layout.sequence_parallel", default=True, kind=bool),
    Row("parallelism.enable_async_tensor_parallel", "mapped", "runtime.tp_comm_overlap", default=False, kind=bool),
    Row(
        "parallelism.context_parallel_rotate_method",
        "mapped",
        "runtime.context_parallel",
        default="allgather",
        kind=str,
        choices=("allgather", "alltoall"),
    ),
    Row(
        "parallelism.context_parallel_load_balancer",
        "mapped",
        "layout.cp",
        "chunks of a sequence are dealt head and tail, as ours are",
        default="headtail",
        kind=str,
    ),
    Row(
        "parallelism.expert_parallel_comm_backend",
        "mapped",
        "runtime.dispatch_once",
        default="standard",
        kind=str,
        choices=("standard", "deepep", "hybridep", "minimal_async_ep"),
    ),
    Row(
        "parallelism.disable_loss_parallel",
        "not-modelled",
        None,
        "true gathers the logits over tensor-parallel ranks before the loss, which takes time and memory; the plan "
        "cuts the loss as torchtitan does by default",
        default=False,
        kind=bool,
    ),
    Row(
        "training.enable_loss_parallel",
        "not-modelled",
        None,
        "false gathers the logits before the loss; modelled is a loss that is cut",
        default=True,
        kind=bool,
        plain=(True,),
        plain_why="the loss is cut, as modelled",
    ),
)

_PIPELINE = (
    Row("parallelism.pipeline_parallel_schedule", "mapped", "schedule.name", default="1F1B", kind=str),
    Row("parallelism.pipeline_parallel_schedule_csv", "mapped", "schedule.file", default=None, kind=str),
    Row("parallelism.pipeline_parallel_microbatch_size", "mapped", "batch.micro", default=1, kind=int),
    Row("parallelism.pipeline_parallel_microbatches", "mapped", "batch.micro", default=None, kind=int),
    Row("parallelism.num_pp_microbatches", "mapped", "batch.micro", default=None, kind=int),
    Row(
        "parallelism.pipeline_parallel_split_points",
        "mapped",
        "layout.vpp, layout.stages",
        default=[],
        kind=(list, str),
    ),
    Row("parallelism.module_fqns_per_model_part", "mapped", "layout.vpp, layout.stages", default=None, kind=list),
    Row("parallelism.pipeline_parallel_layers_per_stage", "mapped", "layout.vpp", default=None, kind=int),
    Row("parallelism.pipeline_parallel_first_stage_less_layers", "mapped", "layout.stages", default=1, kind=int),
    Row("parallelism.pipeline_parallel_last_stage_less_layers", "mapped", "layout.stages", default=1, kind=int),
    Row(
        "parallelism.pipeline_parallel_split_mode",
        "no-effect",
        None,
        "manual cuts are all that releases have",
        kind=str,
    ),
    Row(
        "parallelism.pipeline_parallel_expert_parallel_overlap",
        "mapped",
        "runtime.ep_comm_overlap",
        "it counts for DualPipeV only",
        default=True,
        kind=bool,
    ),
)

_TRAINING = (
    Row("training.local_batch_size", "mapped", "batch.micro, batch.global", default=8, kind=int),
    Row("training.global_batch_size", "mapped", "batch.global", default=-1, kind=int),
    Row("training.num_tokens_per_microbatch_per_dp_rank", "mapped", "batch.micro", default=None, kind=int),
    Row("training.num_tokens_per_train_step", "mapped", "batch.global", default=None, kind=int),
    same("training.seq_len", "batch.sequence", 2048, int),
    same("training.steps", "train.steps", 10000, int),
    same("training.max_norm", "optimizer.clip_grad_norm", 1.0, (float, int)),
    same("debug.seed", "train.seed", None, int),
    same("optimizer.lr", "train.learning_rate", 0.0008, (float, int)),
    same("optimizer.eps", "optimizer.eps", 1e-8, (float, int)),
    same("optimizer.weight_decay", "optimizer.weight_decay", 0.1, (float, int)),
    Row("optimizer.beta1", "mapped", "optimizer.betas", default=0.9, kind=(float, int)),
    Row("optimizer.beta2", "mapped", "optimizer.betas", default=0.95, kind=(float, int)),
    Row("optimizer.name", "mapped", "optimizer.name", default="AdamW", kind=str),
    Row("optimizer.param_groups", "not-modelled", None, "groups of parameters with rates of their own", kind=list),
    Row(
        "optimizer.early_step_in_backward",
        "not-modelled",
        None,
        "each parameter is updated in the backward and its gradient freed: less memory than is modelled",
        default=False,
        kind=bool,
    ),
    Row("training.enable_cpu_offload", "mapped", None, default=False, kind=bool),
    Row(
        "training.mixed_precision_param",
        "mapped",
        "precision.dtype",
        default="bfloat16",
        kind=str,
        choices=("bfloat16", "float16", "float32"),
    ),
    Row(
        "training.mixed_precision_reduce",
        "mapped",
        "precision.gradient_dtype",
        default="float32",
        kind=str,
        choices=("float32", "bfloat16"),
    ),
    Row("training.dtype", "mapped", "precision.dtype", default="float32", kind=str, choices=("bfloat16", "float32")),
    Row("training.disable_cuda_graphs", "mapped", "runtime.cuda_graphs", default=None, kind=bool),
    *ROWS,
    *quiet(
        "training",
        "dataset dataset_path",
        "which text is learned is said by train.data; time and memory do not change",
        "not-modelled",
    ),
    *quiet(
        "training.dataloader", "num_workers persistent_workers pin_memory prefetch_factor", "text is read during a step"
    ),
    *quiet("training", "gc_freq gc_debug", "Python's garbage collection; milliseconds every so many steps"),
    *quiet(
        "training",
        "classifer_free_guidance_prob classifier_free_guidance_prob guidance img_size test_mode",
        "of image models",
    ),
)

_MODEL = (
    Row("model.name", "mapped", "model.preset", default="llama3", kind=str),
    Row("model.flavor", "mapped", "model.preset", default="debugmodel", kind=str),
    Row("model.converters", "mapped", "precision.dtype, precision.scaling", default=[], kind=(list, str)),
    Row(
        "model.norm_type",
        "mapped",
        "model.norm",
        default="rmsnorm",
        kind=str,
        choices=("rmsnorm", "fused_rmsnorm", "compiled_rmsnorm", "layernorm", "np_layernorm"),
    ),
    Row("model.use_flex_attn", "mapped", "runtime.attention", default=False, kind=bool),
    Row("model.attn_mask_type", "mapped", None, default="causal", kind=str, choices=("causal", "block_causal")),
    Row("hf_transformers.model", "mapped", "model.config", default=None, kind=str),
    Row("experimental.custom_import", "mapped", None, default="", kind=str),
    Row("experimental.custom_args_module", "mapped", None, default="", kind=str),
    Row("job.custom_config_module", "mapped", None, default="", kind=str),
    Row("experimental.custom_model_path", "mapped", None, default="", kind=str),
    *quiet("model", "hf_assets_path print_after_conversion", _WEIGHTS),
    Row("model.tokenizer_path", "no-effect", None, "the size of the vocabulary is the flavor's", kind=str),
    *quiet(
        "data",
        "max_images_per_batch max_patches_per_image packing_buffer_size patch_size spatial_merge_size",
        "of images",
    ),
    *quiet(
        "encoder",
        "auto_encoder_path autoencoder_path clip_encoder max_t5_encoding_len t5_encoder random_init",
        "of image models",
    ),
    *quiet(
        "eval",
        "classifer_free_guidance_scale classifier_free_guidance_scale denoising_steps enable_classifer_free_guidance "
        "enable_classifier_free_guidance eval_freq save_img_folder",
        "of image models",
    ),
    *quiet("inference", "local_batch_size prompts_path save_img_folder img_size", "of image models"),
)

_RECOMPUTED = (
    Row(
        "activation_checkpoint.mode",
        "mapped",
        "recompute.mode",
        default="selective",
        kind=str,
        choices=("selective", "full", "memory_budget", "none"),
    ),
    Row(
        "activation_checkpoint.selective_ac_option",
        "mapped",
        "recompute.mode, recompute.layers",
        default="2",
        kind=(str, int),
    ),
    Row(
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
        "no-effect",
        None,
        "products of routers, which are small, are computed again",
        kind=list,
    ),
    Row("activation_checkpoint.early_stop", "no-effect", None, "modelled as torch does by default", kind=bool),
    *quiet("activation_checkpoint", "memory_budget", "it counts in memory_budget mode only"),
    *quiet(
        "activation_checkpoint",
        "visualize_memory_budget_pareto preserve_rng_state determinism_check debug",
        "checks and random states; without dropout no bit changes",
    ),
)

_COMPILED = (
    Row("compile.enable", "mapped", "runtime.compile, runtime.fused_loss", default=False, kind=bool),
    Row("compile.components", "mapped", "runtime.compile, runtime.fused_loss", default=["model", "loss"], kind=list),
    *quiet(
        "compile", "backend", "how the compiler writes kernels is not modelled, but that it fuses them", "not-modelled"
    ),
    *quiet(
        "compile", "model_backend_override graph_passes joint_passes passes", "passes of experiments", "not-modelled"
    ),
    *quiet(
        "experimental",
        "enable_compiled_autograd comms_bucket_reorder_strategy torch_spmd",
        "of experiments",
        "not-modelled",
    ),
)

_F8, _MX = "quantize.linear.float8", "quantize.linear.mx"
_NARROW = (
    Row(
        f"{_F8}.recipe_name",
        "mapped",
        "precision.scaling",
        default=None,
        kind=str,
        choices=("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"),
    ),
    Row(f"{_F8}.enable_float8_linear", "mapped", "precision.dtype", default=False, kind=(bool, str)),
    Row(f"{_F8}.enable_fsdp_float8_all_gather", "mapped", "precision.scaling", default=False, kind=bool),
    *quiet(_F8, "precompute_float8_dynamic_scale_for_fsdp", "scales of all weights in one kernel, as modelled"),
    *quiet(
        _F8,
        "filter_fqns",
        "products that stay in bf16; modelled are all of the layers in 8 bits, and the head in bf16",
        "not-modelled",
    ),
    *quiet(_F8, "emulate", "products of 8 bits are emulated where the device has none", "not-modelled"),
    *quiet(_F8, "force_recompute_fp8_weight_in_bwd", "weights in 8 bits are made again in the backward, as modelled"),
    *quiet(
        _F8,
        "scaling_type_input scaling_type_weight scaling_type_grad_output",
        "dynamic scaling is modelled; delayed is not",
        "not-modelled",
    ),
    Row(f"{_MX}.recipe_name", "mapped", "precision.scaling", default="mxfp8_cublas", kind=str),
    *quiet(_MX, "filter_fqns", "products that stay in bf16; modelled are all of the layers in 8 bits", "not-modelled"),
    *quiet(_MX, "fqns", "products in 8 bits; modelled are all of the layers", "not-modelled"),
    *quiet(_MX, "mxfp8_dim1_cast_kernel_choice use_fp8_dim1_cast_triton_kernel", _LIBRARY),
    *quiet(
        "quantize.grouped_mm",
        "float8.fqns mx.fqns mx.recipe_name float8.recipe_name float8.pad_multiple mx.pad_multiple",
        "products of experts in 8 bits go with those of the layers",
        "not-modelled",
    ),
)

_SAVED = (
    Row("checkpoint.enable", "mapped", "checkpoint.folder", default=False, kind=bool),
    Row("checkpoint.folder", "mapped", "checkpoint.folder", default="checkpoint", kind=str),
    Row("checkpoint.interval", "mapped", "checkpoint.every", default=500, kind=int),
    Row("checkpoint.keep_latest_k", "mapped", "checkpoint.keep", default=10, kind=int),
    Row("checkpoint.interval_type", "no-effect", None, "seconds between checkpoints are not steps", kind=str),
    *quiet("checkpoint", "async_mode", "how long a checkpoint keeps a step waiting is not predicted", "not-modelled"),
    *quiet(
        "checkpoint",
        "create_seed_checkpoint enable_first_step_checkpoint enable_ft_dataloader_checkpoints exclude_from_loading "
        "export_dtype initial_load_in_hf initial_load_in_hf_quantized initial_load_model_only "
        "initial_load_model_weights_only initial_load_path last_save_in_hf last_save_in_safetensors_format "
        "last_save_model_only last_save_model_weights_only load_only load_step model_weights_only",
        _WEIGHTS,
    ),
)


def _or_off(row: Row) -> Row:
    """A setting that is not modelled, and has no effect where it is false, empty or null."""
    if row.status != "not-modelled" or row.plain is not None or row.flag == "optimizer.fused" or row.default is True:
        return row
    return replace(row, plain=(False, None, [], ""))


_PARTS = (_DEGREES, _PIPELINE, _TRAINING, _MODEL, _RECOMPUTED, _COMPILED, _NARROW, _SAVED, APART)

TABLE = index(*(map(_or_off, rows) for rows in _PARTS))
"""Name in v0.2.2 -> row."""
