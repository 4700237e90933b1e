"""Megatron-Bridge's dumped configurations (`run_config.yaml`): the whole ConfigContainer, model and all. `_target_`
names classes and functions, of which only the name is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..base.bounds import DEVICES, LAYERS
from ..base.errors import FileError
from .account import Imported, Request
from .bridge_table import TABLE
from .table import Sheet
from .written import parse_yaml, settings_of

_FUNCTIONS = {
    "silu": ("swiglu", None),
    "gelu": ("geglu", "gelu"),
    "fast_gelu": (None, "gelu_tanh"),
    "squared_relu": (None, "relu_squared"),
}
"""Activation -> that of the plan, gated and not."""

_MODULES = {"layernorm": "norm"}
_CHUNKED = ("uniform",)
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_M = "model."

MOST = int(DEVICES.most)
"""The largest degree."""


def recognises(request: Request) -> bool:
    """Whether a YAML or JSON file is a dumped configuration of Megatron-Bridge."""
    return (
        request.source.endswith((".yaml", ".yml", ".json"))
        and "_target_" in request.text
        and "megatron.bridge" in request.text
    )


def read(request: Request) -> Imported:
    """The account of a dumped configuration. Raises `PlanError` for a text that is none, `MissingExtraError` without
    PyYAML."""
    tables, lines = parse_yaml(request.text, request.source)
    if not isinstance(tables.get("model"), Mapping) and not request.model:
        raise FileError(
            f"{request.source}: this file has no model. Give the run_config.yaml that a run dumps, or --model."
        )
    written = list(settings_of(_named(tables), lines, request.source))
    sheet = Sheet(TABLE, written, request.source, "Megatron-Bridge", takes_unknown_off=True)
    sheet.put("cluster.preset", "dgx-h100")
    sheet.assumed.append("hardware is not in the file: dgx-h100 is assumed; --cluster names another.")
    if request.model:
        for flag in [flag for flag in TABLE if flag.startswith(_M) and (TABLE[flag].key or "").startswith("model.")]:
            sheet.say(flag, "no-effect", "--model stands in its place")
    else:
        _put_model(sheet)
    _put_layout(sheet, request.num_devices)
    _put_batch(sheet)
    _put_numbers(sheet)
    sheet.put_same()
    if request.model:
        sheet.values.pop("model", None)
    return sheet.imported("bridge", "")


def _named(value: Any) -> Any:
    """Tables that make an object of a class, or name a function, become the name; classes of sections stay tables."""
    if not isinstance(value, Mapping):
        return value
    target = value.get("_target_")
    if isinstance(target, str) and {"_call_", "_args_", "_partial_"} & value.keys():
        arguments = value.get("_args_")
        return f"{target}({', '.join(map(str, arguments))})" if isinstance(arguments, list) and arguments else target
    return {name: _named(inner) for name, inner in value.items() if name != "_target_"}


def _put_model(sheet: Sheet) -> None:
    for flag in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if sheet.value(_M + flag) is None:
            sheet.lacks(_M + flag, None, "the model in the file lacks it: give a dumped configuration, or --model.")
    if sheet.is_refused:
        return
    heads, width = sheet.value("model.num_attention_heads"), sheet.value("model.hidden_size")
    sheet.put("model.name", "bridge")
    sheet.put("model.ffn_hidden_size", sheet.value("model.ffn_hidden_size") or 4 * width, "model.ffn_hidden_size")
    sheet.put("model.norm", sheet.value("model.normalization").lower(), "model.normalization")
    sheet.put(
        "model.tied_embeddings",
        sheet.value("model.share_embeddings_and_output_weights"),
        "model.share_embeddings_and_output_weights",
    )
    _put_vocabulary(sheet)
    _put_activation(sheet)
    _put_positions(sheet)
    if sheet.value("model.multi_latent_attention"):
        for flag, key in (
            ("q_lora_rank", "q_lora_rank"),
            ("kv_lora_rank", "kv_lora_rank"),
            ("qk_head_dim", "qk_nope_head_dim"),
            ("qk_pos_emb_head_dim", "qk_rope_head_dim"),
            ("v_head_dim", "v_head_dim"),
        ):
            sheet.put(_M + key, sheet.value(_M + flag) or 0, _M + flag)
        sheet.put(
            "model.head_dim",
            sum(sheet.value(_M + flag) or 0 for flag in ("qk_head_dim", "qk_pos_emb_head_dim")),
            "model.qk_head_dim",
        )
        sheet.put("model.num_kv_heads", heads, "model.num_attention_heads")
    else:
        sheet.put("model.num_kv_heads", sheet.value("model.num_query_groups") or heads, "model.num_query_groups")
        sheet.put("model.head_dim", sheet.value("model.kv_channels") or width // max(1, heads), "model.kv_channels")
    window = sheet.value("model.window_size")
    if window is not None:
        if len(window) == 2 and isinstance(window[0], int) and window[0] >= 0:
            sheet.put("model.sliding_window", window[0] + 1, "model.window_size")
        else:
            sheet.refuse("model.window_size", "a window is two numbers, of tokens before and behind.")
    if sheet.value("model.mtp_num_layers"):
        sheet.put("model.num_mtp_layers", sheet.value("model.mtp_num_layers"), "model.mtp_num_layers")
        if sheet.value("model.mtp_loss_scaling_factor") is not None:
            sheet.put(
                "train.mtp_loss_weight",
                float(sheet.value("model.mtp_loss_scaling_factor")),
                "model.mtp_loss_scaling_factor",
            )
    if sheet.value("model.num_moe_experts"):
        _put_experts(sheet)


def _put_vocabulary(sheet: Sheet) -> None:
    """Rows of the token table: padded to whole multiples for each tensor-parallel rank where the file says so."""
    size = sheet.value("model.vocab_size")
    if sheet.value("model.should_pad_vocab"):
        step = sheet.value("model.make_vocab_size_divisible_by") * max(
            1, sheet.value("model.tensor_model_parallel_size")
        )
        padded = -(-size // step) * step
        sheet.put("model.padding_rows", padded - size, "model.should_pad_vocab")
        size = padded
    sheet.put("model.vocab_size", size, "model.vocab_size")


def _put_activation(sheet: Sheet) -> None:
    name = str(sheet.value("model.activation_func")).rpartition(".")[2]
    gated, plain = _FUNCTIONS.get(name, (None, None))
    chosen = gated if sheet.value("model.gated_linear_unit") else plain
    if chosen is None:
        how = "gated" if sheet.value("model.gated_linear_unit") else "plain"
        sheet.refuse("model.activation_func", f"a {how} {name} is none of model.activation.")
    else:
        sheet.put("model.activation", chosen, "model.activation_func", "model.gated_linear_unit")


def _put_positions(sheet: Sheet) -> None:
    kind = sheet.value("model.position_embedding_type")
    if kind == "learned_absolute":
        sheet.put("model.position", "learned", "model.position_embedding_type")
        return
    if kind not in ("rope", "yarn"):
        sheet.refuse("model.position_embedding_type", "positions are learned_absolute, rope or yarn.")
        return
    sheet.put("model.position", "rope", "model.position_embedding_type")
    sheet.put("model.rope_theta", float(sheet.value("model.rotary_base")), "model.rotary_base")
    mla, factor = sheet.value("model.multi_latent_attention"), sheet.value("model.rotary_scaling_factor")
    if factor and factor != 1 and (kind == "yarn" or (mla and sheet.value("model.rope_type") == "yarn")):
        sheet.put("model.rope_scaling", "yarn", "model.rope_type", "model.position_embedding_type")
        sheet.put("model.rope_factor", float(factor), "model.rotary_scaling_factor")
        for flag, key in (
            ("mscale", "rope_mscale"),
            ("mscale_all_dim", "rope_mscale_all_dim"),
            ("beta_fast", "rope_beta_fast"),
            ("beta_slow", "rope_beta_slow"),
            ("original_max_position_embeddings", "rope_original_positions"),
        ):
            if sheet.value(_M + flag) is not None:
                sheet.put(_M + key, sheet.value(_M + flag), _M + flag)
        return
    llama = sheet.value("model.scale_factor")
    if llama is None and not sheet.value("model.rope_scaling"):
        return
    sheet.put("model.rope_scaling", "llama3", "model.rope_scaling", "model.scale_factor")
    sheet.put(
        "model.rope_factor",
        float(llama or sheet.value("model.rope_scaling_factor")),
        "model.scale_factor",
        "model.rope_scaling_factor",
    )
    sheet.put("model.rope_original_positions", sheet.value("model.old_context_len") or 8192, "model.old_context_len")
    for flag in ("low_freq_factor", "high_freq_factor"):
        if sheet.value(_M + flag) is not None:
            sheet.put(f"model.rope_{flag}", float(sheet.value(_M + flag)), _M + flag)


def _put_experts(sheet: Sheet) -> None:
    width = sheet.value("model.moe_ffn_hidden_size") or sheet.value("model.ffn_hidden_size")
    sheet.put("model.num_experts", sheet.value("model.num_moe_experts"), "model.num_moe_experts")
    sheet.put("model.experts_per_token", sheet.value("model.moe_router_topk"), "model.moe_router_topk")
    sheet.put("model.expert_ffn_hidden_size", width, "model.moe_ffn_hidden_size")
    shared = sheet.value("model.moe_shared_expert_intermediate_size") or 0
    if shared and (not width or shared % width):
        sheet.refuse(
            "model.moe_shared_expert_intermediate_size",
            f"shared experts are as wide as the others, {width} each (model.num_shared_experts).",
        )
    elif shared:
        sheet.put("model.num_shared_experts", shared // width, "model.moe_shared_expert_intermediate_size")
    sheet.put("model.router_scores", sheet.value("model.moe_router_score_function"), "model.moe_router_score_function")
    normal = (
        not sheet.value("model.moe_router_pre_softmax") or sheet.value("model.moe_router_score_function") == "sigmoid"
    )
    sheet.put("model.normalized_router_weights", normal, "model.moe_router_pre_softmax")
    pairs = (
        ("moe_router_topk_scaling_factor", "model.router_scaling"),
        ("moe_router_num_groups", "model.num_router_groups"),
        ("moe_router_group_topk", "model.router_groups_per_token"),
        ("moe_router_enable_expert_bias", "model.expert_bias"),
        ("moe_router_bias_update_rate", "train.expert_bias_rate"),
        ("moe_expert_capacity_factor", "model.expert_capacity_factor"),
        ("moe_aux_loss_coeff", "train.router_aux_loss"),
        ("moe_z_loss_coeff", "train.router_z_loss"),
        ("moe_input_jitter_eps", "train.router_jitter"),
    )
    for flag, key in pairs:
        if sheet.value(_M + flag):
            sheet.put(key, sheet.value(_M + flag), _M + flag)
    _put_dense_layers(sheet)


def _put_dense_layers(sheet: Sheet) -> None:
    """Puts how many layers come before the first with experts."""
    layers, given = sheet.value("model.num_layers"), sheet.value("model.moe_layer_freq")
    if given == 1:
        return
    pattern = given if isinstance(given, list) else None
    if (
        pattern is None
        or any(each not in (0, 1) for each in pattern)
        or sorted(pattern) != pattern
        or len(pattern) != layers
    ):
        sheet.refuse(
            "model.moe_layer_freq",
            "a plan has dense layers first, then layers with experts (model.first_dense_layers).",
        )
    elif pattern.count(0):
        sheet.put("model.first_dense_layers", pattern.count(0), "model.moe_layer_freq")


def _put_layout(sheet: Sheet, num_devices: int | None) -> None:
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


def _put_batch(sheet: Sheet) -> None:
    sheet.put("batch.micro", sheet.value("train.micro_batch_size"), "train.micro_batch_size")
    if sheet.value("train.global_batch_size") is None:
        sheet.lacks("train.global_batch_size", "batch.global", "the file lacks it: give a dumped configuration.")
    else:
        sheet.put("batch.global", sheet.value("train.global_batch_size"), "train.global_batch_size")
    flags = ("dataset.sequence_length", "dataset.seq_length", "model.seq_length")
    sequence = next((sheet.value(flag) for flag in flags if sheet.value(flag)), None)
    if sequence is None:
        sheet.lacks("dataset.sequence_length", "batch.sequence", "nothing in the file says how long sequences are.")
    else:
        sheet.put("batch.sequence", sequence, *flags)
    if sheet.value("train.train_iters") is not None:
        sheet.put("train.steps", sheet.value("train.train_iters"), "train.train_iters")
    sheet.put("train.seed", sheet.value("rng.seed"), "rng.seed")
    if sheet.value("checkpoint.save"):
        sheet.put("checkpoint.folder", sheet.value("checkpoint.save"), "checkpoint.save")
        if sheet.value("checkpoint.save_interval"):
            sheet.put("checkpoint.every", sheet.value("checkpoint.save_interval"), "checkpoint.save_interval")


def _put_numbers(sheet: Sheet) -> None:
    _put_precision(sheet)
    _put_recompute(sheet)
    name = sheet.value("optimizer.optimizer")
    if name not in ("adam", "adamw"):
        sheet.refuse(
            "optimizer.optimizer", "a plan's optimizer is AdamW (optimizer.name); state and time of others differ."
        )
    betas = [float(sheet.value(f"optimizer.adam_beta{number}")) for number in (1, 2)]
    sheet.put("optimizer.betas", betas, "optimizer.adam_beta1", "optimizer.adam_beta2")
    if sheet.value("optimizer.lr") is not None:
        sheet.put("train.learning_rate", float(sheet.value("optimizer.lr")), "optimizer.lr")
    if sheet.value("optimizer.optimizer_cpu_offload"):
        sheet.put(
            "offload.optimizer",
            float(sheet.value("optimizer.optimizer_offload_fraction")),
            "optimizer.optimizer_offload_fraction",
        )
    if sheet.value("model.cpu_offloading"):
        sheet.put(
            "offload.activations", sheet.value("model.cpu_offloading_num_layers"), "model.cpu_offloading_num_layers"
        )
    overlap = [
        flag for flag in ("comm_overlap.tp_comm_overlap", "model.tp_comm_overlap") if sheet.value(flag) is not None
    ]
    if overlap:
        sheet.put("runtime.tp_comm_overlap", any(sheet.value(flag) for flag in overlap), *overlap)
    if sheet.value("model.pipeline_model_parallel_size") > 1 and sheet.value("model.overlap_p2p_comm") is not None:
        sheet.put("runtime.p2p_overlap", sheet.value("model.overlap_p2p_comm"), "model.overlap_p2p_comm")
        if not sheet.value("model.overlap_p2p_comm") and sheet.value("model.batch_p2p_comm") is not None:
            sheet.put("runtime.p2p_batched", sheet.value("model.batch_p2p_comm"), "model.batch_p2p_comm")
    if sheet.value("model.overlap_moe_expert_parallel_comm"):
        sheet.put("runtime.ep_comm_overlap", True, "model.overlap_moe_expert_parallel_comm")
    if sheet.value("model.moe_enable_deepep") or sheet.value("model.moe_token_dispatcher_type") == "flex":
        sheet.put("runtime.dispatch_once", True, "model.moe_enable_deepep", "model.moe_token_dispatcher_type")
    graphs = sheet.value("model.enable_cuda_graph") or sheet.value("model.external_cuda_graph")
    sheet.put(
        "runtime.cuda_graphs",
        bool(graphs or sheet.value("model.cuda_graph_impl") not in (None, "none")),
        "model.enable_cuda_graph",
        "model.cuda_graph_impl",
    )


def _put_precision(sheet: Sheet) -> None:
    recipe = sheet.value("mixed_precision")
    fp8 = (
        sheet.value("mixed_precision.fp8") or sheet.value("model.fp8") or (isinstance(recipe, str) and "fp8" in recipe)
    )
    fp16 = (
        sheet.value("mixed_precision.fp16")
        or sheet.value("model.fp16")
        or (isinstance(recipe, str) and "fp16" in recipe)
    )
    bf16 = (
        sheet.value("mixed_precision.bf16")
        or sheet.value("model.bf16")
        or (isinstance(recipe, str) and "bf16" in recipe)
    )
    dtype = "fp8" if fp8 else "bf16" if bf16 else "fp16" if fp16 else "fp32"
    sheet.put("precision.dtype", dtype, "mixed_precision.bf16", "mixed_precision.fp8", "model.bf16", "model.fp8")


def _put_recompute(sheet: Sheet) -> None:
    mode, number = sheet.value("model.recompute_granularity"), sheet.value("model.recompute_num_layers")
    if mode is None:
        for flag in ("method", "num_layers", "modules"):
            sheet.say(f"model.recompute_{flag}", "no-effect", "nothing is computed again")
        return
    sheet.put("recompute.mode", mode, "model.recompute_granularity")
    if mode == "selective":
        modules = [
            _MODULES.get(str(each), str(each)) for each in sheet.value("model.recompute_modules") or ["core_attn"]
        ]
        sheet.put("recompute.modules", modules, "model.recompute_modules")
    elif sheet.value("model.recompute_method") == "block" and number is not None:
        sheet.put("recompute.num_layers", number, "model.recompute_num_layers")
    elif number not in (None, 1):
        why = "several layers keep one input together, and are computed again together; modelled is one each"
        sheet.say("model.recompute_num_layers", "not-modelled", why)
    if sheet.value("model.distribute_saved_activations"):
        sheet.put("recompute.distribute", True, "model.distribute_saved_activations")
