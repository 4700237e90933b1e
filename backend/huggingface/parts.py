"""Where a parameter lies in Hugging Face files: which rows of which tensors, as index arithmetic for both directions.

A parameter's cut dimension is a row of items (`core.model.parameters`): key/value groups, MLP units, table rows; a
parameter that is not cut is one item. The files keep what an item holds in tensors of their own (queries apart from
keys, gates apart from up-projections), each with the items in the same order. So an interval of items is a contiguous
block of each of those tensors, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.model.parameters import Parameter

if TYPE_CHECKING:
    from torch import Tensor

EXPERT = "{expert}"
"""In a tensor's name, where the number of the expert goes."""


@dataclass(frozen=True)
class Part:
    """Some rows of every item: item i has rows `first + i * stride + row` of the file tensor `name`, for
    each `row` of `rows`."""

    name: str
    stride: int
    rows: range
    first: int = 0


def item_dim(parameter: Parameter) -> int:
    """The dimension of items, without that of the experts a parameter is stacked over."""
    return 0 if parameter.cut is None else parameter.cut[0] - parameter.expert


def item_rows(parameter: Parameter) -> int:
    """Rows of one item: all of them where nothing is cut."""
    return parameter.shape[item_dim(parameter) + parameter.expert] if parameter.cut is None else parameter.unit


@dataclass(frozen=True)
class Source:
    """A parameter and the parts that make up each of its items, in the order of the item's rows.

    `transposed` where the files keep a matrix as [in, out], `stacked` where they keep all experts in one tensor. The
    files have `num_items`, which is fewer than the parameter has for a padded vocabulary.
    """

    parameter: Parameter
    parts: tuple[Part, ...]
    num_items: int
    transposed: bool = False
    stacked: bool = False

    def __post_init__(self) -> None:
        assert sum(len(part.rows) for part in self.parts) == self.item_rows, f"{self.parameter.name}: {self.parts}"

    @property
    def dim(self) -> int:
        """The dimension of items, in the parameter without its experts."""
        return item_dim(self.parameter)

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape, of one expert where it is stacked."""
        return self.parameter.shape[1:] if self.parameter.expert else self.parameter.shape

    @property
    def item_rows(self) -> int:
        """Rows of one item."""
        return item_rows(self.parameter)

    @property
    def file_dim(self) -> int:
        """The dimension of items in the files."""
        return 1 - self.dim if self.transposed else self.dim

    @property
    def file_shapes(self) -> dict[str, tuple[int, ...]]:
        """The full shape of every tensor that has a part of the parameter."""
        other = [size for dim, size in enumerate(self.shape) if dim != self.dim]
        rows: dict[str, int] = {}
        for part in self.parts:
            rows[part.name] = max(rows.get(part.name, 0), part.first + self.num_items * part.stride)
        stack = self.parameter.shape[:1] if self.stacked else ()
        experts = range(self.parameter.shape[0]) if self.parameter.expert and not self.stacked else range(1)
        return {
            name.replace(EXPERT, str(expert)): (*stack, *other[: self.file_dim], size, *other[self.file_dim :])
            for expert in experts
            for name, size in rows.items()
        }


@dataclass(frozen=True)
class Region:
    """A contiguous block, `index`, of the file tensor `name`, and the rows of a rank's part of a
    parameter that it holds.

    `theirs` and `ours` are views of the same shape, [items, rows, ...]: copy one into the other, in either direction.
    """

    name: str
    index: tuple[slice, ...]
    source: Source
    part: Part
    num_items: int
    offset: int
    expert: int | None

    def theirs(self, block: Tensor) -> Tensor:
        """The block's rows, by item. `block` is the file's tensor at `index`."""
        block = block[0] if self.source.stacked else block
        items = block.movedim(self.source.file_dim, 0).unflatten(0, (self.num_items, self.part.stride))
        rows = self.part.rows
        return items[:, rows.start : rows.stop : rows.step]

    def ours(self, local: Tensor) -> Tensor:
        """The rows of this rank's part of the parameter, which is `local`, in the parameter's own orientation."""
        one = local if self.expert is None else local[self.expert]
        num_rows = self.num_items * self.source.item_rows
        items = one.movedim(self.source.dim, 0)[:num_rows].unflatten(0, (self.num_items, self.source.item_rows))
        return items[:, self.offset : self.offset + len(self.part.rows)]


def regions(source: Source, slices: tuple[slice, ...]) -> Iterator[Region]:
    """What the files hold of a rank's `slices` of a parameter, each block once for every part in it."""
    stacked = source.parameter.expert
    experts = range(slices[0].start, slices[0].stop) if stacked else [None]
    own = slices[1:] if stacked else slices
    lo, rest = divmod(own[source.dim].start, source.item_rows)
    hi, more = divmod(own[source.dim].stop, source.item_rows)
    assert rest == more == 0, f"{source.parameter.name} is cut inside an item: {slices}"
    hi = min(hi, source.num_items)
    if hi <= lo:  # padding of the vocabulary only
        return
    other = [slice(0, size) for dim, size in enumerate(source.shape) if dim != source.dim]
    for expert in experts:
        offset = 0
        for part in source.parts:
            rows = slice(part.first + lo * part.stride, part.first + hi * part.stride)
            index = (*other[: source.file_dim], rows, *other[source.file_dim :])
            if source.stacked and expert is not None:
                index = (slice(expert, expert + 1), *index)
            name = part.name if expert is None else part.name.replace(EXPERT, str(expert))
            yield Region(
                name, index, source, part, hi - lo, offset, None if expert is None else expert - slices[0].start
            )
            offset += len(part.rows)


def file_shapes(sources: Mapping[str, Source]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the files, in the order of the parameters."""
    return {name: shape for source in sources.values() for name, shape in source.file_shapes.items()}
