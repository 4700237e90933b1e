"""`Numerics`: the arithmetic that layers, gradients and scalars are made of. Exact and fast are two
sets of the same operations.

Shape suffixes: B samples of a microbatch, S sequence, C a feature dimension that tensor parallelism cuts (this rank's
part), F a whole one, H hidden, V this rank's vocabulary. Every linear weight is stored [C, F], cut dimension first, so
a column-parallel weight is [out, in] and a row-parallel one [in, out]; the same three products then serve both:

- `project`:  y_C = x_F W^T   forward of a column-parallel, input gradient of a row-parallel layer; no sum over ranks
- `contract`: y_F = x_C W     forward of a row-parallel, input gradient of a column-parallel layer; sum over ranks
- `weight_gradient`: W' = sum over tokens of x_C y_F^T
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..base.observe import SumObserver
from ..transport.base import Group
from .contributions import Accumulator, Contribution
from .copies import Copies
from .expert_rows import ExpertNumerics
from .heads import OwnedHeads, OwnedPart
from .owned_leaves import OwnedLeaves
from .summands import Summands
from .tokens import OwnedTokens


class Scalar(Protocol):
    """A partial sum of a scalar: `a + b`, and the sum over a group's members. `float(a)` waits for the device."""

    def __float__(self) -> float: ...

    @property
    def value(self) -> Tensor:
        """fp64 [], where it is computed: nobody waits."""

    def __add__(self, other: Any, /) -> Any: ...

    def over(self, group: Group) -> Scalar:
        """The sum over the members, the same on every one. One small collective; none in a group of one."""


class Numerics(ExpertNumerics):
    """The operations; `ExactNumerics` and `FastNumerics` say in which order they add. Stateless but for an `observer`
    of exact sums, and free to share between ranks.

    `group` arguments are tensor-parallel groups, except in `reduce_gradients`, whose group holds the copies of
    a stage. `tokens` says which tokens of each sequence the ranks hold between the cut layers; None means all
    (no sequence parallelism).
    """

    mode: Literal["exact", "fast"]
    compiles = False
    """Whether layers compute what lies between products in compiled kernels (`runtime.compile`)."""

    def __init__(self, device: torch.device):
        self.device = device
        self.observer: SumObserver | None = None

    @abstractmethod
    def project(self, x_BSF: Tensor, weight_CF: Tensor, leaves: OwnedLeaves) -> Tensor:
        """x W^T, [b, s, c]."""

    def contract(
        self, x_BSC: Tensor, weight_CF: Tensor, leaves: OwnedLeaves, group: Group, tokens: OwnedTokens | None
    ) -> Tensor:
        """x W summed over all ranks, [b, s, f], or this rank's tokens of it."""
        return self.finish_contract(self.partial_contract(x_BSC, weight_CF, leaves), leaves, group, tokens, x_BSC.dtype)

    @abstractmethod
    def partial_contract(self, x_BSC: Tensor, weight_CF: Tensor, leaves: OwnedLeaves) -> Tensor:
        """The products of `contract`: what this rank brings to the sum, [n, b, s, f]."""

    @abstractmethod
    def partial_sum(self, terms_BSLR: Tensor, leaves: OwnedLeaves) -> Tensor:
        """What this rank brings to a sum over all leaves, one for each of its l own: [n, b, s, r],
        as `partial_contract`."""

    @abstractmethod
    def finish_contract(
        self, partial: Tensor, leaves: OwnedLeaves, group: Group, tokens: OwnedTokens | None, dtype: torch.dtype
    ) -> Tensor:
        """The sum of `contract`, which uses `partial` up; rounded to `dtype`."""

    @abstractmethod
    def multiply(self, x_BSK: Tensor, matrix_KN: Tensor) -> Tensor:
        """x times a matrix that no rank cuts, for the tokens that this rank holds: [b, s, n] in the format of `x`."""

    @property
    def heads_at_once(self) -> int | None:
        """How many heads of a sample `multiply_heads` is given best, which holds all results; None for all of them."""
        return 1

    @abstractmethod
    def multiply_heads(self, left_BHMK: Tensor, right_BHKN: Tensor) -> Tensor:
        """The product of two fp32 matrices for each head of each sample, [b, h, m, n]."""

    @abstractmethod
    def weight_gradient(self, x_BSC: Tensor, y_BSF: Tensor, leaves: OwnedLeaves) -> Contribution:
        """Sums over tokens of the outer products, [c, f]."""

    @abstractmethod
    def elementwise(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`function(x)` for an elementwise function of a contiguous tensor; gradients flow."""

    @abstractmethod
    def token_sums(self, x_BSN: Tensor, tokens: OwnedTokens | None = None) -> Contribution:
        """Sums over tokens, [n], for biases and norms. With `tokens`, `x` has this rank's own and the sums
        wait for the other ranks."""

    @abstractmethod
    def head_sums(self, x_BSLQD: Tensor, heads: OwnedHeads | None) -> Contribution:
        """Sums over tokens, this rank's key/value heads and the query heads of each, [d]; with `heads` they
        wait for the other ranks."""

    @abstractmethod
    def embedding_gradient(self, ids_BS: Tensor, gradient_BSH: Tensor, num_rows: int) -> Contribution:
        """Rows of `gradient` added to the row of their token, [num_rows, h]. An id of `num_rows`
        belongs to another rank."""

    @abstractmethod
    def sum_lookups(self, rows_BSH: Tensor, group: Group, tokens: OwnedTokens | None) -> Tensor:
        """The sum over ranks of embedding rows of which one rank has the row and the others zeros, or
        this rank's tokens of it."""

    @abstractmethod
    def row_maximum(self, x_BS: Tensor, group: Group) -> Tensor:
        """The maximum over ranks."""

    @abstractmethod
    def leaf_sums(self, x_BSC: Tensor, leaves: OwnedLeaves) -> Tensor:
        """What this rank brings to a sum over the features that ranks cut, as the vocabulary, [n, b, s]; `row_sums`
        finishes it."""

    @abstractmethod
    def row_sums(
        self, sums: Sequence[Tensor], leaves: OwnedLeaves, group: Group, single: Tensor | None = None
    ) -> list[Tensor]:
        """Over all ranks, in one exchange: every sum that `leaf_sums` has begun over equally many leaves, then the sum
        of `single` where that is given, which is zero on all ranks but one. All [b, s]."""

    @abstractmethod
    def sum_members(self, values: Tensor, summands: Summands, group: Group) -> Tensor:
        """[n, ...], a value for each of this member's nodes -> [...], the sum over all members,
        the same on every one."""

    @abstractmethod
    def sum_members_part(
        self, values: Tensor, summands: Summands, group: Group, dim: int, sizes: Sequence[int]
    ) -> Tensor:
        """This member's `sizes[rank]` items of `sum_members` along a dimension of [...]."""

    @abstractmethod
    def accumulator(self, num_samples: int, *, partial: bool = False) -> Accumulator:
        """An empty gradient over a global batch of `num_samples`; `partial` if its contributions (of `token_sums`,
        `head_sums`) wait for other ranks."""

    @abstractmethod
    def finish_parts(
        self, gradients: Mapping[str, Accumulator], group: Group, owned: Mapping[str, OwnedPart]
    ) -> dict[str, Accumulator]:
        """Sums over all tokens and heads, from what each rank has of its own, which `owned` says of every gradient. The
        accumulators are used up."""

    def want_rooms(self, num_elements: int, group: Group, *, whole: bool = False) -> None:
        """Asks for the memory that gradients of so many elements are sent from, in parts or `whole`, where the sums are
        the library's."""
        return

    @abstractmethod
    def reduce_gradients(
        self, gradients: Mapping[str, Accumulator], group: Group, samples_of: Callable[[int], tuple[int, int]]
    ) -> dict[str, Tensor]:
        """Finished sums over the global batch by name, the same on every member.

        `samples_of(member)` is the interval of the global batch that a member has seen. The accumulators are used up.
        """

    @abstractmethod
    def reduce_gradients_part(
        self, gradients: Mapping[str, Accumulator], copies: Copies, samples_of: Callable[[int], tuple[int, int]]
    ) -> Tensor:
        """This member's even part of `reduce_gradients` over `copies.whole`, of all elements one gradient after the
        other, cut over `copies.shard`: without hybrid sharding its first half."""

    @abstractmethod
    def sum(self, tensors: Iterable[Tensor]) -> Scalar:
        """The sum of all elements of fp32 tensors; of none it is zero."""

    @abstractmethod
    def sum_of_squares(self, tensors: Iterable[Tensor]) -> Scalar:
        """The sum of all squares of fp32 tensors."""


def flatten(tensors: Iterable[Tensor], out: Tensor | None = None) -> Tensor:
    """All elements one tensor after the other, in `out` where that is given."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return torch.cat(flat) if out is None else torch.cat(flat, out=out)


def unflatten(flat: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Views of a flat tensor by name: the inverse of `flatten`."""
    parts = flat.split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
