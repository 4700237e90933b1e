"""A schedule as text for the log."""

from __future__ import annotations

from shardproof import Schedule


def rows(schedule: Schedule) -> str:
    """One line per pipeline rank."""
    return "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(schedule.rows()))
