"""Which kind of attention a layer has: with a window or with all tokens before, with positions or without.

A pattern is a list of 1 and 0, one for each layer from the first on, repeated over all layers; those of multi-token
prediction count on. An empty one is 1 for all.
"""

from __future__ import annotations

from collections.abc import Sequence

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
