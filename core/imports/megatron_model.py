"""The flags of a Megatron command that describe the network."""

from __future__ import annotations

from dataclasses import dataclass

from .megatron_attention import read_sinks, read_windows
from .megatron_experts import read_experts
from .megatron_flags import UNDER
from .megatron_positions import read_positions
from .megatron_reading import Reading
from .megatron_vocabulary import read_vocabulary


@dataclass(frozen=True)
class Model:
    """What the layout's flags need to know of the network; None is not known."""

    num_layers: int | None
    is_moe: bool


def read_model(reading: Reading) -> Model:
    """Fills [model]."""
    rows = {row.key: reading.put_row(row) for row in UNDER[""] if row.key.startswith("model.")}
    layers, hidden, heads = (rows[f"model.{name}"] for name in ("num_layers", "hidden_size", "num_heads"))
    for flag, key in (
        ("--num-layers", "num_layers"),
        ("--hidden-size", "hidden_size"),
        ("--num-attention-heads", "num_heads"),
    ):
        reading.require(flag, f"model.{key}")
    _activation(reading, hidden)
    _attention(reading, hidden, heads)
    read_windows(reading, layers)
    read_sinks(reading)
    width = reading.integer("--kv-channels") or (hidden // heads if hidden and heads else None)
    read_positions(reading, layers, width)
    read_vocabulary(reading)
    is_moe = read_experts(reading, layers, hidden)
    if (spec := reading.text("--spec")) is not None and ("gpt" in spec.lower() or spec == "local"):
        reading.say("--spec", "not-modelled", "which modules a layer is made of is that of the profile")
    if (modules := reading.integer("--mtp-num-layers")) is not None:
        reading.put("model.num_mtp_layers", modules, "--mtp-num-layers")
        if modules:
            for row in UNDER["--mtp-num-layers"]:
                reading.put_row(row)
    return Model(layers, is_moe)


def _activation(reading: Reading, hidden: int | None) -> None:
    """Activation, MLP width, norm."""
    gates = (reading.text("--glu-activation") or "").lower()
    fuses = not reading.given("--no-bias-gelu-fusion") and not reading.given("--disable-bias-linear")
    if reading.given("--swiglu") or gates == "swiglu":
        flag, activation = ("--swiglu" if reading.is_written("--swiglu") else "--glu-activation"), "swiglu"
    elif gates == "geglu":
        flag, activation = "--glu-activation", "geglu"
    elif gates:
        flag, activation = "--glu-activation", ""
        reading.say(flag, "refused", "a plan's gates are swiglu and geglu", "model.activation")
    elif reading.given("--squared-relu"):
        flag, activation = "--squared-relu", "relu_squared"
    elif reading.given("--quick-geglu"):
        flag, activation = "--quick-geglu", "quick_geglu"
    elif reading.given("--openai-gelu"):
        flag, activation = "--openai-gelu", "gelu_tanh"
    else:
        flag, activation = "--no-bias-gelu-fusion", "gelu_tanh" if fuses else "gelu"
    if activation:
        reading.put("model.activation", activation, flag)
    _gate(reading, gated="glu" in activation)
    width = reading.integer("--ffn-hidden-size")
    if width is None and hidden is not None and not reading.is_written("--ffn-hidden-size"):
        width = (
            hidden * 4 * 2 // 3 // 64 * 64 if activation == "swiglu" and reading.is_written("--swiglu") else 4 * hidden
        )
    if width is not None:
        reading.put("model.ffn_hidden_size", width, "--ffn-hidden-size")
    norm = {"layernorm": "layernorm", "rmsnorm": "rmsnorm"}.get(
        (reading.text("--normalization") or "LayerNorm").lower()
    )
    if norm is None:
        reading.say("--normalization", "refused", "a plan has LayerNorm and RMSNorm", "model.norm")
    else:
        reading.put("model.norm", norm, "--normalization")
    if reading.given("--apply-layernorm-1p"):
        reading.put("model.norm_offset", 1.0, "--apply-layernorm-1p")


def _gate(reading: Reading, *, gated: bool) -> None:
    """Limits of a gate, which Megatron has under `--quick-geglu` only, and what is added to its up-projection."""
    limit, offset = reading.number("--activation-func-clamp-value"), reading.number("--glu-linear-offset")
    clamps = reading.given("--quick-geglu")
    for flag, key, value, counts in (
        ("--activation-func-clamp-value", "model.gate_limit", limit, gated and clamps),
        ("--glu-linear-offset", "model.gate_offset", offset, gated),
    ):
        if value is not None and counts:
            reading.put(key, value, flag)
        elif value is not None:
            reading.say(flag, "no-effect", "it is of a gate that the activation does not have")


def _attention(reading: Reading, hidden: int | None, heads: int | None) -> None:
    """Heads, their width, biases, latent attention."""
    latent = reading.given("--multi-latent-attention")
    if latent:
        reading.say("--add-qkv-bias", "no-effect", "projections of latent attention have no bias")
    elif reading.given("--add-qkv-bias"):
        reading.put("model.qkv_bias", reading.is_written("--disable-bias-linear"), "--add-qkv-bias")
    if latent:
        for row in UNDER["--multi-latent-attention"]:
            reading.put_row(row)
        reading.say("--multi-latent-attention", "mapped", "", "model.kv_lora_rank")
        if heads is not None:
            reading.put("model.num_kv_heads", heads)
        _latent_norms_and_biases(reading)
        return
    grouped = reading.given("--group-query-attention")
    forks = (
        reading.is_written("--num-query-groups") and reading.last["--num-query-groups"].spelled != "--num-query-groups"
    )
    if (grouped or forks) and reading.is_written("--num-query-groups"):
        if (groups := reading.integer("--num-query-groups")) is not None:
            reading.put("model.num_kv_heads", groups, "--num-query-groups", "--group-query-attention")
    elif grouped:
        reading.put("model.num_kv_heads", 1, "--group-query-attention", why="one group is Megatron's default")
    elif heads is not None:
        reading.put("model.num_kv_heads", heads)
    width = reading.integer("--kv-channels")
    if width is not None:
        reading.put("model.head_dim", width, "--kv-channels")


def _latent_norms_and_biases(reading: Reading) -> None:
    """Latent attention has biases on its output product alone; its norms are those of the low-rank vectors, which a
    plan always has (core/transformer/multi_latent_attention.py and core/models/gpt/gpt_layer_specs.py)."""
    reading.values["model"].pop("qk_norm", None)
    if reading.given("--qk-layernorm"):
        reading.say("--qk-layernorm", "no-effect", "a plan's latent attention always norms its low-rank vectors")
    elif not reading.is_written("--qk-layernorm"):
        words = "latent attention norms its low-rank vectors, as with --qk-layernorm, which the file does not give."
        reading.assumed.append(f"model.kv_lora_rank: a plan's {words}")
    if reading.value("model", "bias"):
        reading.put("model.bias", False, why="projections of latent attention have no bias")
        for name in ("attention_output_bias", "mlp_bias"):
            reading.put(f"model.{name}", True)
