"""The flags of a Megatron command about windows, sinks, and what rotary positions turn; and the way back.

Megatron counts the layers that are otherwise: an integer N is every N-th of them, and a list has a number for each
(core/transformer/transformer_config.py, `window_attn_skip_freq` and `no_rope_freq`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..model.attention_kinds import every_nth, of_layer, pattern_of
from ..model.model import ModelSpec
from .megatron_experts import layer_pattern
from .megatron_reading import Reading

Line = tuple[Any, ...]

_USUAL = "this is Megatron's default, without which a plan is the same"


def read_windows(reading: Reading, layers: int | None) -> None:
    """The window, and which layers have it."""
    if (window := reading.text("--window-size")) is None:
        return
    numbers = re.findall(r"-?\d+", window)
    if len(numbers) != 2 or int(numbers[1]) not in (0, -1) or int(numbers[0]) < -1:
        reading.say("--window-size", "refused", "a plan's window ends with the token itself", "model.sliding_window")
        return
    reading.put("model.sliding_window", int(numbers[0]) + 1, "--window-size")
    _put_pattern(reading, "--window-attn-skip-freq", "model.window_layers", layers, ones_have=True)


def read_sinks(reading: Reading) -> None:
    """What the softmax is of."""
    flag = "--softmax-type"
    match reading.text(flag):
        case None:
            return
        case "vanilla":
            reading.say(flag, "no-effect", _USUAL)
        case "learnable":
            reading.put("model.attention_sinks", True, flag)
        case _:
            reading.say(flag, "refused", "a plan's sinks are learnable", "model.attention_sinks")


def read_turned(reading: Reading, layers: int | None, head_dim: int | None) -> None:
    """Which features and which layers rotary positions turn."""
    flag = "--rotary-percent"
    share = reading.number(flag)
    if share is not None and share >= 1:
        reading.say(flag, "no-effect", _USUAL)
    elif share is not None and reading.is_written("--multi-latent-attention"):
        reading.say(flag, "refused", "the rotary part of latent attention turns as a whole", "model.rope_dim")
    elif share is not None and head_dim is not None:
        reading.put("model.rope_dim", int(head_dim * share), flag)
    _put_pattern(reading, "--no-rope-freq", "model.rope_layers", layers, ones_have=False)


def _put_pattern(reading: Reading, flag: str, key: str, layers: int | None, *, ones_have: bool) -> None:
    """A pattern of layers from every how many-th is otherwise, or a list in which 1 is what has it, or has not."""
    if (text := reading.text(flag)) is None:
        return
    pattern = plan_pattern(layer_pattern(text), layers, ones_have=ones_have)
    if pattern is None:
        reading.say(flag, "refused", NO_PATTERN, key)
    else:
        reading.put(key, pattern, flag)


NO_PATTERN = "it is a whole number, or a list of 1 and 0 with one for each layer"


def plan_pattern(found: Any, layers: int | None, *, ones_have: bool) -> list[int] | None:
    """A plan's pattern of layers from Megatron's number or list; None for what is neither."""
    if isinstance(found, int) and found > 0:
        return list(every_nth(found))
    if isinstance(found, list) and {*found} <= {0, 1} and (layers is None or len(found) == layers):
        return list(pattern_of([bool(each) == ones_have for each in found]))
    return None


def attention_lines(model: ModelSpec) -> Iterator[Line]:
    """Those flags of a model."""
    if model.sliding_window:
        yield "--window-size", f"({model.sliding_window - 1},0)"
        yield from _pattern("--window-attn-skip-freq", model, model.window_layers, ones_have=True)
    if model.attention_sinks:
        yield "--softmax-type", "learnable"
    if model.rope_dim:
        yield "--rotary-percent", model.rope_dim / model.head_dim
    yield from _pattern("--no-rope-freq", model, model.rope_layers, ones_have=False)


def _pattern(flag: str, model: ModelSpec, pattern: Sequence[int], *, ones_have: bool) -> Iterator[Line]:
    """Every how many-th layer is otherwise where whole patterns fill the model, else a number for each."""
    if not pattern:
        return
    if pattern == every_nth(len(pattern)) and model.num_layers % len(pattern) == 0:
        yield flag, len(pattern)
    else:
        layers = (of_layer(tuple(pattern), layer) == ones_have for layer in range(model.num_layers))
        yield flag, f"[{','.join(str(int(each)) for each in layers)}]"
