"""How many microbatches a data-parallel rank runs per step, for a constant global batch."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.errors import PlanError
from ..base.reduction import cut


@dataclass(frozen=True)
class Microbatches:
    """`num_microbatches` per data-parallel rank and step; `running_global` is the global batch
    really run, in sequences."""

    num_microbatches: int
    running_global: int


def constant_microbatches(
    global_size: int, micro_size: int, dp: int, *, decrease_if_needed: bool = False
) -> Microbatches:
    """Microbatches of a constant batch: global / (micro * dp).

    With `decrease_if_needed` a global batch that does not divide is rounded down to one that does. Raises `PlanError`
    when it does not divide, or when not even one microbatch is left.

    >>> constant_microbatches(33, 8, 2, decrease_if_needed=True)
    Microbatches(num_microbatches=2, running_global=32)
    """
    per_microbatch = micro_size * dp
    num_microbatches, rest = divmod(global_size, per_microbatch)
    if num_microbatches == 0 or (rest and not decrease_if_needed):
        nearest = {max(1, num_microbatches) * per_microbatch, (num_microbatches + 1) * per_microbatch}
        raise PlanError(
            f"global={global_size} is no multiple of micro*dp={micro_size}*{dp}={per_microbatch}. "
            f"Use global = {' or '.join(map(str, sorted(nearest)))}, or another micro or dp."
        )
    return Microbatches(num_microbatches, num_microbatches * per_microbatch)


def own_microbatches(total: int, dp: int, dp_rank: int, multiple: int = 1) -> tuple[int, int]:
    """The microbatches `[lo, hi)` of a global batch of `total` that a data-parallel rank runs. Where dp does not divide
    them, earlier ranks have one more, or `multiple` more where a schedule runs so many in one go.

    >>> [own_microbatches(14, 3, rank) for rank in range(3)]
    [(0, 5), (5, 10), (10, 14)]
    >>> [own_microbatches(14, 3, rank, multiple=2) for rank in range(3)]
    [(0, 6), (6, 10), (10, 14)]
    """
    unit = multiple if total % dp and total % multiple == 0 and total // multiple >= dp else 1
    lo, hi = cut(total // unit, dp, dp_rank)
    return lo * unit, hi * unit


def microbatch_counts(global_size: int, micro_size: int, dp: int, multiple: int = 1) -> tuple[int, ...]:
    """The numbers of microbatches that data-parallel ranks have, the largest first: one, or two (`own_microbatches`);
    none where the batch is no whole microbatches or has fewer than ranks.

    >>> microbatch_counts(12, 2, 3), microbatch_counts(14, 2, 3), microbatch_counts(4, 2, 3)
    ((2,), (3, 2), ())
    """
    total, rest = divmod(global_size, micro_size)
    ends = (own_microbatches(total, dp, dp_rank, multiple) for dp_rank in (0, dp - 1))
    most, least = (hi - lo for lo, hi in ends)
    if rest or not least:
        return ()
    return (most, least) if most > least else (most,)
