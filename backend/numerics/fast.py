"""`FastNumerics`: whole products and the library's reductions. Same layers, same schedules; bits
depend on the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.base.reduction import cut
from ...core.program.expert_tokens import ExpertNodes
from ..transport.base import Group
from .base import Numerics, flatten, unflatten
from .compiled import check_compiler
from .contributions import Accumulator, Contribution
from .copies import Copies
from .expert_rows import FastExpertNumerics
from .heads import OwnedHeads, OwnedPart
from .owned_leaves import OwnedLeaves
from .summands import Summands
from .token_product import AddedInPlace, LookupRows, TokenProduct
from .tokens import OwnedTokens


class FastNumerics(FastExpertNumerics, Numerics):
    """What a training run uses that needs speed only."""

    mode = "fast"

    def __init__(self, device: torch.device, gradient_dtype: torch.dtype = torch.float32, *, compiles: bool = False):
        """`gradient_dtype` is the format in which gradients are summed over microbatches and sent;
        ranks add them up in fp32. With `compiles` layers compute what lies between products in compiled kernels.
        Raises `PlanError` where there is no compiler for that."""
        super().__init__(device)
        self.gradient_dtype = gradient_dtype
        self.compiles = compiles
        if compiles:
            check_compiler(device)

    def project(self, x_BSF: Tensor, weight_CF: Tensor, leaves: OwnedLeaves) -> Tensor:
        return F.linear(x_BSF, weight_CF)

    def contract(
        self, x_BSC: Tensor, weight_CF: Tensor, leaves: OwnedLeaves, group: Group, tokens: OwnedTokens | None
    ) -> Tensor:
        return x_BSC @ weight_CF if group.size == 1 else super().contract(x_BSC, weight_CF, leaves, group, tokens)

    def partial_contract(self, x_BSC: Tensor, weight_CF: Tensor, leaves: OwnedLeaves) -> Tensor:
        return (x_BSC @ weight_CF).unsqueeze(0)

    def partial_sum(self, terms_BSLR: Tensor, leaves: OwnedLeaves) -> Tensor:
        return terms_BSLR.sum(2).unsqueeze(0)

    def finish_contract(
        self, partial: Tensor, leaves: OwnedLeaves, group: Group, tokens: OwnedTokens | None, dtype: torch.dtype
    ) -> Tensor:
        return _summed(group, partial[0], tokens)

    def multiply(self, x_BSK: Tensor, matrix_KN: Tensor) -> Tensor:
        return x_BSK @ matrix_KN

    def multiply_heads(self, left_BHMK: Tensor, right_BHKN: Tensor) -> Tensor:
        return left_BHMK @ right_BHKN

    def weight_gradient(self, x_BSC: Tensor, y_BSF: Tensor, leaves: OwnedLeaves) -> Contribution:
        return TokenProduct(x_BSC.flatten(0, 1), y_BSF.flatten(0, 1))

    def elementwise(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return function(x)

    def token_sums(self, x_BSN: Tensor, tokens: OwnedTokens | None = None) -> Contribution:
        return x_BSN.sum((0, 1), dtype=torch.float32)

    def head_sums(self, x_BSLQD: Tensor, heads: OwnedHeads | None) -> Contribution:
        return x_BSLQD.sum((0, 1, 2, 3), dtype=torch.float32)

    def embedding_gradient(self, ids_BS: Tensor, gradient_BSH: Tensor, num_rows: int) -> Contribution:
        return LookupRows(ids_BS, gradient_BSH, num_rows)

    def sum_lookups(self, rows_BSH: Tensor, group: Group, tokens: OwnedTokens | None) -> Tensor:
        return _summed(group, rows_BSH, tokens)

    def row_maximum(self, x_BS: Tensor, group: Group) -> Tensor:
        return group.all_reduce(x_BS, "max") if group.size > 1 else x_BS

    def leaf_sums(self, x_BSC: Tensor, leaves: OwnedLeaves) -> Tensor:
        return x_BSC.sum(-1).unsqueeze(0)

    def row_sums(
        self, sums: Sequence[Tensor], leaves: OwnedLeaves, group: Group, single: Tensor | None = None
    ) -> list[Tensor]:
        rows = [*sums] if single is None else [*sums, single.unsqueeze(0)]
        return list(_summed(group, torch.cat(rows), None))

    def sum_members(self, values: Tensor, summands: Summands, group: Group) -> Tensor:
        return _summed(group, values.sum(0), None)

    def sum_members_part(
        self, values: Tensor, summands: Summands, group: Group, dim: int, sizes: Sequence[int]
    ) -> Tensor:
        return _part_of_sum(group, values.sum(0), dim, sizes)

    def accumulator(self, num_samples: int, *, partial: bool = False) -> Accumulator:
        return FastAccumulator(self.gradient_dtype)

    def finish_parts(
        self, gradients: Mapping[str, Accumulator], group: Group, owned: Mapping[str, OwnedPart]
    ) -> dict[str, Accumulator]:
        """What ranks know of different tokens or heads is sent in fp32: vectors, which cost little."""
        finished: dict[str, Accumulator] = {name: FastAccumulator(self.gradient_dtype) for name in gradients}
        for name, total in self._reduced(gradients, group, wide=False).items():
            finished[name].add(0, total)
        return finished

    def reduce_gradients(
        self, gradients: Mapping[str, Accumulator], group: Group, samples_of: Callable[[int], tuple[int, int]]
    ) -> dict[str, Tensor]:
        return self._reduced(gradients, group, wide=self.gradient_dtype != torch.float32)

    def _reduced(self, gradients: Mapping[str, Accumulator], group: Group, *, wide: bool) -> dict[str, Tensor]:
        """Sums over the members in fp32; `wide` ones are sent in `gradient_dtype`."""
        totals = {
            name: accumulator.total
            for name, accumulator in gradients.items()
            if isinstance(accumulator, FastAccumulator)
        }
        if group.size == 1 or not totals:
            return {name: total.float() for name, total in totals.items()}
        if wide:
            summed = group.all_reduce(flatten(totals.values()), "sum", wide=True).float()
        else:
            num_elements = sum(total.numel() for total in totals.values())
            sent = group.room(next(iter(totals.values())).new_empty(0, dtype=torch.float32), num_elements)
            summed = group.all_reduce(flatten(totals.values(), out=sent), "sum", used_up=True)
        return unflatten(summed, {name: total.shape for name, total in totals.items()})

    def reduce_gradients_part(
        self, gradients: Mapping[str, Accumulator], copies: Copies, samples_of: Callable[[int], tuple[int, int]]
    ) -> Tensor:
        own, elements = self.scattered(gradients, copies.shard)
        return self.replicated(own, copies)[:elements].float()

    def scattered(self, gradients: Mapping[str, Accumulator], shard: Group) -> tuple[Tensor, int]:
        """This member's even part of the sums over `shard`, and its length: libraries add up parts of one
        length only, so shorter ones have a zero behind. Every accumulator is let go of as soon as it has its
        place in what is sent."""
        own = [each for each in gradients.values() if isinstance(each, FastAccumulator)]
        if shard.size == 1:
            flat = flatten(each.total for each in own)
            return flat, len(flat)
        elements = sum(each.total.numel() for each in own)
        bounds = [cut(elements, shard.size, member) for member in range(shard.size)]
        parts = shard.room(own[0].total, shard.size, bounds[0][1])
        for part, (lo, hi) in zip(parts, bounds, strict=True):
            part[hi - lo :].zero_()
        first = 0
        for each in own:
            total = each.total.reshape(-1)
            for part, (lo, hi) in zip(parts, bounds, strict=True):
                start, stop = max(lo, first), min(hi, first + len(total))
                if start < stop:
                    part[start - lo : stop - lo] = total[start - first : stop - first]
            first += len(total)
            del total
            each.held.clear()
        lo, hi = bounds[shard.rank]
        return shard.reduce_scatter(list(parts), wide=self.gradient_dtype != torch.float32), hi - lo

    def want_rooms(self, num_elements: int, group: Group, *, whole: bool = False) -> None:
        if whole and self.gradient_dtype == torch.float32:  # others are padded, and exchanged in parts
            group.want_room(num_elements * 4, 0)
        elif not whole:
            num_bytes = group.size * -(-num_elements // group.size) * self.gradient_dtype.itemsize
            group.want_room(num_bytes, num_bytes if self.gradient_dtype != torch.float32 else 0)

    def replicated(self, own: Tensor, copies: Copies) -> Tensor:
        """What `scattered` gave, added over those that keep equal parts."""
        if copies.replicate is None:
            return own
        return copies.replicate.all_reduce(
            own.to(self.gradient_dtype), "sum", wide=self.gradient_dtype != torch.float32
        )

    def expert_accumulator(self, num_samples: int, num_blocks: int) -> Accumulator:
        return FastAccumulator(self.gradient_dtype)

    def reduce_experts(
        self, gradients: Mapping[str, Accumulator], group: Group, nodes: Sequence[ExpertNodes]
    ) -> dict[str, Tensor]:
        return self.reduce_gradients(gradients, group, lambda _: (0, 0))

    def reduce_experts_part(
        self, gradients: Mapping[str, Accumulator], copies: Copies, nodes: Sequence[ExpertNodes]
    ) -> Tensor:
        return self.reduce_gradients_part(gradients, copies, lambda _: (0, 0))

    def sum(self, tensors: Iterable[Tensor]) -> FastSum:
        sums = [tensor.detach().sum(dtype=torch.float64) for tensor in tensors]
        return FastSum(torch.stack(sums).sum() if sums else self._zero)

    def sum_of_squares(self, tensors: Iterable[Tensor]) -> FastSum:
        """Rows are short enough for fp32; they are added up in fp64."""
        rows = [torch.linalg.vector_norm(_rows(tensor), dim=-1).double() for tensor in tensors if tensor.numel()]
        return FastSum(torch.cat(rows).square_().sum() if rows else self._zero)

    @property
    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)


class FastAccumulator:
    """A running sum in the order of arrival, kept in one format."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.held: list[Tensor] = []
        self._dtype = dtype

    @property
    def total(self) -> Tensor:
        """The sum so far. Raises ValueError when nothing has arrived."""
        if not self.held:
            raise ValueError("no microbatch has contributed to this gradient.")
        return self.held[0]

    def add(self, first_sample: int, contribution: Contribution) -> None:
        if isinstance(contribution, AddedInPlace):
            if self.held:
                contribution.add_to(self.held[0])
            else:
                self.held.append(contribution.total(self._dtype))
            return
        assert isinstance(contribution, Tensor)
        if self.held:
            self.held[0].add_(contribution)
        else:
            self.held.append(contribution.to(self._dtype))


@dataclass(frozen=True)
class FastSum:
    """A scalar summed in fp64: `value` is []."""

    value: Tensor

    def __float__(self) -> float:
        return float(self.value)

    def __add__(self, other: FastSum) -> FastSum:
        return FastSum(self.value + other.value)

    def over(self, group: Group) -> FastSum:
        """The sum over the members in the library's order."""
        if group.size == 1:
            return self
        return FastSum(group.all_reduce(self.value.reshape(1), "sum").reshape(()))


def _rows(tensor: Tensor) -> Tensor:
    """A tensor as a matrix of whatever lies in memory one after the other."""
    lies = tensor.mT if tensor.dim() > 1 and not tensor.is_contiguous() else tensor
    return lies.reshape(-1, lies.shape[-1])


def _summed(group: Group, tensor: Tensor, tokens: OwnedTokens | None) -> Tensor:
    """The sum over the members: whole, or this rank's tokens of it."""
    if group.size == 1:
        return tensor
    if tokens is None:
        return group.all_reduce(tensor, "sum")
    return _part_of_sum(group, tensor, 1, tokens.sizes)


def _part_of_sum(group: Group, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """This member's `sizes[rank]` items of the sum over the members along a dimension."""
    parts = tensor.split(list(sizes), dim)
    own = parts[group.rank]
    if len(set(sizes)) == 1:
        return group.reduce_scatter([part.reshape(-1) for part in parts]).view(own.shape)
    # no library adds up uneven parts
    return torch.stack(group.all_to_all(parts, [tuple(own.shape)] * group.size)).sum(0)
