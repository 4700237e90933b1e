"""Which kind of attention a layer has: with a window or with all tokens before, with positions or without, and what the
fields of `ModelSpec` that say so must be.

A pattern is a list of 1 and 0, one for each layer from the first on, repeated over all layers; those of multi-token
prediction count on. An empty one is 1 for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..base.option import FieldProblem

if TYPE_CHECKING:
    from .model import ModelSpec

Pattern = tuple[int, ...]


def of_layer(pattern: Pattern, layer: int) -> bool:
    """Whether a pattern has 1 for a layer.

    >>> [of_layer((1, 0), layer) for layer in range(3)], of_layer((), 7)
    ([True, False, True], True)
    """
    return not pattern or pattern[layer % len(pattern)] == 1


def pattern_of(kinds: Sequence[bool]) -> Pattern:
    """The shortest pattern that gives every layer what `kinds` has for it; () where all have.

    >>> pattern_of([True, False, True, False]), pattern_of([False, True, True]), pattern_of([True, True])
    ((1, 0), (0, 1, 1), ())
    """
    if all(kinds):
        return ()
    lengths = range(1, len(kinds) + 1)
    shortest = next(n for n in lengths if all(kinds[i] == kinds[i % n] for i in range(len(kinds))))
    return tuple(int(each) for each in kinds[:shortest])


def every_nth(length: int) -> Pattern:
    """1 but for the last of so many layers, over and over; () where it is 0.

    >>> every_nth(4), every_nth(0)
    ((1, 1, 1, 0), ())
    """
    return (*[1] * (length - 1), 0) if length else ()


def layer_window(model: ModelSpec, layer: int) -> int:
    """Tokens that a token of a layer attends to, itself the last; 0 is all before it."""
    return model.sliding_window if of_layer(model.window_layers, layer) else 0


def shorter_window(window: int, sequence: int) -> int:
    """The window where it is shorter than the sequences; 0 where every token sees all before it."""
    return window if 0 < window < sequence else 0


def layer_turns(model: ModelSpec, layer: int) -> bool:
    """Whether rotary positions turn the queries and keys of a layer."""
    return model.position == "rope" and of_layer(model.rope_layers, layer)


def rope_is_local(model: ModelSpec, layer: int) -> bool:
    """Whether a layer's rotary positions have `rope_local_theta` for their base, and are not scaled."""
    return model.rope_local_theta is not None and layer_window(model, layer) > 0


def has_altered_softmax(model: ModelSpec) -> bool:
    """Whether attention is more than a softmax of scores in training: probabilities are dropped, scores are capped or
    share with sinks."""
    return model.attention_dropout > 0 or model.attention_softcap > 0 or model.attention_sinks


def attention_problems(model: ModelSpec) -> Iterator[FieldProblem]:
    """What is wrong with the fields of attention, where each is right by itself."""
    windowed = model.sliding_window > 0
    for name, instead in (("window_layers", "sliding_window=0"), ("rope_layers", "another position")):
        if (pattern := getattr(model, name)) and 1 not in pattern:
            yield name, f"{name}={list(pattern)} leaves no layer with what it is for. Use {instead}, or leave it out."
    for name, given in (("window_layers", bool(model.window_layers)), ("rope_local_theta", model.rope_local_theta)):
        if given and not windowed:
            value = getattr(model, name)
            written = list(value) if isinstance(value, tuple) else value
            yield name, f"{name}={written} is for layers with a window, but sliding_window=0. Set it, or leave it out."
    if model.position != "rope":
        for name in ("rope_layers", "rope_dim", "rope_local_theta"):
            if getattr(model, name):
                yield (
                    name,
                    f'{name} is for rotary positions, but position="{model.position}". Use "rope", or leave it out.',
                )
    if model.is_mla:
        for name in ("rope_layers", "rope_dim", "rope_local_theta", "attention_sinks", "attention_scale"):
            if getattr(model, name):
                yield name, f"{name} is not for latent attention (kv_lora_rank={model.kv_lora_rank}). Leave it out."
    if model.rope_dim and (model.rope_dim % 2 or model.rope_dim > model.head_dim):
        most = model.head_dim - model.head_dim % 2
        yield (
            "rope_dim",
            f"rope_dim={model.rope_dim} must be even and at most head_dim={model.head_dim}: its pairs turn. "
            f"Use {most}, or 0 for all.",
        )
