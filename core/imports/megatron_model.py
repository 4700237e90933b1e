"""The flags of a Megatron command that describe the network."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from .megatron_flags import RELEASES, UNDER
from .megatron_reading import Reading


@dataclass(frozen=True)
class Model:
    """What the layout's flags need to know of the network; None is not known."""

    num_layers: int | None
    is_moe: bool


TOKENIZERS = {
    "GPT2BPETokenizer": 50257,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
    "Llama2Tokenizer": 32000,
    "GPTSentencePieceTokenizer": 256000,
    "TikTokenizer": 131072,
    "SFTTokenizer": 131072,
}
"""--tokenizer-type -> its usual number of tokens; the files themselves are not read."""

TOKENIZER_FILES = (
    (r"llama-?_?(3|4)", 128256),
    (r"qwen-?_?(1\.5|2|2\.5|3)", 151936),
    (r"deepseek-?_?(v3|r1)|deepseek-ai/deepseek-v3|kimi", 129280),
    (r"deepseek", 102400),
    (r"mi[sx]tral", 32000),
    (r"llama", 32000),
    (r"gpt2|gpt-2", 50257),
    (r"gemma", 256000),
    (r"bloom|t5-small|bigscience", 250680),
)
"""What the name of a tokenizer's file tells -> tokens."""

ASSUMED_VOCABULARY = 50257


def read_model(reading: Reading) -> Model:
    """Fills [model]."""
    rows = {row.key: reading.put_row(row) for row in UNDER[""] if row.key.startswith("model.")}
    layers, hidden, heads = (rows[f"model.{name}"] for name in ("num_layers", "hidden_size", "num_heads"))
    for flag, key in (
        ("--num-layers", "num_layers"),
        ("--hidden-size", "hidden_size"),
        ("--num-attention-heads", "num_heads"),
    ):
        if not reading.is_written(flag):
            reading.refuse(flag, "", 0, "it is not given, and Megatron needs it", f"model.{key}")
    _activation(reading, hidden)
    _attention(reading, hidden, heads)
    _positions(reading)
    _vocabulary(reading)
    is_moe = _experts(reading, layers, hidden)
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
        flag, activation = "--quick-geglu", ""
        reading.say(flag, "refused", "a plan has no quick gelu", "model.activation")
    elif reading.given("--openai-gelu"):
        flag, activation = "--openai-gelu", "gelu_tanh"
    else:
        flag, activation = "--no-bias-gelu-fusion", "gelu_tanh" if fuses else "gelu"
    if activation:
        reading.put("model.activation", activation, flag)
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


def _attention(reading: Reading, hidden: int | None, heads: int | None) -> None:
    """Heads, their width, biases, windows, latent attention."""
    if reading.given("--add-qkv-bias"):
        reading.put("model.qkv_bias", reading.is_written("--disable-bias-linear"), "--add-qkv-bias")
    if reading.given("--multi-latent-attention"):
        for row in UNDER["--multi-latent-attention"]:
            reading.put_row(row)
        reading.say("--multi-latent-attention", "mapped", "", "model.kv_lora_rank")
        if heads is not None:
            reading.put("model.num_kv_heads", heads)
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
    if (window := reading.text("--window-size")) is not None:
        numbers = re.findall(r"-?\d+", window)
        if len(numbers) == 2 and int(numbers[1]) in (0, -1) and int(numbers[0]) >= -1:
            reading.put("model.sliding_window", int(numbers[0]) + 1, "--window-size")
        else:
            reading.say(
                "--window-size", "refused", "a plan's window ends with the token itself", "model.sliding_window"
            )


def _positions(reading: Reading) -> None:
    """How positions enter."""
    kind = reading.text("--position-embedding-type") or "learned_absolute"
    flag = "--position-embedding-type"
    if reading.given("--use-rotary-position-embeddings"):
        kind, flag = "rope", "--use-rotary-position-embeddings"
    if reading.is_written("--multi-latent-attention"):
        kind = "rope" if kind in ("learned_absolute", "rope", "yarn") else kind
    rotary = kind in ("rope", "rotary", "yarn")
    if not rotary and kind not in ("learned_absolute", "absolute", "learnable"):
        reading.say("--position-embedding-type", "refused", "a plan has learned and rotary positions", "model.position")
        return
    if not rotary and reading.given("--no-position-embedding"):
        reading.say("--no-position-embedding", "refused", "a plan has learned or rotary positions", "model.position")
        return
    reading.put("model.position", "rope" if rotary else "learned", flag)
    if reading.is_written("--no-position-embedding"):
        reading.say("--no-position-embedding", "no-effect", "rotary positions have no table")
    if reading.is_written("--position-embedding-type") and flag != "--position-embedding-type":
        reading.say("--position-embedding-type", "mapped", "rotary positions are asked for besides", "model.position")
    if rotary:
        for row in UNDER["rotary positions"]:
            reading.put_row(row)
        _scaling(reading)


def _scaling(reading: Reading) -> None:
    """How rotary positions are stretched."""
    if (factor := reading.number("--rotary-seq-len-interpolation-factor")) is not None and factor != 1:
        reading.put("model.rope_scaling", "linear", "--rotary-seq-len-interpolation-factor")
        reading.put("model.rope_factor", factor, "--rotary-seq-len-interpolation-factor")
    if reading.given("--use-rope-scaling"):
        factor = reading.number("--rope-scaling-factor")
        reading.put("model.rope_scaling", "llama3", "--use-rope-scaling")
        reading.put("model.rope_factor", 8.0 if factor is None else factor, "--rope-scaling-factor")
        reading.put("model.rope_original_positions", 8192)
    if reading.is_written("--multi-latent-attention") and (reading.text("--rope-type") or "yarn") == "yarn":
        numbers = {
            "rope_factor": ("--rotary-scaling-factor", 40.0),
            "rope_mscale": ("--mscale", 1.0),
            "rope_mscale_all_dim": ("--mscale-all-dim", 0.0),
        }
        reading.put("model.rope_scaling", "yarn", "--rope-type")
        for key, (flag, default) in numbers.items():
            value = reading.number(flag)
            reading.put(f"model.{key}", default if value is None else value, flag)
        reading.put("model.rope_original_positions", 4096)
    elif reading.is_written("--rope-type"):
        reading.put("model.rope_scaling", "none", "--rope-type")


def _vocabulary(reading: Reading) -> None:
    """Rows of the token table, with Megatron's padding."""
    if (padded := reading.integer("--padded-vocab-size")) is not None:
        reading.put("model.vocab_size", padded, "--padded-vocab-size")
        return
    if (padded := reading.integer("--pad-vocab-size-to")) is not None:
        reading.put("model.vocab_size", padded, "--pad-vocab-size-to")
        return
    tokens, flag = _tokens(reading)
    if tokens is None:
        return
    for extra in ("--extra-vocab-size", "--vocab-extra-ids"):
        tokens += reading.integer(extra) or 0
    divisible = reading.integer("--make-vocab-size-divisible-by") or 128
    tp = reading.integer("--tensor-model-parallel-size") or 1
    multiple = divisible * max(tp, 1)
    rows = -(-tokens // multiple) * multiple
    why = f"{tokens:,} tokens, padded to a multiple of {multiple}"
    extras = (each for each in ("--extra-vocab-size", "--vocab-extra-ids") if reading.is_written(each))
    reading.put("model.vocab_size", rows, flag, "--make-vocab-size-divisible-by", *extras, why=why)
    if reading.is_written("--tokenizer-type") and flag != "--tokenizer-type":
        reading.say("--tokenizer-type", "mapped", why, "model.vocab_size")


def _tokens(reading: Reading) -> tuple[int | None, str]:
    """How many tokens there are, and the flag that says so."""
    kind = reading.last["--tokenizer-type"].value if reading.is_written("--tokenizer-type") else ""
    if (tokens := reading.integer("--vocab-size")) is not None:
        return tokens + (kind == "NullTokenizer" and _before(reading.version)), "--vocab-size"
    if reading.is_written("--vocab-size"):
        return None, ""
    if kind in TOKENIZERS:
        return TOKENIZERS[kind], "--tokenizer-type"
    named = " ".join(
        reading.last[flag].value.lower()
        for flag in (
            "--tokenizer-model",
            "--tokenizer-name-or-path",
            "--patch-tokenizer-type",
            "--tokenizer-type",
            "--vocab-file",
            "--load",
        )
        if reading.is_written(flag)
    )
    found = next((tokens for pattern, tokens in TOKENIZER_FILES if re.search(pattern, named)), None)
    tokens = ASSUMED_VOCABULARY if found is None else found
    how = "as the tokenizer's name tells" if found is not None else "which nothing in the file tells"
    reading.assume(f"model.vocab_size: {tokens:,} tokens, {how} (--set model.vocab_size=N).")
    return tokens, "--tokenizer-type"


def _before(version: str | None) -> bool:
    """True for releases whose NullTokenizer has one token more than it is told."""
    return version in RELEASES[: RELEASES.index(NULL_TOKENIZER_COUNTS_ALL)]


NULL_TOKENIZER_COUNTS_ALL = "0.18"
"""Release from which --vocab-size counts every token of a NullTokenizer."""


def _experts(reading: Reading, layers: int | None, hidden: int | None) -> bool:
    """Experts and their routers; True for a model that has some."""
    text = reading.text("--num-experts")
    if text is None:
        return False
    counts = {int(each) for each in re.findall(r"\d+", text)}
    if len(counts) != 1 or not re.fullmatch(r"[\d\s\[\],]+", text):
        reading.say(
            "--num-experts", "refused", "layers have different numbers of experts, in a plan one", "model.num_experts"
        )
        return False
    (count,) = counts
    if count <= 1:
        reading.say("--num-experts", "no-effect", "one expert is a dense layer")
        return False
    reading.put("model.num_experts", count, "--num-experts")
    rows = {row.key: reading.put_row(row) for row in UNDER["--num-experts"]}
    width = rows["model.expert_ffn_hidden_size"] or _filled(reading, "ffn_hidden_size")
    if width is not None and rows["model.expert_ffn_hidden_size"] is None:
        reading.put("model.expert_ffn_hidden_size", width)
    _dense_layers(reading, layers)
    _shared_experts(reading, width)
    _router(reading)
    _group_scores(reading, rows["model.experts_per_token"], rows["model.router_groups_per_token"])
    return True


def _filled(reading: Reading, name: str) -> int | None:
    given = reading.values.get("model", {}).get(name)
    return None if given is None else given.value


def _dense_layers(reading: Reading, layers: int | None) -> None:
    if (text := reading.text("--moe-layer-freq")) is None:
        return
    pattern = layer_pattern(text)
    if isinstance(pattern, int) and layers is not None:
        pattern = [int(layer % pattern == 0) for layer in range(layers)] if pattern > 0 else None
    if isinstance(pattern, list):
        dense = next((number for number, moe in enumerate(pattern) if moe), len(pattern))
        if all(pattern[dense:]) and (layers is None or len(pattern) == layers) and dense < len(pattern):
            reading.put("model.first_dense_layers", dense, "--moe-layer-freq")
            return
    reading.say(
        "--moe-layer-freq",
        "refused",
        "in a plan dense layers come first, then those with experts",
        "model.first_dense_layers",
    )


def layer_pattern(text: str) -> int | list[int] | None:
    """A number, or the list that a sum of products of lists makes, as `([0]*3+[1]*58)`; None for anything else."""

    def value(node: ast.AST) -> int | list[int]:
        match node:
            case ast.Constant(value=int() as number):
                return int(number)
            case ast.List(elts=elements):
                return [element for each in elements if isinstance(element := value(each), int)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                first, second = value(left), value(right)
                if isinstance(first, list) and isinstance(second, list) and len(first) + len(second) <= 10_000:
                    return first + second
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                first, second = value(left), value(right)
                if isinstance(first, list) and isinstance(second, int) and len(first) * second <= 10_000:
                    return first * second
        raise ValueError(text)

    try:
        return value(ast.parse(text.strip().strip("'\""), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _shared_experts(reading: Reading, width: int | None) -> None:
    size = reading.integer("--moe-shared-expert-intermediate-size")
    if not size or width is None:
        return
    if size % width:
        why = f"a plan's shared experts have the width of the others, {width}, of which this is no multiple"
        reading.say("--moe-shared-expert-intermediate-size", "refused", why, "model.num_shared_experts")
    else:
        reading.put("model.num_shared_experts", size // width, "--moe-shared-expert-intermediate-size")


def _router(reading: Reading) -> None:
    """Scores, weights and balance."""
    scores = reading.text("--moe-router-score-function") or "softmax"
    if scores not in ("softmax", "sigmoid"):
        reading.say("--moe-router-score-function", "refused", "a plan has softmax and sigmoid", "model.router_scores")
    else:
        reading.put("model.router_scores", scores, "--moe-router-score-function")
        before = reading.given("--moe-router-pre-softmax")
        reading.put("model.normalized_router_weights", scores == "sigmoid" or not before, "--moe-router-pre-softmax")
    balance = reading.text("--moe-router-load-balancing-type") or "aux_loss"
    factor = reading.text("--moe-aux-loss-coeff")
    if balance in ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"):
        value = 0.0 if balance == "none" or factor is None else _factor(reading, factor)
        flags = ("--moe-aux-loss-coeff", "--moe-router-load-balancing-type")
        if value is not None:
            why = "" if balance in ("none", "seq_aux_loss") or not value else "a plan's is per sequence"
            reading.put("train.router_aux_loss", value, *flags, why=why)
    else:
        reading.say("--moe-router-load-balancing-type", "not-modelled", "tokens are spread by a loss or a bias")
        reading.say("--moe-aux-loss-coeff", "not-modelled", "tokens are spread by a loss or a bias")


def _factor(reading: Reading, text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        reading.say("--moe-aux-loss-coeff", "refused", "a plan has one such loss", "train.router_aux_loss")
        return None


def _group_scores(reading: Reading, chosen: int | None, groups: int | None) -> None:
    """Megatron adds up the best topk / group_topk scores of a group."""
    if not groups or not chosen:
        return
    if chosen // groups == 2:
        reading.put("model.router_group_scores", "top_two", "--moe-router-group-topk")
    elif chosen // groups > 2:
        reading.assume(
            f"groups of experts are chosen by the sum of their best {chosen // groups} scores; a plan adds up one or "
            "two, which costs the same."
        )
