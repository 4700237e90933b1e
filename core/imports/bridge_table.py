"""Settings of Megatron-Bridge's dumped configurations (`run_config.yaml`), by section and name.

Names are those of ConfigContainer and the classes in it: megatron/bridge/training/config.py, mixed_precision.py,
comm_overlap.py and models/gpt_provider.py over the history of Megatron-Bridge to 067f987, and megatron/core/
transformer/transformer_config.py, model_parallel_config.py, distributed/distributed_data_parallel_config.py and
optimizer/optimizer_config.py of Megatron-LM.
"""

from __future__ import annotations

from .table import Kind, Row, index, quiet, same, unless

_NUMBER: Kind = (int, float)
_WHOLE = "an int, or a part of the model"
_DRAWN = "how weights are drawn; no step changes"
_FUSED = "kernels are those of the profile"
_APART = "apart from a step: what is read, printed, checked and saved"
_LAYER = "our layers lack it"
_SENT = "how ranks exchange is the profile's"

MODEL = (
    same("model.num_layers", "model.num_layers", None, int),
    same("model.hidden_size", "model.hidden_size", None, int),
    Row("model.ffn_hidden_size", "mapped", "model.ffn_hidden_size", kind=int),
    same("model.num_attention_heads", "model.num_heads", None, int),
    Row("model.num_query_groups", "mapped", "model.num_kv_heads", kind=int),
    Row("model.kv_channels", "mapped", "model.head_dim", kind=int),
    Row("model.vocab_size", "mapped", "model.vocab_size", kind=int),
    Row("model.make_vocab_size_divisible_by", "mapped", "model.vocab_size", default=128, kind=int),
    Row("model.should_pad_vocab", "mapped", "model.vocab_size", default=False, kind=bool),
    Row("model.seq_length", "mapped", "batch.sequence", kind=int),
    Row("model.normalization", "mapped", "model.norm", default="LayerNorm", kind=str, choices=("LayerNorm", "RMSNorm")),
    same("model.layernorm_epsilon", "model.norm_eps", 1e-5, _NUMBER),
    Row("model.gated_linear_unit", "mapped", "model.activation", default=False, kind=bool),
    Row("model.activation_func", "mapped", "model.activation", default="gelu"),
    Row("model.position_embedding_type", "mapped", "model.position", default="learned_absolute", kind=str),
    Row("model.rotary_base", "mapped", "model.rope_theta", default=10000, kind=_NUMBER),
    Row("model.scale_factor", "mapped", "model.rope_factor", kind=_NUMBER),
    Row("model.low_freq_factor", "mapped", "model.rope_low_freq_factor", kind=_NUMBER),
    Row("model.high_freq_factor", "mapped", "model.rope_high_freq_factor", kind=_NUMBER),
    Row("model.old_context_len", "mapped", "model.rope_original_positions", kind=int),
    Row("model.rope_scaling", "mapped", "model.rope_scaling", default=False, kind=bool),
    Row("model.rope_scaling_factor", "mapped", "model.rope_factor", default=8.0, kind=_NUMBER),
    Row("model.rotary_scaling_factor", "mapped", "model.rope_factor", kind=_NUMBER),
    Row("model.original_max_position_embeddings", "mapped", "model.rope_original_positions", kind=int),
    Row("model.mscale", "mapped", "model.rope_mscale", kind=_NUMBER),
    Row("model.mscale_all_dim", "mapped", "model.rope_mscale_all_dim", kind=_NUMBER),
    Row("model.beta_fast", "mapped", "model.rope_beta_fast", kind=_NUMBER),
    Row("model.beta_slow", "mapped", "model.rope_beta_slow", kind=_NUMBER),
    Row("model.rope_type", "mapped", "model.rope_scaling", default="rope", kind=str),
    Row("model.share_embeddings_and_output_weights", "mapped", "model.tied_embeddings", default=True, kind=bool),
    same("model.add_bias_linear", "model.bias", True, bool),
    same("model.add_qkv_bias", "model.qkv_bias", False, bool),
    same("model.qk_layernorm", "model.qk_norm", False, bool),
    same("model.hidden_dropout", "model.hidden_dropout", 0.1, _NUMBER),
    same("model.attention_dropout", "model.attention_dropout", 0.1, _NUMBER),
    Row("model.window_size", "mapped", "model.sliding_window", kind=list),
    Row("model.multi_latent_attention", "mapped", "model.kv_lora_rank", default=False, kind=bool),
    Row("model.q_lora_rank", "mapped", "model.q_lora_rank", kind=int),
    Row("model.kv_lora_rank", "mapped", "model.kv_lora_rank", kind=int),
    Row("model.qk_head_dim", "mapped", "model.qk_nope_head_dim", kind=int),
    Row("model.qk_pos_emb_head_dim", "mapped", "model.qk_rope_head_dim", kind=int),
    Row("model.v_head_dim", "mapped", "model.v_head_dim", kind=int),
    Row("model.mtp_num_layers", "mapped", "model.num_mtp_layers", kind=int),
    Row("model.mtp_loss_scaling_factor", "mapped", "train.mtp_loss_weight", kind=_NUMBER),
    Row("model.num_moe_experts", "mapped", "model.num_experts", kind=int),
    Row("model.moe_router_topk", "mapped", "model.experts_per_token", default=2, kind=int),
    Row("model.moe_ffn_hidden_size", "mapped", "model.expert_ffn_hidden_size", kind=int),
    Row("model.moe_shared_expert_intermediate_size", "mapped", "model.num_shared_experts", kind=int),
    Row("model.moe_layer_freq", "mapped", "model.first_dense_layers", default=1, kind=(int, list, str)),
    Row(
        "model.moe_router_score_function",
        "mapped",
        "model.router_scores",
        default="softmax",
        kind=str,
        choices=("softmax", "sigmoid"),
    ),
    Row("model.moe_router_pre_softmax", "mapped", "model.normalized_router_weights", default=False, kind=bool),
    Row("model.moe_router_topk_scaling_factor", "mapped", "model.router_scaling", kind=_NUMBER),
    Row("model.moe_router_num_groups", "mapped", "model.num_router_groups", kind=int),
    Row("model.moe_router_group_topk", "mapped", "model.router_groups_per_token", kind=int),
    Row("model.moe_router_enable_expert_bias", "mapped", "model.expert_bias", default=False, kind=bool),
    Row("model.moe_router_bias_update_rate", "mapped", "train.expert_bias_rate", kind=_NUMBER),
    Row("model.moe_expert_capacity_factor", "mapped", "model.expert_capacity_factor", kind=_NUMBER),
    Row("model.moe_aux_loss_coeff", "mapped", "train.router_aux_loss", default=0.0, kind=_NUMBER),
    Row("model.moe_z_loss_coeff", "mapped", "train.router_z_loss", kind=_NUMBER),
    Row("model.moe_input_jitter_eps", "mapped", "train.router_jitter", kind=_NUMBER),
    *unless(
        "model",
        {
            "rotary_percent": 1.0,
            "layernorm_zero_centered_gamma": False,
            "apply_residual_connection_post_layernorm": False,
            "qk_l2_norm": False,
            "attention_output_gate": False,
            "softmax_type": "vanilla",
            "glu_linear_offset": 0.0,
            "activation_func_clamp_value": None,
            "window_attn_skip_freq": None,
            "no_rope_freq": None,
            "experimental_attention_variant": None,
            "linear_attention_freq": None,
            "is_hybrid_model": False,
            "heterogeneous_block_specs": False,
            "moe_shared_expert_gate": False,
            "moe_latent_size": None,
            "moe_apply_probs_on_input": False,
            "enable_mhc_connections": False,
            "use_mup": False,
            "mrope_section": None,
            "parallel_attention": False,
            "hybrid_layer_pattern": None,
            "hybrid_override_pattern": None,
            "use_vision_blocks": False,
            "vision_config": None,
        },
        _LAYER,
        "refused",
    ),
    *unless(
        "model",
        {
            "rotary_interleaved": False,
            "softmax_scale": None,
            "seq_len_interpolation_factor": None,
            "apply_query_key_layer_scaling": False,
            "attention_softmax_in_fp32": False,
            "fp32_residual_connection": False,
            "qk_clip": False,
            "moe_router_force_load_balancing": False,
            "moe_token_dropping": False,
            "moe_pad_expert_input_to_capacity": False,
            "moe_router_padding_for_fp8": False,
            "moe_router_padding_for_quantization": False,
            "moe_router_topk_limited_devices": None,
            "calculate_per_token_loss": False,
            "mtp_enabled": False,
            "mtp_use_repeated_layer": False,
            "fp8_wgrad": True,
            "fp8_dot_product_attention": False,
            "fp8_multi_head_attention": False,
            "fp8_output_proj": False,
            "first_last_layers_bf16": False,
            "fp4": None,
            "fp8_param": False,
            "use_kitchen": False,
            "deterministic_mode": False,
            "batch_invariant_mode": False,
            "moe_extended_tp": False,
            "moe_layer_recompute": False,
            "variable_seq_lengths": False,
            "use_ring_exchange_p2p": False,
            "test_mode": False,
            "num_microbatches_with_partial_activation_checkpoints": None,
            "fine_grained_activation_offloading": False,
            "cpu_offloading_weights": False,
            "delay_wgrad_compute": False,
            "defer_embedding_wgrad_compute": False,
            "quant_recipe": None,
            "enable_autocast": False,
            "symmetric_ar_type": None,
            "dense_grouped_gemm": False,
            "hybrid_context_parallel": False,
        },
        "a plan has no key for it",
    ),
)

LAYOUT = (
    Row("model.tensor_model_parallel_size", "mapped", "layout.tp", default=1, kind=int),
    Row("model.pipeline_model_parallel_size", "mapped", "layout.pp", default=1, kind=int),
    Row("model.virtual_pipeline_model_parallel_size", "mapped", "layout.vpp", kind=int),
    Row("model.context_parallel_size", "mapped", "layout.cp", default=1, kind=int),
    Row("model.expert_model_parallel_size", "mapped", "layout.ep", default=1, kind=int),
    Row("model.expert_tensor_parallel_size", "mapped", "layout.etp", kind=int),
    Row("model.sequence_parallel", "mapped", "layout.sequence_parallel", default=False, kind=bool),
    Row("model.pipeline_model_parallel_layout", "mapped", "layout.stages", kind=(str, list)),
    Row("model.num_layers_in_first_pipeline_stage", "mapped", "layout.stages", kind=int),
    Row("model.num_layers_in_last_pipeline_stage", "mapped", "layout.stages", kind=int),
    Row("model.account_for_embedding_in_pipeline_split", "mapped", "layout.stages", default=False, kind=bool),
    Row("model.account_for_loss_in_pipeline_split", "mapped", "layout.stages", default=False, kind=bool),
    Row("model.hierarchical_context_parallel_sizes", "mapped", "layout.cp_inner", kind=list),
    Row("model.cp_comm_type", "mapped", "runtime.context_parallel", default="p2p", kind=(str, list)),
    Row(
        "model.microbatch_group_size_per_vp_stage",
        "no-effect",
        None,
        "microbatches go in rounds of pp, as modelled",
        kind=int,
    ),
    Row("dist.use_tp_pp_dp_mapping", "mapped", "layout.order", default=False, kind=bool),
)

RUNTIME = (
    Row("model.recompute_granularity", "mapped", "recompute.mode", kind=str, choices=("full", "selective")),
    Row("model.recompute_method", "mapped", "recompute.num_layers", kind=str, choices=("uniform", "block")),
    Row("model.recompute_num_layers", "mapped", "recompute.num_layers", kind=int),
    Row("model.recompute_modules", "mapped", "recompute.modules", kind=list),
    Row("model.distribute_saved_activations", "mapped", "recompute.distribute", kind=bool),
    Row("model.cpu_offloading", "mapped", "offload.activations", default=False, kind=bool),
    Row("model.cpu_offloading_num_layers", "mapped", "offload.activations", default=0, kind=int),
    Row("model.tp_comm_overlap", "mapped", "runtime.tp_comm_overlap", kind=bool),
    Row("comm_overlap.tp_comm_overlap", "mapped", "runtime.tp_comm_overlap", kind=bool),
    Row("model.overlap_p2p_comm", "mapped", "runtime.p2p_overlap", kind=bool),
    Row("model.batch_p2p_comm", "mapped", "runtime.p2p_batched", kind=bool),
    Row("model.overlap_moe_expert_parallel_comm", "mapped", "runtime.ep_comm_overlap", default=False, kind=bool),
    Row("model.moe_token_dispatcher_type", "mapped", "runtime.dispatch_once", default="allgather", kind=str),
    Row("model.moe_enable_deepep", "mapped", "runtime.dispatch_once", default=False, kind=bool),
    Row("model.enable_cuda_graph", "mapped", "runtime.cuda_graphs", default=False, kind=bool),
    Row("model.external_cuda_graph", "mapped", "runtime.cuda_graphs", default=False, kind=bool),
    Row("model.cuda_graph_impl", "mapped", "runtime.cuda_graphs", default="none", kind=str),
    Row("model.tp_only_amax_red", "mapped", "runtime.amax_reduction", default=False, kind=bool),
    Row("ddp.overlap_grad_reduce", "mapped", "data_parallel.overlap_grad_reduce", default=False, kind=bool),
    Row("ddp.overlap_param_gather", "mapped", "data_parallel.overlap_param_gather", default=False, kind=bool),
    Row("ddp.use_distributed_optimizer", "mapped", "layout.zero", default=False, kind=bool),
    Row("optimizer.use_distributed_optimizer", "mapped", "layout.zero", default=False, kind=bool),
    Row("ddp.grad_reduce_in_fp32", "mapped", "precision.gradient_dtype", default=False, kind=bool),
    Row("ddp.check_for_nan_in_grad", "mapped", "data_parallel.check_gradients", default=False, kind=bool),
    Row("ddp.num_distributed_optimizer_instances", "mapped", "data_parallel.shard", default=1, kind=int),
    Row("ddp.use_megatron_fsdp", "mapped", "runtime.profile", default=False, kind=bool),
    Row("ddp.use_custom_fsdp", "mapped", "runtime.profile", default=False, kind=bool),
    Row("dist.use_megatron_fsdp", "mapped", "runtime.profile", default=False, kind=bool),
    Row("dist.use_torch_fsdp2", "mapped", None, default=False, kind=bool),
    Row("ddp.data_parallel_sharding_strategy", "mapped", "layout.zero", default="no_shard", kind=str),
    Row("mixed_precision.bf16", "mapped", "precision.dtype", kind=bool),
    Row("mixed_precision.fp16", "mapped", "precision.dtype", kind=bool),
    Row("mixed_precision.fp8", "mapped", "precision.dtype", kind=str),
    Row("mixed_precision", "mapped", "precision.dtype", kind=str),
    Row("model.bf16", "mapped", "precision.dtype", default=False, kind=bool),
    Row("model.fp16", "mapped", "precision.dtype", default=False, kind=bool),
    Row("model.fp8", "mapped", "precision.dtype", kind=str),
)

TRAIN = (
    Row("train.micro_batch_size", "mapped", "batch.micro", default=1, kind=int),
    Row("train.global_batch_size", "mapped", "batch.global", kind=int),
    Row(
        "train.rampup_batch_size",
        "not-modelled",
        None,
        "steps grow; modelled are those of the whole batch",
        plain=(None,),
    ),
    Row("dataset.sequence_length", "mapped", "batch.sequence", kind=int),
    Row("dataset.seq_length", "mapped", "batch.sequence", kind=int),
    Row("train.train_iters", "mapped", "train.steps", kind=int),
    Row("rng.seed", "mapped", "train.seed", default=1234, kind=int),
    Row("optimizer.optimizer", "mapped", "optimizer.name", default="adam", kind=str),
    Row("optimizer.lr", "mapped", "train.learning_rate", kind=_NUMBER),
    Row("optimizer.adam_beta1", "mapped", "optimizer.betas", default=0.9, kind=_NUMBER),
    Row("optimizer.adam_beta2", "mapped", "optimizer.betas", default=0.999, kind=_NUMBER),
    same("optimizer.adam_eps", "optimizer.eps", 1e-8, _NUMBER),
    same("optimizer.weight_decay", "optimizer.weight_decay", 0.01, _NUMBER),
    same("optimizer.clip_grad", "optimizer.clip_grad_norm", 1.0, _NUMBER),
    Row("optimizer.optimizer_cpu_offload", "mapped", "offload.optimizer", default=False, kind=bool),
    Row("optimizer.optimizer_offload_fraction", "mapped", "offload.optimizer", default=1.0, kind=_NUMBER),
    *unless(
        "optimizer",
        {
            "use_precision_aware_optimizer": False,
            "decoupled_lr": None,
            "decoupled_weight_decay": True,
            "overlap_param_gather_with_optimizer_step": False,
        },
        "a plan has no key for it",
    ),
    Row("checkpoint.save", "mapped", "checkpoint.folder", kind=str),
    Row("checkpoint.save_interval", "mapped", "checkpoint.every", kind=int),
    Row("peft", "refused", None, "adapters train a part of the weights only", plain=(None,)),
    Row("peft.*", "refused", None, "adapters train a part of the weights only"),
)

REST = (
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
    *quiet(
        "",
        "optimizer.* scheduler.* mixed_precision.*",
        "weights may differ; time and memory are modelled as usual",
        "not-modelled",
    ),
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

TABLE = index(MODEL, LAYOUT, RUNTIME, TRAIN, REST)
"""Section and name -> row. `_target_` names classes, which are never made."""
