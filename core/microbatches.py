"""How many microbatches a data-parallel rank runs per step, for a constant global batch."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import PlanError


@dataclass(frozen=True)
class Microbatches:
    """`num_microbatches` per data-parallel rank and step; `running_global` is the global batch really run, in sequences."""

    num_microbatches: int
    running_global: int


def constant_microbatches(global_size: int, micro_size: int, dp: int, *, decrease_if_needed: bool = False) -> Microbatches:
    """Microbatches of a constant batch: global / (micro * dp).

    With `decrease_if_needed` a global batch that does not divide is rounded down to one that does. Raises `PlanError` when it does
    not divide, or when not even one microbatch is left.

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


def microbatch_counts(global_size: int, micro_size: int, dp: int) -> tuple[int, ...]:
    """The numbers of microbatches that data-parallel ranks have, the largest first: one, or two that differ by one; none where the
    batch is no whole microbatches or has fewer than ranks.

    >>> microbatch_counts(12, 2, 3), microbatch_counts(14, 2, 3), microbatch_counts(4, 2, 3)
    ((2,), (3, 2), ())
    """
    count, rest = divmod(global_size // micro_size, dp)
    if count == 0 or global_size % micro_size:
        return ()
    return (count + 1, count) if rest else (count,)
