"""Windows, sinks, the scale of scores and what rotary positions turn, in Megatron-Bridge's dumped configurations."""

from __future__ import annotations

from .megatron_attention import NO_PATTERN, plan_pattern
from .megatron_experts import layer_pattern
from .table import Sheet


def put_windows(sheet: Sheet) -> None:
    """The window, and which layers have it."""
    if (window := sheet.value("model.window_size")) is None:
        return
    if len(window) != 2 or not isinstance(window[0], int) or window[0] < 0:
        sheet.refuse("model.window_size", "a window is two numbers, of tokens before and behind.")
        return
    sheet.put("model.sliding_window", window[0] + 1, "model.window_size")
    _put_pattern(sheet, "model.window_attn_skip_freq", "model.window_layers", ones_have=True)


def put_scores(sheet: Sheet) -> None:
    """What scores are multiplied by, and what the softmax is of."""
    if (scale := sheet.value("model.softmax_scale")) is not None:
        sheet.put("model.attention_scale", float(scale), "model.softmax_scale")
    match sheet.value("model.softmax_type"):
        case "learnable":
            sheet.put("model.attention_sinks", True, "model.softmax_type")
        case "off-by-one":
            sheet.refuse("model.softmax_type", "a plan's sinks are learnable.")


def put_latent(sheet: Sheet) -> None:
    """Norms and biases of latent attention: of the low-rank vectors, and of the output product alone."""
    sheet.say("model.add_qkv_bias", "no-effect", "projections of latent attention have no bias")
    normed = sheet.value("model.qk_layernorm")
    why = "a plan's latent attention always norms its low-rank vectors"
    sheet.say("model.qk_layernorm", "no-effect" if normed else "not-modelled", why)
    if sheet.value("model.add_bias_linear"):
        for name in ("attention_output_bias", "mlp_bias"):
            sheet.put(f"model.{name}", True, "model.add_bias_linear")


def put_turned(sheet: Sheet, head_dim: int) -> None:
    """Which features and which layers rotary positions turn."""
    share = sheet.value("model.rotary_percent")
    if share < 1 and sheet.value("model.multi_latent_attention"):
        sheet.refuse("model.rotary_percent", "the rotary part of latent attention turns as a whole.")
    elif share < 1:
        sheet.put("model.rope_dim", int(head_dim * share), "model.rotary_percent")
    _put_pattern(sheet, "model.no_rope_freq", "model.rope_layers", ones_have=False)


def _put_pattern(sheet: Sheet, flag: str, key: str, *, ones_have: bool) -> None:
    if (value := sheet.value(flag)) is None:
        return
    found = layer_pattern(value) if isinstance(value, str) else value
    pattern = plan_pattern(found, sheet.value("model.num_layers"), ones_have=ones_have)
    if pattern is None:
        sheet.refuse(flag, f"{NO_PATTERN}.")
    else:
        sheet.put(key, pattern, flag)
