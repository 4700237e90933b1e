"""Rotary positions: the angle by which each pair of a head turns from one token to the next, and
what scaling makes of it.

Su et al. 2021 (RoFormer, arXiv 2104.09864), equation 15: pair i of d/2 turns by theta^(-2i/d) a token. Longer sequences
than those of the first training turn slower (`ModelSpec.rope_scaling`):

| scaling | what turns slower | source |
|---|---|---|
| `linear` | all pairs, by the factor | Chen et al. 2023, arXiv 2306.15595 |
| `dynamic` | slow pairs more than fast ones, in longer sequences | transformers, `_compute_dynamic_ntk_parameters` |
| `llama3` | pairs of long waves, with a smooth passage | transformers, `_compute_llama3_parameters` |
| `yarn` | slow pairs by the factor, a ramp to fast ones; queries and keys grow | Peng et al. 2023, arXiv 2309.00071 |
"""

from __future__ import annotations

import math

from .model import ModelSpec


def rotary_width(model: ModelSpec) -> int:
    """Features of a head that rotary positions reach."""
    return model.qk_rope_head_dim if model.is_mla else model.head_dim


def rotary_frequencies(model: ModelSpec, sequence: int, *, local: bool = False) -> tuple[float, ...]:
    """Radians by which each pair of a head turns a token, in sequences of so many tokens. One per pair, fastest first;
    pairs beyond `rope_dim` stand still. `local` are those of layers with a window, where the model has
    `rope_local_theta`."""
    width = model.rope_dim or rotary_width(model)
    still = (0.0,) * ((rotary_width(model) - width) // 2)
    return _turning(model, width, sequence, local=local) + still


def _turning(model: ModelSpec, width: int, sequence: int, *, local: bool) -> tuple[float, ...]:
    """The first of these, of `width` features that all turn."""
    theta, factor = model.rope_theta, model.rope_factor
    if local:
        assert model.rope_local_theta is not None
        return tuple(model.rope_local_theta ** (-2 * i / width) for i in range(width // 2))
    original = model.original_positions
    if model.rope_scaling == "dynamic":
        longer = max(sequence, original) / original
        theta *= (factor * longer - (factor - 1)) ** (width / (width - 2))
    plain = tuple(theta ** (-2 * i / width) for i in range(width // 2))
    match model.rope_scaling:
        case "linear":
            return tuple(each / factor for each in plain)
        case "llama3":
            return tuple(_llama3(model, each) for each in plain)
        case "yarn":
            lo, hi = _yarn_ramp(model, width)
            shares = (1 - min(max((i - lo) / (hi - lo), 0.0), 1.0) for i in range(width // 2))
            return tuple(each / factor * (1 - keep) + each * keep for each, keep in zip(plain, shares, strict=True))
        case _:
            return plain


def rotary_growth(model: ModelSpec, *, local: bool = False) -> float:
    """The factor on turned queries and keys (yarn, section 3.4, or what the model gives); 1 without one."""
    if model.rope_scaling != "yarn" or local:
        return 1.0
    if model.rope_attention_factor is not None:
        return model.rope_attention_factor
    if model.rope_mscale and model.rope_mscale_all_dim:
        return _yarn_growth(model.rope_factor, model.rope_mscale) / _yarn_growth(
            model.rope_factor, model.rope_mscale_all_dim
        )
    return _yarn_growth(model.rope_factor, 1.0)


def attention_scale(model: ModelSpec) -> float:
    """What scores are multiplied by before the softmax: what the model gives, or 1/sqrt(head_dim), and with latent
    attention and yarn the square of the growth over all dimensions (DeepSeek-V2, arXiv 2405.04434, section 3.1.4;
    transformers' `DeepseekV3Attention.scaling`)."""
    if model.attention_scale is not None:
        return model.attention_scale
    growth = 1.0
    if model.is_mla and model.rope_scaling == "yarn" and model.rope_mscale_all_dim:
        growth = _yarn_growth(model.rope_factor, model.rope_mscale_all_dim)
    return growth * growth / math.sqrt(model.head_dim)


def _llama3(model: ModelSpec, frequency: float) -> float:
    """Waves longer than original/low are stretched by the factor, those shorter than original/high are not."""
    turns = model.original_positions * frequency / (2 * math.pi)
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    keep = min(max((turns - low) / (high - low), 0.0), 1.0)
    return frequency * keep + frequency / model.rope_factor * (1 - keep)


def _yarn_ramp(model: ModelSpec, width: int) -> tuple[float, float]:
    """The pairs between which the ramp lies: those that turn `rope_beta_fast` and `rope_beta_slow` times in
    an original sequence, rounded to whole pairs unless the model says otherwise (transformers,
    `_compute_yarn_parameters`)."""

    def pair(turns: float) -> float:
        return width * math.log(model.original_positions / (turns * 2 * math.pi)) / (2 * math.log(model.rope_theta))

    first, last = pair(model.rope_beta_fast), pair(model.rope_beta_slow)
    if model.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    lo, hi = max(first, 0), min(last, width - 1)
    return lo, hi if hi != lo else lo + 0.001


def _yarn_growth(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
