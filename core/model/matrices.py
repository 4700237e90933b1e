"""Which matrices a linear weight holds: what is multiplied at once and means several things."""

from __future__ import annotations

from dataclasses import dataclass

from .model import ModelSpec
from .parameters import Parameter
from .roles import Role


@dataclass(frozen=True)
class Split:
    """Rows of a weight in runs of `unit`, of each of which the rows `[lo, hi)` of a part belong to one matrix."""

    unit: int
    parts: tuple[tuple[int, int], ...]


def split_of(model: ModelSpec, parameter: Parameter) -> Split:
    """The matrices of a linear weight, of each expert: queries, keys and values of `attention.qkv`; gates and
    up-projections of a gated `up`; one of every other.

    >>> from .model_presets import model_preset
    >>> from .parameters import layer_parameters
    >>> llama = model_preset("llama3-8b")
    >>> [split_of(llama, each) for each in layer_parameters(llama, 0) if each.name.endswith("qkv.weight")]
    [Split(unit=768, parts=((0, 512), (512, 640), (640, 768)))]
    """
    role = parameter.name.removesuffix(".weight")
    if role.endswith(Role.QKV.value):
        queries, d = model.query_heads_per_group * model.head_dim, model.head_dim
        return Split(queries + 2 * d, ((0, queries), (queries, queries + d), (queries + d, queries + 2 * d)))
    if model.gated and role.endswith((Role.UP.value, Role.EXPERTS_UP.value, Role.SHARED_UP.value)):
        return Split(2, ((0, 1), (1, 2)))
    return Split(parameter.shape[-2], ((0, parameter.shape[-2]),))


def matrix_shapes(model: ModelSpec, parameter: Parameter) -> tuple[tuple[int, int], ...]:
    """Rows and columns of each of these matrices; of experts those of one."""
    split, (rows, columns) = split_of(model, parameter), parameter.shape[-2:]
    return tuple((rows // split.unit * (hi - lo), columns) for lo, hi in split.parts)
