"""Settings of Megatron-Bridge's dumped configurations that no key of a plan says: kernels, exchanges, numbers of
features that are off, and what lies apart from a step; with the values that every dumped file has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .table import Row, quiet, unless

_DRAWN = "how weights are drawn; no step changes"
_FUSED = "kernels are those of the profile, whatever this says"
_APART = "apart from a step: what is read, printed, checked and saved"
_SENT = "how ranks exchange is the profile's, whatever this says"

_DETAILS = """
    mtp_detach_heads mtp_hsm mtp_hybrid_override_pattern experimental_attention_variant_loss_scale_func
    dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_skip_topk_offset
    dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_kernel_backend dsa_indexer_rope_interleaved
    dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32
    kitchen_attention_backend moe_hybridep_num_sms_preprocessing moe_hybridep_num_blocks_permute
    moe_hybridep_num_blocks_unpermute moe_dispatch_fwd_dtype moe_combine_bwd_dtype moe_router_quantile_balancing_ema
    mhc_num_residual_streams mhc_sinkhorn_iterations mhc_init_gating_factor mhc_recompute_layer_num
    batch_invariant_backend gdp_num_householder gdp_cutedsl_kernel gdp_num_chunk_states_to_recompute
    mamba_training_ssm_states_dtype offload_modules min_offloaded_tensor_size delay_offload_until_cuda_graph
    delta_offload_bytes_across_pp_ranks activation_offload_fraction fine_grained_offloading_max_inflight_offloads
    moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu
    gtp_remat_opt_in_modules cpu_offloading_retain_pinned_cpu_buffers
"""
"""Numbers of features that have a switch of their own, above."""

_INFERENCE = """
    inference_cuda_graph_scope nccl_all_reduce_for_prefill use_inference_optimized_layers
    inference_fuse_tp_communication inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
    inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type inference_disable_torch_grouped_mm
    moe_pad_experts_for_cuda_graph_inference max_position_embeddings moe_enable_routing_replay
"""

_ROWS = (
    *quiet("model", _DETAILS, "it counts with its feature only, which is a setting of its own"),
    *quiet("model", _INFERENCE, "of inference, or the longest sequence that the model may see"),
    *unless(
        "model",
        {
            "use_kitchen_attention": False,
            "use_grouped_gemm_for_shared_expert": False,
            "use_grouped_gemm_for_dense_mlp": False,
            "moe_shared_expert_glu_interleave_size": None,
            "moe_mlp_glu_interleave_size": None,
            "moe_router_force_biased": None,
            "moe_use_grouped_tensor": False,
            "moe_single_grouped_weight": False,
            "moe_single_grouped_bias": False,
            "moe_permute_fusion_into_hybridep": False,
            "moe_hybridep_pad_uneven_dispatch_inputs": False,
            "moe_ncclep_zero_copy": False,
            "moe_ncclep_static_shape": False,
            "moe_ncclep_use_symm_mem": False,
            "moe_expert_rank_capacity_factor": None,
            "moe_paged_stash": False,
            "mlp_chunks_for_training": 1,
            "tensor_parallel_num_weight_shards": None,
            "expert_tensor_parallel_num_weight_shards": None,
            "gtp_weight_remat_size": 1,
            "expert_gtp_weight_remat_size": 1,
            "max_seqlen_per_dp_cp_rank": None,
            "overlap_dispatch_backward_with_experts_wgrad": False,
            "mtp_standalone": False,
            "moe_grad_scale_func": None,
            "mtp_grad_scale_func": None,
            "pipeline_model_parallel_split_rank": None,
            "use_arbitrary_attention_mask": None,
        },
        "a plan has no key for it",
    ),
    *quiet(
        "model",
        "init_method init_method_std output_layer_init_method embedding_init_method "
        "embedding_init_method_std perform_initialization "
        "use_cpu_initialization init_model_with_meta_device mup_width_mult mup_base_hidden_size "
        "mup_embedding_mult mup_output_mult "
        "mup_base_head_dim mup_attn_scale_power",
        _DRAWN,
    ),
    *quiet(
        "model",
        "transformer_layer_spec transformer_impl attention_backend flash_attention_version "
        "apply_rope_fusion bias_activation_fusion "
        "bias_dropout_fusion bias_dropout_add_fusion masked_softmax_fusion persist_layer_norm "
        "memory_efficient_layer_norm "
        "fused_single_qkv_rope fused_residual_rmsnorm use_fused_weighted_squared_relu use_transformer_engine_op_fuser "
        "use_transformer_engine_full_layer_spec gradient_accumulation_fusion cross_entropy_loss_fusion "
        "cross_entropy_fusion_impl "
        "moe_grouped_gemm moe_use_legacy_grouped_gemm moe_permute_fusion moe_router_fusion moe_router_dtype "
        "use_te_activation_func "
        "activation_func_fp8_input_store disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache "
        "fp16_lm_cross_entropy logit_dtype parallel_output clone_scatter_output_in_embedding "
        "scatter_embedding_sequence_parallel "
        "deallocate_pipeline_outputs pipeline_dtype params_dtype autocast_dtype moe_shared_expert_overlap "
        "use_mamba_mem_eff_path "
        "mla_down_proj_fusion async_tensor_model_parallel_allreduce",
        _FUSED,
        "not-modelled",
    ),
    *quiet(
        "model",
        "tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs "
        "tp_comm_overlap_rs_dgrad tp_comm_split_ag "
        "tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 "
        "tp_comm_bootstrap_backend tp_comm_overlap_cfg batch_p2p_sync overlap_p2p_comm_warmup_flush "
        "wgrad_deferral_limit "
        "pipeline_model_parallel_comm_backend moe_flex_dispatcher_backend moe_deepep_num_sms "
        "moe_flex_dispatcher_num_sms "
        "moe_hybridep_num_sms cuda_graph_scope cuda_graph_modules cuda_graph_warmup_steps "
        "cuda_graph_use_single_mempool "
        "cuda_graph_retain_backward_graph cpu_offloading_activations cpu_offloading_double_buffering "
        "ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream moe_router_load_balancing_type "
        "moe_token_drop_policy",
        _SENT,
        "not-modelled",
    ),
    *quiet(
        "model",
        "fp8_recipe fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo "
        "fp8_quantizer_factory fp4_recipe fp4_param "
        "fp4_quantizer_factory num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
        "how operands are scaled is the profile's",
        "not-modelled",
    ),
    *quiet(
        "model",
        "timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func "
        "config_logger_dir barrier_with_L1_time "
        "moe_per_layer_logging hetereogenous_dist_checkpoint restore_modelopt_state hf_model_id "
        "hf_model_revision generation_config "
        "flash_decode inference_rng_tracker inference_sampling_seed use_te_rng_tracker mlp_chunks_for_prefill _target_ "
        "log_max_attention_logit bos_token_id eos_token_id pad_token_id mamba_state_dim mamba_head_dim "
        "mamba_num_groups mamba_num_heads "
        "qk_clip_alpha qk_clip_threshold cache_mla_latents linear_conv_kernel_dim linear_key_head_dim "
        "linear_value_head_dim "
        "linear_num_key_heads linear_num_value_heads",
        _APART,
    ),
    *quiet("model", "generation_config.* text_config.* hf_config.* timers.*", _APART),
    *quiet(
        "ddp",
        "bucket_size align_param_gather average_in_collective pad_buckets_for_high_nccl_busbw num_buckets "
        "nccl_ub fsdp_double_buffer "
        "fp8_param_gather fp4_param_gather keep_fp8_transpose_cache gradient_reduce_div_fusion "
        "suggested_communication_unit_size "
        "disable_symmetric_registration reuse_grad_buf_for_mxfp8_param_ag outer_dp_sharding_strategy "
        "delay_wgrad_compute "
        "preserve_fp32_weights check_for_large_grads reduce_scatter_with_fp32_accumulation",
        "buckets and buffers are the profile's",
        "not-modelled",
    ),
    *quiet("", "optimizer.*", "it counts with other optimizers, offloading or use_precision_aware_optimizer only"),
    *quiet("", "mixed_precision.*", "the same stands among the settings of model, ddp and optimizer"),
    *quiet("", "comm_overlap.* ddp.*", _SENT, "not-modelled"),
    *quiet("", "comm_overlap", _SENT),
    *quiet(
        "",
        "dataset.* tokenizer.* logger.* checkpoint.* rng.* rerun_state_machine.* dist.* straggler.* "
        "nvrx_straggler.* ft.* "
        "inprocess_restart.* profiling.* train.* tensor_inspect.* validation.*",
        _APART,
    ),
    *quiet(
        "",
        "ft inprocess_restart nvrx_straggler straggler profiling tensor_inspect rerun_state_machine "
        "_target_ dataset tokenizer "
        "optimizer_config_override_provider",
        _APART,
    ),
)

_USUAL: dict[str, tuple[Any, ...]] = {
    "model.apply_rope_fusion": (True, False),
    "model.attention_backend": ("auto", "megatron.core.transformer.enums.AttnBackend(5)"),
    "model.bias_activation_fusion": (True, False),
    "model.bias_dropout_fusion": (True, False),
    "model.bias_dropout_add_fusion": (True, False),
    "model.cross_entropy_loss_fusion": (True,),
    "model.cross_entropy_fusion_impl": ("native", "te"),
    "model.gradient_accumulation_fusion": (True,),
    "model.masked_softmax_fusion": (True,),
    "model.persist_layer_norm": (True, False),
    "model.parallel_output": (True,),
    "model.deallocate_pipeline_outputs": (True,),
    "model.clone_scatter_output_in_embedding": (True,),
    "model.scatter_embedding_sequence_parallel": (True,),
    "model.use_mamba_mem_eff_path": (True, False),
    "model.moe_grouped_gemm": (True, False),
    "model.moe_permute_fusion": (True, False),
    "model.moe_router_fusion": (True, False),
    "model.moe_router_dtype": ("fp32",),
    "model.params_dtype": ("torch.bfloat16", "torch.float16", "torch.float32"),
    "model.pipeline_dtype": ("torch.bfloat16", "torch.float16", "torch.float32"),
    "model.autocast_dtype": ("torch.bfloat16", "torch.float16", "torch.float32"),
    "model.transformer_impl": ("transformer_engine",),
    "model.transformer_layer_spec": ("megatron.bridge.models.gpt_provider.default_layer_spec",),
    "model.batch_p2p_sync": (True,),
    "model.cpu_offloading_activations": (True,),
    "model.cuda_graph_scope": ("full", []),
    "model.cuda_graph_use_single_mempool": (True, False),
    "model.cuda_graph_warmup_steps": (3,),
    "model.moe_deepep_num_sms": (20,),
    "model.moe_hybridep_num_sms": (16,),
    "model.moe_flex_dispatcher_backend": ("deepep",),
    "model.moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "none"),
    "model.moe_token_drop_policy": ("probs",),
    "model.tp_comm_bootstrap_backend": ("nccl",),
    **{f"model.tp_comm_{name}": (True,) for name in ("bulk_dgrad", "bulk_wgrad", "overlap_ag", "overlap_rs")},
    **{f"model.tp_comm_split_{name}": (True,) for name in ("ag", "rs")},
    "model.wgrad_deferral_limit": (0,),
    "model.fp4_recipe": ("nvfp4",),
    "model.fp8_amax_compute_algo": ("most_recent", "max"),
    "model.fp8_amax_history_len": (1, 1024),
    "model.fp8_interval": (1,),
    "model.fp8_margin": (0,),
    "model.fp8_recipe": ("tensorwise", "delayed"),
    "model.num_layers_at_start_in_bf16": (0, 1),
    "model.num_layers_at_end_in_bf16": (0, 1),
    "ddp.average_in_collective": (True, False),
    "ddp.bucket_size": (40000000,),
    "ddp.gradient_reduce_div_fusion": (True,),
    "ddp.outer_dp_sharding_strategy": ("no_shard",),
    "ddp.preserve_fp32_weights": (True,),
}
"""Values that every dumped file has, where it is not false or null: those that the profiles of Megatron are of, and
defaults of what is off."""


def _with_usual(row: Row) -> Row:
    """A setting of kernels and exchanges, which says nothing where it has its usual value."""
    if row.status != "not-modelled" or row.plain is not None or row.flag.endswith("*"):
        return row
    usual = (None, *_USUAL.get(row.flag, (False,)))
    return replace(row, plain=usual, plain_why="its usual value, as modelled")


REST = tuple(map(_with_usual, _ROWS))
"""The rows, each with its usual values."""
