"""`SampleSums`: what a microbatch adds to a gradient of exact numerics, computed into the sum it belongs to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload

from torch import Tensor

from ...core.base.reduction import CarryTree, Node, maximal_nodes, sibling


class SampleSums(Sequence[Tensor]):
    """One tensor for every sample, not computed yet; whoever reads an item gets a tensor of its own."""

    @abstractmethod
    def total(self, samples: Node) -> Tensor:
        """The sum over the samples of a node of the tree over them."""

    @abstractmethod
    def add_to(self, total: Tensor, samples: Node) -> None:
        """Adds `total(samples)` to a sum."""

    @overload
    def __getitem__(self, sample: int) -> Tensor: ...

    @overload
    def __getitem__(self, sample: slice) -> list[Tensor]: ...

    def __getitem__(self, sample: int | slice) -> Tensor | list[Tensor]:
        if isinstance(sample, slice):
            return [self[each] for each in range(*sample.indices(len(self)))]
        if not -len(self) <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}.")
        return self.total((sample % len(self), sample % len(self) + 1))

    def insert_into(self, batch: CarryTree[Tensor], first_sample: int) -> None:
        """Adds all samples to the tree over the samples of a global batch, whose next are these."""
        for lo, hi in maximal_nodes(batch.num_leaves, first_sample, first_sample + len(self)):
            own, other = (lo - first_sample, hi - first_sample), sibling(batch.num_leaves, (lo, hi))
            if other is None or other not in batch.nodes:
                batch.insert((lo, hi), self.total(own))
                continue
            total = batch.take(other)  # on the left or on the right: an addition has the same bits both ways
            self.add_to(total, own)
            batch.insert((min(lo, other[0]), max(hi, other[1])), total)
