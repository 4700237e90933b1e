"""Interleaved 1F1B (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section
2.2), in Megatron's order.

A *virtual microbatch* is one microbatch in one chunk. Forwards run groups of `microbatch_group_size` microbatches
through chunk 0, then the same group through chunk 1 and so on; backwards take the chunks the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..base.errors import ScheduleError
from . import one_f_one_b
from .placement import Placement
from .rows import assemble, count_within_kind, one_forward_one_backward
from .schedule import Schedule


def interleaved(pp: int, num_microbatches: int, vpp: int, microbatch_group_size: int | None = None) -> Schedule:
    """`vpp` chunks per rank, chunk c of rank r being stage c*p+r. Divides the bubble of 1F1B by vpp.

    `microbatch_group_size` N must lie in [p, m], and m mod N must be 0 or at least p (Megatron's rules); the
    default is the smallest such N, which is p when p divides m. With fewer microbatches than ranks the only group
    is all of them. Raises `ScheduleError`.
    """
    group = group_size(pp, num_microbatches, microbatch_group_size)
    table = np.array(schedule_table(num_microbatches, vpp, group))
    kinds, stages, microbatches = [], [], []
    for rank, count in enumerate(warmup_counts(pp, num_microbatches, vpp=vpp, group=group)):
        row = one_forward_one_backward(count.total, count.warmup)
        microbatch, chunk = table[count_within_kind(row)].T
        kinds.append(row)
        stages.append(np.where(row == 0, chunk, vpp - 1 - chunk) * pp + rank)
        microbatches.append(microbatch)
    return assemble("Interleaved1F1B", Placement.loop(pp, pp * vpp, num_microbatches), kinds, stages, microbatches)


def schedule_table(num_microbatches: int, vpp: int, group: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) of every virtual microbatch, in forward order.

    >>> schedule_table(3, 2, 2)
    [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    """
    return [
        (microbatch, chunk)
        for first in range(0, num_microbatches, group)
        for chunk in range(vpp)
        for microbatch in range(first, min(first + group, num_microbatches))
    ]


@dataclass(frozen=True)
class WarmupCount:
    """How one rank's virtual microbatches split: `warmup` forwards first, `remaining`
    forward-backward pairs after them."""

    total: int
    warmup: int

    @property
    def remaining(self) -> int:
        """Forwards that run paired with a backward."""
        return self.total - self.warmup

    @property
    def all_in_warmup(self) -> bool:
        """True when no forward is left for the steady state."""
        return self.warmup == self.total


def warmup_counts(
    pp: int,
    num_microbatches: int,
    *,
    vpp: int = 1,
    group: int | None = None,
    forward_only: bool = False,
    overlap_moe_ep: bool = False,
) -> list[WarmupCount]:
    """Megatron's warm-up counts, one per pipeline rank: 2(p-1-rank) + (v-1)N with chunks,
    p-1-rank without, at most all.

    `overlap_moe_ep` hides one chunk's expert all-to-all under another's compute, which takes one more forward in flight
    (with chunks only). `forward_only` makes everything warm-up.
    """
    group = pp if group is None else group
    counts = []
    for rank in range(pp):
        if forward_only:
            warmup = num_microbatches * vpp
        elif vpp > 1:
            warmup = 2 * (pp - 1 - rank) + (vpp - 1) * group + int(overlap_moe_ep)
        else:
            warmup = one_f_one_b.num_warmup(pp, rank, num_microbatches)
        counts.append(WarmupCount(num_microbatches * vpp, min(warmup, num_microbatches * vpp)))
    return counts


def group_size(pp: int, num_microbatches: int, asked: int | None) -> int:
    """The `microbatch_group_size` that was asked for, or the default. Raises `ScheduleError`
    outside of Megatron's rules."""
    if num_microbatches < pp:
        legal = [num_microbatches]
    else:
        legal = [n for n in range(pp, num_microbatches + 1) if num_microbatches % n == 0 or num_microbatches % n >= pp]
    if asked is None:
        return legal[0]
    if asked not in legal:
        nearest = min(legal, key=lambda n: abs(n - asked))
        raise ScheduleError(
            f"microbatch_group_size={asked} does not fit pp={pp} and {num_microbatches} microbatches: it must lie "
            "between "
            f"min(pp, microbatches)={min(pp, num_microbatches)} and {num_microbatches}, and a last group that is not "
            "full must still hold "
            "at least pp microbatches. "
            f"Use microbatch_group_size={nearest}."
        )
    return asked
