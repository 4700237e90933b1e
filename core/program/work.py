"""The nouns of the program: products, collectives, messages, and what one layer does with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..model.roles import Role

CollectiveOp = Literal["all_to_all", "all_gather", "all_reduce", "reduce_scatter"]

EXACT_SCALAR_BYTES = 24 * 8
"""Payload of an exactly summed scalar: 23 limbs of 32 bits and a word of flags, each in an int64
(`backend.numerics.exact_sum`)."""
FAST_SCALAR_BYTES = 8
"""Payload of a scalar summed in fp64."""
PARTIAL_BYTES = 4
"""Partial sums, gradients and softmax statistics are sent in fp32 whatever the precision of the products."""


@dataclass(frozen=True)
class Product:
    """`count` matrix products [m, k] x [k, n] of one layer.

    `grouped` means that one kernel runs them all, one per local expert; m (k in a weight gradient) is then the mean
    number of tokens of an expert. `dtype` is given where the operands are not in the plan's precision.
    """

    layer: str
    m: int
    n: int
    k: int
    count: int = 1
    grouped: bool = False
    dtype: Literal["fp32"] | None = None

    @property
    def flops(self) -> int:
        """Multiply-adds counted as two."""
        return 2 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Collective:
    """One collective call of one rank: `sent_bytes` leave this rank for the others of its group over `axis`.

    | axis | group |
    |---|---|
    | `tp`, `cp` | one axis of the dense grid (`Layout.groups`) |
    | `tp_cp` | both: all ranks that have parts of one sequence |
    | `cp_inner`, `cp_outer` | neighbours of cp that exchange heads; ranks of cp that are `layout.cp_inner` apart |
    | `ep`, `etp` | one axis of the expert grid (`Layout.expert_groups`, where `etp` is called `tp`) |
    | `dp` | copies of dense parameters: the dp and cp axes of the dense grid together |
    | `edp` | copies of experts: the dp axis of the expert grid |
    | `replica`, `expert_replica` | the same with the pipeline ranks that hold replicas of the stage |
    | `dp_shard`, `edp_shard` | hybrid sharding: consecutive members of `dp` or `edp` that hold one copy together |
    | `dp_replicate`, `edp_replicate` | hybrid sharding: the members with equal places in those groups |
    | `model`, `embedding` | tp and pp together; first and last stage |
    """

    layer: str
    op: CollectiveOp
    axis: str
    group_size: int
    sent_bytes: int


@dataclass(frozen=True)
class Message:
    """One point-to-point message between neighbouring stages."""

    layer: str
    num_bytes: int


Operation = Product | Collective | Message
Operations = tuple[Operation, ...]


@dataclass(frozen=True)
class Op:
    """What one layer computes and sends for one microbatch on one rank.

    `recomputed` are the operations that the plan's recompute mode repeats before the input gradient. Of an attention
    core with a `window` shorter than the sequences a query needs so many keys; products are over the full square.
    """

    layer: str
    role: Role
    forward: Operations
    input_gradient: Operations
    weight_gradient: Operations
    recomputed: Operations = ()
    window: int = 0


def activation_bytes(dtype: str) -> int:
    """Bytes per element of a hidden state: 4 for fp32, else 2 (with fp8 only the operands of products are narrower)."""
    return 4 if dtype == "fp32" else 2


def weight_bytes(dtype: str) -> int:
    """Bytes per element of a weight as products and parameter gathers see it: 4 for fp32, else 2."""
    return 4 if dtype == "fp32" else 2


def scattered_bytes(payload_bytes: int, size: int) -> int:
    """Bytes that leave each rank in a ring reduce-scatter, or in an all-to-all of equal parts: (n-1)/n of
    the payload, rounded up."""
    return -(-(size - 1) * payload_bytes // size)
