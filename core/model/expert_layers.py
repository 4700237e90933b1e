"""Which layers have experts, as two numbers of a model."""

from __future__ import annotations

from collections.abc import Collection


def pattern_of(layers: Collection[int], num_layers: int) -> tuple[int, int] | None:
    """(`first_dense_layers`, `expert_layer_step`) of a model of `num_layers` in which these have experts; None where no
    such pair gives them.

    >>> pattern_of([1, 3, 5], 6), pattern_of([2, 3], 4), pattern_of([0, 3], 4), pattern_of([0, 1], 3)
    ((1, 2), (2, 1), (0, 3), None)
    """
    if not layers:
        return None
    first, *later = sorted(layers)
    step = later[0] - first if later else num_layers - first
    return (first, step) if sorted(layers) == list(range(first, num_layers, step)) else None
