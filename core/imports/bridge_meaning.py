"""Megatron-Bridge's dumped configurations (`run_config.yaml`): the whole ConfigContainer, model and all. `_target_`
names classes and functions, of which only the name is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.errors import FileError
from ..model.expert_layers import pattern_of
from .account import Imported, Request
from .bridge_attention import put_latent, put_scores, put_turned, put_windows
from .bridge_layout import put_layout
from .bridge_numbers import put_batch, put_numbers
from .bridge_rates import put_rates
from .bridge_table import TABLE, YARN, YARN_ROUNDS
from .table import Sheet
from .written import parse_yaml, settings_of

_FUNCTIONS = {
    "silu": ("swiglu", None),
    "gelu": ("geglu", "gelu"),
    "fast_gelu": ("geglu_tanh", "gelu_tanh"),
    "quick_gelu": ("quick_geglu", None),
    "squared_relu": (None, "relu_squared"),
}
"""Activation -> that of the plan, gated and not."""

_M = "model."


def account(request: Request) -> Imported:
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
    put_layout(sheet, request.num_devices)
    put_batch(sheet)
    put_numbers(sheet)
    sheet.put_same()
    put_rates(sheet)
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
        put_latent(sheet)
    else:
        if sheet.value("model.add_qkv_bias"):
            sheet.put("model.qkv_bias", True, "model.add_qkv_bias")
        sheet.put("model.bias", sheet.value("model.add_bias_linear"), "model.add_bias_linear")
        sheet.put("model.qk_norm", sheet.value("model.qk_layernorm"), "model.qk_layernorm")
        sheet.put("model.num_kv_heads", sheet.value("model.num_query_groups") or heads, "model.num_query_groups")
        sheet.put("model.head_dim", sheet.value("model.kv_channels") or width // max(1, heads), "model.kv_channels")
    put_windows(sheet)
    put_scores(sheet)
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
    if sheet.value("model.gated_linear_unit"):
        for flag, key in (("activation_func_clamp_value", "gate_limit"), ("glu_linear_offset", "gate_offset")):
            if sheet.value(_M + flag):
                sheet.put(f"model.{key}", float(sheet.value(_M + flag)), _M + flag)
    if sheet.value("model.layernorm_zero_centered_gamma"):
        sheet.put("model.norm_offset", 1.0, "model.layernorm_zero_centered_gamma")


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
    width, heads = sheet.value("model.hidden_size"), sheet.value("model.num_attention_heads")
    put_turned(sheet, sheet.value("model.kv_channels") or width // max(1, heads))
    mla = sheet.value("model.multi_latent_attention")
    if kind == "yarn" or (mla and sheet.value("model.rope_type") == "yarn"):
        _put_yarn(sheet, "model." if mla else "model.yarn_")
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


def _put_yarn(sheet: Sheet, prefix: str) -> None:
    """Puts the numbers of yarn, where the factor stretches at all."""
    if (sheet.value(f"{prefix}rotary_scaling_factor") or 1) == 1:
        return
    sheet.put("model.rope_scaling", "yarn", "model.rope_type", "model.position_embedding_type")
    for name, key in YARN.items():
        flag = f"{prefix}{name}"
        if sheet.value(flag) is not None:
            sheet.put(f"model.{key}", sheet.value(flag), flag)
    if prefix == "model.yarn_" and sheet.value(YARN_ROUNDS) is False:
        sheet.put("model.rope_truncate", False, YARN_ROUNDS)


def _put_experts(sheet: Sheet) -> None:
    width = sheet.value("model.moe_ffn_hidden_size") or sheet.value("model.ffn_hidden_size")
    sheet.put("model.num_experts", sheet.value("model.num_moe_experts"), "model.num_moe_experts")
    sheet.put("model.experts_per_token", sheet.value("model.moe_router_topk"), "model.moe_router_topk")
    sheet.put("model.expert_ffn_hidden_size", width, "model.moe_ffn_hidden_size")
    shared = sheet.value("model.moe_shared_expert_intermediate_size") or 0
    if shared:
        whole = bool(width) and shared % width == 0
        flag = "model.moe_shared_expert_intermediate_size"
        sheet.put("model.num_shared_experts", shared // width if whole else 1, flag)
        if not whole:
            sheet.put("model.shared_expert_ffn_hidden_size", shared, flag)
        if sheet.value("model.moe_shared_expert_gate"):
            sheet.put("model.shared_expert_gate", True, "model.moe_shared_expert_gate")
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
    if sheet.value("model.add_bias_linear"):  # megatron/core/transformer/moe/router.py, since core 0.15
        sheet.put("model.router_bias", True, "model.add_bias_linear")
    _put_dense_layers(sheet)


def _put_dense_layers(sheet: Sheet) -> None:
    """Puts which layers have experts."""
    layers, given = sheet.value("model.num_layers"), sheet.value("model.moe_layer_freq")
    if given == 1:
        return
    pattern, found = given, None
    if isinstance(given, int) and given > 0:
        pattern = [int(layer % given == 0) for layer in range(layers)]
    if isinstance(pattern, list) and len(pattern) == layers and all(each in (0, 1) for each in pattern):
        found = pattern_of([layer for layer, moe in enumerate(pattern) if moe], layers)
    if found is None:
        why = "every n-th layer after the first dense ones has experts in a plan (model.expert_layer_step)."
        sheet.refuse("model.moe_layer_freq", why)
        return
    for key, value, usual in zip(("first_dense_layers", "expert_layer_step"), found, (0, 1), strict=True):
        if value != usual:
            sheet.put(f"model.{key}", value, "model.moe_layer_freq")
