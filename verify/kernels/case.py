"""`Case`: some calls of a kernel, as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """`calls` calls of a kernel on elements of `dtype` by `num_blocks` blocks of `block`.

    `n` elements a rank, or rows (tokens) of `width` elements. Sums are over `leaves`, cut among the ranks; 0 says one a
    rank. `slow_rank` comes later than the others. Of products, `n` rows and `width` columns of sums over `k`, which are
    `any_numbers` or such as every order inside a leaf adds to the same bits.
    """

    kernel: str
    world_size: int
    dtype: str
    n: int
    width: int = 1
    leaves: int = 0
    block: int = 64
    num_blocks: int = 2
    calls: int = 2
    slow_rank: int | None = None
    k: int = 0
    any_numbers: bool = False

    def __str__(self) -> str:
        size = f"{self.n}" if self.width == 1 and not self.k else f"{self.n}x{self.width}"
        size += (f"x{self.k}" if self.k else "") + ("-any" if self.any_numbers else "")
        leaves = f"-{self.leaves}leaves" if self.leaves else ""
        slow = "" if self.slow_rank is None else f"-slow{self.slow_rank}"
        blocks = f"{self.num_blocks}x{self.block}"
        return f"{self.kernel}-w{self.world_size}-{self.dtype}-{size}{leaves}-by{blocks}{slow}"

    @property
    def type(self) -> torch.dtype:
        """Of the elements."""
        return DTYPES[self.dtype]

    @property
    def ranks(self) -> range:
        """Of the group."""
        return range(self.world_size)
