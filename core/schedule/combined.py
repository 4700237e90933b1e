"""Combined 1F1B: in the steady state every forward runs together with a backward of another microbatch, each
under the other's messages.

Megatron-Core (`combined_1f1b.py`, `--overlap-moe-expert-parallel-comm`) pairs them to hide the all-to-all of experts,
on one rank or over chunks; the same pairs without chunks are added here. Both inputs of a pair must be there when it
starts. A gradient needs one pair more than in 1F1B to come back from the next rank, so neighbours differ by two warm-up
forwards, as they do with chunks, and every rank runs one more so that its first backward finds a forward to pair with.
"""

from __future__ import annotations

import numpy as np

from .action import ActionArray, Kind
from .interleaved import group_size, schedule_table
from .placement import Placement
from .schedule import Schedule


def combined(pp: int, num_microbatches: int, vpp: int = 1, microbatch_group_size: int | None = None) -> Schedule:
    """Warm-up forwards, pairs (F;B), the backwards that are left. With vpp=1 one stage per rank, else
    chunks as in interleaved 1F1B.

    Rank r warms up with 2(p-1-r) + (v-1)N + 1 forwards, at most all mv of them (Megatron's count with
    `overlap_moe_ep`), and holds one activation more than that, if there are as many. With F, B and F&B (a pair, no
    shorter than either) as seconds of one chunk the makespan is vp(F+B) + (mv - (v-1)p - 1)F&B, for v=1 whatever m,
    else where p divides m. So where a pair takes F+B the bubble is that of interleaved 1F1B, (p-1)(F+B).
    `microbatch_group_size` N as there. Raises `ScheduleError`.
    """
    group = group_size(pp, num_microbatches, microbatch_group_size) if vpp > 1 else num_microbatches
    table = np.array(schedule_table(num_microbatches, vpp, group))
    total = num_microbatches * vpp
    warmups = [min(2 * (pp - 1 - rank) + (vpp - 1) * group + 1, total) for rank in range(pp)]
    rows = [_row(table, warmup, rank, pp, vpp) for rank, warmup in enumerate(warmups)]
    offsets = np.cumsum([0, *(len(row[0]) for row in rows)])
    actions = ActionArray(*(np.concatenate(columns) for columns in zip(*rows, strict=True)))
    return Schedule("Combined1F1B", Placement.loop(pp, pp * vpp, num_microbatches), actions, offsets)


def _row(table: np.ndarray, warmup: int, rank: int, pp: int, vpp: int) -> tuple[np.ndarray, ...]:
    """The five columns of an `ActionArray` for one rank."""
    total = len(table)
    kind = np.repeat(np.array([Kind.F, Kind.OVERLAP_F_B, Kind.B], dtype=np.int8), [warmup, total - warmup, warmup])
    forward, backward = kind != Kind.B, kind != Kind.F
    forward_microbatch, forward_chunk = table[np.cumsum(forward) - 1].T
    backward_microbatch, backward_chunk = table[np.cumsum(backward) - 1].T
    forward_stage, backward_stage = forward_chunk * pp + rank, (vpp - 1 - backward_chunk) * pp + rank
    pair = forward & backward
    return (
        np.where(forward, forward_stage, backward_stage),
        kind,
        np.where(forward, forward_microbatch, backward_microbatch),
        np.where(pair, backward_stage, -1),
        np.where(pair, backward_microbatch, -1),
    )
