"""The conjugate mappings between ranks: linear maps over a group, each differentiable with its transpose.

A tensor is *replicated* (the same on every member, and its gradient too), *cut* along a dimension, or *partial* (what
is meant is the sum over members). Each mapping and what its backward does:

| mapping | from -> to | forward | backward |
|---|---|---|---|
| `copy` | replicated -> used by each member for itself | as it is | sum over members |
| `reduce` | partial -> replicated | sum over members | as it is |
| `scatter` | replicated -> cut | own part | all parts |
| `gather` | cut -> replicated | all parts | own part |
| `all_gather` | cut -> used by each member for itself | all parts | own part of the sum |
| `reduce_scatter` | partial -> cut | own part of the sum | all parts |
| `all_to_all` | rows here -> rows there | the rows that others send | the rows go back |
| `swap` | cut along one dimension -> cut along another | all-to-all | all-to-all |

After `gather`, all members go on in the same way, so each has the whole gradient; after `all_gather`, each goes on in
its own way and has one summand of it. Sums are those of `numerics`: fast ones are the library's; exact ones follow the
canonical tree over `Summands`, whose bits do not depend on how leaves lie on members. Where `summands` is given, a
partial tensor has a leading dimension with one value per node of this member, and so has what `copy` and `all_gather`
hand out; without it every member is one leaf and there is no such dimension.

Nothing is written into an argument. In a group of one member, a mapping without `summands` returns its
argument. Backwards are mappings themselves, so second derivatives work, and their collectives are recorded
under the layer that ran forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..numerics import Numerics, Summands
from ..transport.base import Group, contiguous_copy

Map = Callable[[Tensor], Tensor]


def copy(x: Tensor, group: Group, numerics: Numerics, *, summands: Summands | None = None) -> Tensor:
    """`x` for each member's own use; the gradients of all members add up. With `summands` [n, ...]: one copy
    per node, contiguous."""
    if summands is None and group.size == 1:
        return x
    return _mapped(x, group, _spread(summands, group), _sum(group, numerics, summands))


def reduce(x: Tensor, group: Group, numerics: Numerics, *, summands: Summands | None = None) -> Tensor:
    """The sum over members of `x`, the same on every one. With `summands`, `x` is [n, ...], a value per node,
    and the sum is [...]."""
    if summands is None and group.size == 1:
        return x
    _check_summands(x, group, summands)
    return _mapped(x, group, _sum(group, numerics, summands), _spread(summands, group))


def scatter(x: Tensor, group: Group, *, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """This member's part of a replicated tensor: `sizes[rank]` items of `dim`, a tensor of its own.
    Even parts without `sizes`.

    Raises `ValueError` when the sizes are not those of `dim`.
    """
    if group.size == 1:
        return x
    dim, sizes = _split_sizes("scatter", x.shape, group, dim, sizes)
    return _mapped(x, group, _own_part(group, dim, sizes), _all_parts(group, dim, sizes))


def gather(x: Tensor, group: Group, *, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """All members' parts along `dim`, for members that go on in the same way. `sizes[i]` items come from member i;
    without it as many as from here.

    Raises `ValueError` when the sizes contradict the part handed in.
    """
    if group.size == 1:
        return x
    dim, sizes = _joined_sizes("gather", x.shape, group, dim, sizes)
    return _mapped(x, group, _all_parts(group, dim, sizes), _own_part(group, dim, sizes))


def all_gather(
    x: Tensor,
    group: Group,
    numerics: Numerics,
    *,
    dim: int,
    sizes: Sequence[int] | None = None,
    summands: Summands | None = None,
) -> Tensor:
    """All members' parts along `dim`, for each member's own use: the backward adds up the members'
    gradients and keeps the own part.

    Sizes as for `gather`; with `summands` [n, ...], one copy per node.
    """
    if summands is None and group.size == 1:
        return x
    dim, sizes = _joined_sizes("all_gather", x.shape, group, dim, sizes)
    parts, spread = _all_parts(group, dim, sizes), _spread(summands, group)
    return _mapped(x, group, lambda part: spread(parts(part)), _part_of_sum(group, numerics, summands, dim, sizes))


def reduce_scatter(
    x: Tensor,
    group: Group,
    numerics: Numerics,
    *,
    dim: int,
    sizes: Sequence[int] | None = None,
    summands: Summands | None = None,
) -> Tensor:
    """This member's part along `dim` of the sum over members. With `summands`, `x` is [n, ...]
    and `dim` counts in [...].

    Raises `ValueError` when the sizes are not those of `dim`.
    """
    if summands is None and group.size == 1:
        return x
    _check_summands(x, group, summands)
    dim, sizes = _split_sizes("reduce_scatter", x.shape if summands is None else x.shape[1:], group, dim, sizes)
    parts, spread = _all_parts(group, dim, sizes), _spread(summands, group)
    return _mapped(x, group, _part_of_sum(group, numerics, summands, dim, sizes), lambda part: spread(parts(part)))


def all_to_all(
    x: Tensor, group: Group, *, send_sizes: Sequence[int], receive_sizes: Sequence[int], dim: int = 0
) -> Tensor:
    """The items of `dim` that the members sent here, in member order: `send_sizes[i]` of `x` go to member i,
    `receive_sizes[i]` come from it. Sizes may be uneven and zero; what one sends, the other must expect.

    Raises `ValueError` for a wrong count, or when `x` has not as many items as are sent.
    """
    dim, send_sizes = _split_sizes("all_to_all", x.shape, group, dim, send_sizes)
    receive_sizes = _checked("all_to_all", group, receive_sizes)

    def exchange(sent: Sequence[int], received: Sequence[int]) -> Map:
        return lambda rows: torch.cat(
            group.all_to_all(rows.split(list(sent), dim), [_with(rows, {dim: n}) for n in received]), dim
        )

    return _mapped(x, group, exchange(send_sizes, receive_sizes), exchange(receive_sizes, send_sizes))


def swap(
    x: Tensor,
    group: Group,
    *,
    split_dim: int,
    join_dim: int,
    split_sizes: Sequence[int] | None = None,
    join_sizes: Sequence[int] | None = None,
) -> Tensor:
    """What is cut along `join_dim`, cut along `split_dim` instead: `sizes[i]` items of a dimension lie on member i.

    Without `split_sizes` the parts are even; without `join_sizes` all members bring as much as this one.
    Raises `ValueError` when the sizes do not fit `x`, or both dimensions are the same.
    """
    if group.size == 1:
        return x
    split_dim, split_sizes = _split_sizes("swap", x.shape, group, split_dim, split_sizes)
    join_dim, join_sizes = _joined_sizes("swap", x.shape, group, join_dim, join_sizes)
    if split_dim == join_dim:
        raise ValueError(
            f"{group}: swap needs two dimensions, but was given {split_dim} twice. Use all_to_all for one."
        )

    def exchange(split: int, split_sizes: Sequence[int], joined: int, joined_sizes: Sequence[int]) -> Map:
        def run(part: Tensor) -> Tensor:
            shapes = [_with(part, {split: split_sizes[group.rank], joined: size}) for size in joined_sizes]
            return torch.cat(group.all_to_all(part.split(list(split_sizes), split), shapes), joined)

        return run

    there = exchange(split_dim, split_sizes, join_dim, join_sizes)
    return _mapped(x, group, there, exchange(join_dim, join_sizes, split_dim, split_sizes))


def sequence_to_hidden(
    x_BSH: Tensor,
    group: Group,
    *,
    sequence_sizes: Sequence[int] | None = None,
    hidden_sizes: Sequence[int] | None = None,
) -> Tensor:
    """[b, s of this member, h] -> [b, s, h of this member]."""
    return swap(x_BSH, group, split_dim=2, join_dim=1, split_sizes=hidden_sizes, join_sizes=sequence_sizes)


def hidden_to_sequence(
    x_BSH: Tensor,
    group: Group,
    *,
    sequence_sizes: Sequence[int] | None = None,
    hidden_sizes: Sequence[int] | None = None,
) -> Tensor:
    """[b, s, h of this member] -> [b, s of this member, h]."""
    return swap(x_BSH, group, split_dim=1, join_dim=2, split_sizes=sequence_sizes, join_sizes=hidden_sizes)


def all_parts(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """All members' parts along `dim`, of which member i has `sizes[i]` items, one behind the
    other; outside of autograd."""
    return torch.cat(group.all_gather(x, [_with(x, {dim: size}) for size in sizes]), dim)


class _Mapping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, layer: str, forward: Map, backward: Map) -> Tensor:
        ctx.arguments = group, layer, forward, backward
        with group.recorder.layer(layer):
            return forward(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        group, layer, forward, backward = ctx.arguments
        return _Mapping.apply(dy, group, layer, backward, forward), None, None, None, None


def _mapped(x: Tensor, group: Group, forward: Map, backward: Map) -> Tensor:
    return _Mapping.apply(x, group, group.recorder.current_layer, forward, backward)


def _spread(summands: Summands | None, group: Group) -> Map:
    """A copy for every node of this member."""
    if summands is None:
        return lambda x: x.view_as(x)
    count = len(summands.nodes[group.rank])
    return lambda x: x.expand(count, *x.shape).contiguous()


def _sum(group: Group, numerics: Numerics, summands: Summands | None) -> Map:
    if summands is None:
        return lambda x: numerics.sum_members(x.unsqueeze(0), Summands.one_each(group.size), group)
    return lambda x: numerics.sum_members(x, summands, group)


def _part_of_sum(group: Group, numerics: Numerics, summands: Summands | None, dim: int, sizes: Sequence[int]) -> Map:
    if summands is None:
        return lambda x: numerics.sum_members_part(x.unsqueeze(0), Summands.one_each(group.size), group, dim, sizes)
    return lambda x: numerics.sum_members_part(x, summands, group, dim, sizes)


def _own_part(group: Group, dim: int, sizes: Sequence[int]) -> Map:
    return lambda x: contiguous_copy(x.narrow(dim, sum(sizes[: group.rank]), sizes[group.rank]))


def _all_parts(group: Group, dim: int, sizes: Sequence[int]) -> Map:
    return lambda x: all_parts(x, group, dim, sizes)


def _with(x: Tensor, sizes: dict[int, int]) -> tuple[int, ...]:
    """The shape of `x` with other sizes of some dimensions."""
    return tuple(sizes.get(dim, size) for dim, size in enumerate(x.shape))


def _split_sizes(
    op: str, shape: torch.Size, group: Group, dim: int, sizes: Sequence[int] | None
) -> tuple[int, tuple[int, ...]]:
    """The dimension counted from the front, and how many of its items each member gets."""
    dim = _dim(op, shape, group, dim)
    length = shape[dim]
    if sizes is None:
        each, rest = divmod(length, group.size)
        if rest:
            raise ValueError(
                f"{group}: {op} cannot cut {length} items of dim {dim} evenly over {group.size} members. Give sizes."
            )
        return dim, (each,) * group.size
    sizes = _checked(op, group, sizes)
    if sum(sizes) != length:
        raise ValueError(
            f"{group}: {op} was given sizes {list(sizes)}, {sum(sizes)} items together, but dim {dim} has {length}."
        )
    return dim, sizes


def _joined_sizes(
    op: str, shape: torch.Size, group: Group, dim: int, sizes: Sequence[int] | None
) -> tuple[int, tuple[int, ...]]:
    """The dimension counted from the front, and how many of its items each member has."""
    dim = _dim(op, shape, group, dim)
    if sizes is None:
        return dim, (shape[dim],) * group.size
    sizes = _checked(op, group, sizes)
    if sizes[group.rank] != shape[dim]:
        raise ValueError(
            f"{group}: {op} expects {sizes[group.rank]} items of dim {dim} from this member, but was "
            f"given {shape[dim]}."
        )
    return dim, sizes


def _dim(op: str, shape: torch.Size, group: Group, dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"{group}: {op} along dim {dim} of a tensor of shape {tuple(shape)}.")
    return dim % len(shape)


def _checked(op: str, group: Group, sizes: Sequence[int]) -> tuple[int, ...]:
    if len(sizes) != group.size or min(sizes) < 0:
        raise ValueError(
            f"{group}: {op} needs one size of at least 0 per member ({group.size}), but was given {list(sizes)}."
        )
    return tuple(sizes)


def _check_summands(x: Tensor, group: Group, summands: Summands | None) -> None:
    if summands is None:
        return
    if len(summands.nodes) != group.size:
        raise ValueError(
            f"{group}: the summands are those of {len(summands.nodes)} members, but the group has {group.size}."
        )
    if x.dim() == 0 or len(x) != len(summands.nodes[group.rank]):
        raise ValueError(
            f"{group}: this member has {len(summands.nodes[group.rank])} summands, but was given shape "
            f"{tuple(x.shape)}."
        )
