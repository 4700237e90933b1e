"""`LookupSums`: gradients of tables of which a microbatch looked up some rows, in exact numerics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.base.reduction import Node
from .sample_sums import SampleSums
from .tree import tree_fold


@dataclass(frozen=True)
class LookupSums(SampleSums):
    """For every sample [num_rows, h], the sums of `gradient_BSH`, fp32, over the tokens that looked up each row, in the
    order of their positions. An id of `num_rows` belongs to another rank.

    Rows that nobody looked up are left alone where this is added to a sum: adding their zeros changes no bit, because
    no such sum is -0.0. It begins at 0.0, and a sum is -0.0 only where both of its terms are.
    """

    ids_BS: Tensor
    gradient_BSH: Tensor
    num_rows: int

    def __len__(self) -> int:
        return len(self.ids_BS)

    def total(self, samples: Node) -> Tensor:
        rows, values = self._looked_up(samples)
        return self.gradient_BSH.new_zeros(self.num_rows, values.shape[1]).index_copy_(0, rows, values)

    def add_to(self, total: Tensor, samples: Node) -> None:
        rows, values = self._looked_up(samples)
        total.index_add_(0, rows, values)

    def _looked_up(self, samples: Node) -> tuple[Tensor, Tensor]:
        """The rows that samples looked up, each once, and their sums over the samples, [rows, h]."""
        here = slice(*samples)
        rows, places_BS = torch.unique(self.ids_BS[here], return_inverse=True)
        sums = [
            torch.ops.aten.embedding_dense_backward(gradient_SH, places_S, len(rows), -1, False)
            for places_S, gradient_SH in zip(places_BS, self.gradient_BSH[here], strict=True)
        ]
        values, count = tree_fold(torch.stack(sums), 0), int((rows < self.num_rows).sum())
        return rows[:count], values[:count]
