"""`OpenSums`: sums over the tokens of sequences of which a rank has a part (context parallelism)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ...core.base.reduction import Node

OpenKind = Literal["blocks", "tokens", "heads"]
"""What the leaves of an open sum are: the token blocks of weight gradients, the finer ones of sums over
tokens, those of every head."""


@dataclass(frozen=True)
class OpenSums:
    """What one microbatch adds to a gradient on a rank that has a part of its sequences.

    `nodes[cp_rank]` are the nodes of the tree over `num_leaves` that a rank has, `samples[i]` this rank's
    values of them for sample i.
    """

    kind: OpenKind
    num_leaves: int
    nodes: tuple[tuple[Node, ...], ...]
    samples: list[list[Tensor]]
