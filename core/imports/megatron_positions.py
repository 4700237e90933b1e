"""The flags of a Megatron command about positions: which there are, and how rotary ones are stretched."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..model.model import ModelSpec
from .megatron_attention import Line, read_turned
from .megatron_flags import UNDER
from .megatron_reading import Reading


def read_positions(reading: Reading, layers: int | None, head_dim: int | None) -> None:
    """How positions enter."""
    kind = reading.text("--position-embedding-type") or "learned_absolute"
    flag = "--position-embedding-type"
    if reading.given("--use-rotary-position-embeddings"):
        kind, flag = "rope", "--use-rotary-position-embeddings"
    if reading.is_written("--multi-latent-attention"):
        kind = "rope" if kind in ("learned_absolute", "rope", "yarn") else kind
    rotary = kind in ("rope", "rotary", "yarn")
    position = "rope" if rotary else "alibi" if kind == "alibi" else "learned"
    if position == "learned" and kind not in ("learned_absolute", "absolute", "learnable"):
        reading.say("--position-embedding-type", "refused", _POSITIONS, "model.position")
        return
    if position == "learned" and reading.given("--no-position-embedding"):
        reading.say("--no-position-embedding", "refused", _POSITIONS, "model.position")
        return
    reading.put("model.position", position, flag)
    _embedding_norm(reading, position)
    if reading.is_written("--no-position-embedding"):
        reading.say("--no-position-embedding", "no-effect", "there is no table of positions")
    if reading.is_written("--position-embedding-type") and flag != "--position-embedding-type":
        reading.say("--position-embedding-type", "mapped", "rotary positions are asked for besides", "model.position")
    if rotary:
        for row in UNDER["rotary positions"]:
            reading.put_row(row)
        _scaling(reading)
        read_turned(reading, layers, head_dim)


_POSITIONS = "a plan has learned positions, rotary ones and ALiBi"


def _embedding_norm(reading: Reading, position: str) -> None:
    """The norm of embeddings of bigscience's fork, which stands between the rows of tokens and those of positions."""
    flag = "--embed-layernorm"
    if position != "learned":
        reading.put("model.embedding_norm", reading.given(flag), flag)
    elif reading.given(flag):
        reading.say(flag, "not-modelled", "a plan norms embeddings where no positions are added to them")


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
    latent = reading.is_written("--multi-latent-attention")
    kind = (reading.text("--rope-type") or "yarn") if latent else reading.text("--position-embedding-type")
    if kind == "yarn":
        _yarn(reading, latent=latent)
    elif latent and reading.is_written("--rope-type"):
        reading.put("model.rope_scaling", "none", "--rope-type")


_FACTOR = "--rotary-scaling-factor", 1.0
_GROWTH = {"rope_mscale": ("--mscale", 1.0), "rope_mscale_all_dim": ("--mscale-all-dim", 0.0)}
_RAMP = {"rope_beta_fast": ("--yarn-beta-fast", 32.0), "rope_beta_slow": ("--yarn-beta-slow", 1.0)}
_ORIGINAL = "--yarn-original-max-position-embeddings"
_ROUNDS, _ROUNDS_NOT = "--yarn-correction-range-round-to-int", "--no-yarn-correction-range-round-to-int"


def _yarn(reading: Reading, *, latent: bool) -> None:
    """The numbers of yarn; latent attention takes none of those flags that begin with `--yarn-`
    (training/argument_utils.py, `_apply_yarn_config_from_args`)."""
    flag = "--rope-type" if latent else "--position-embedding-type"
    factor = _number(reading, *_FACTOR)
    if factor == 1:
        reading.put("model.rope_scaling", "none", flag, why="its factor of 1 stretches nothing")
        return
    reading.put("model.rope_scaling", "yarn", flag)
    reading.put("model.rope_factor", factor, _FACTOR[0])
    for key, (name, default) in (_GROWTH if latent else {**_GROWTH, **_RAMP}).items():
        reading.put(f"model.{key}", _number(reading, name, default), name)
    growth = _growth(factor, *(_number(reading, name, default) for name, default in _GROWTH.values()))
    if growth is not None:
        reading.put("model.rope_attention_factor", growth, "--mscale", "--mscale-all-dim")
    if latent:
        reading.put("model.rope_original_positions", 4096)
        return
    original = reading.integer(_ORIGINAL)
    reading.put("model.rope_original_positions", 4096 if original is None else original, _ORIGINAL)
    rounds = not reading.given(_ROUNDS_NOT)
    reading.put("model.rope_truncate", rounds, _ROUNDS if rounds else _ROUNDS_NOT)


def _number(reading: Reading, flag: str, default: float) -> float:
    value = reading.number(flag)
    return default if value is None else value


def _growth(factor: float, mscale: float, all_dim: float) -> float | None:
    """What turned queries and keys grow by (`_yarn_get_concentration_factor`); None where a plan's rule for both
    numbers says the same."""
    if (mscale and all_dim) or (mscale == 1 and not all_dim) or factor <= 1:
        return None
    return (0.1 * mscale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1)


def yarn_lines(model: ModelSpec) -> Iterator[Line]:
    """Those flags of a model with yarn."""
    if model.is_mla:
        yield "--rope-type", "yarn"
    yield "--rotary-scaling-factor", model.rope_factor
    yield "--mscale", model.rope_mscale
    yield "--mscale-all-dim", model.rope_mscale_all_dim
    if not model.is_mla:
        yield _ORIGINAL, model.original_positions
        yield "--yarn-beta-fast", model.rope_beta_fast
        yield "--yarn-beta-slow", model.rope_beta_slow
        yield (_ROUNDS if model.rope_truncate else _ROUNDS_NOT,)
