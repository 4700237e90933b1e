"""What is said when ranks fail, die or do not come further: the `RankFailure` of each case, with what
all ranks were doing."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Mapping, Sequence

from ...core.base.errors import RankDefect, RankFailure
from .halt import Halt, explain, last_words
from .rank_messages import Failure, Whereabouts
from .watch import Board


def root_cause(failures: Sequence[Failure], ended: Mapping[int, int], board: Board) -> RankFailure:
    """The failure to report: a process that ended, else an error of a rank's own, else one that only noticed a peer.
    Where no error says what happened, the board does."""
    if ended:
        rank, exit_code = next(iter(ended.items()))
        summary = f"rank {rank} {describe_exit(exit_code)} before its work was done"
        return _explained(summary, last_words(board, list(ended)), rank, others="all other ranks")
    failure = min(failures, key=lambda failure: failure.by_peer)
    summary = f"rank {failure.global_rank} failed: {failure.summary}"
    halt = last_words(board, [failure.global_rank])
    kind = RankDefect if failure.is_defect else RankFailure
    raised = kind(summary, failure.global_rank, halt.report(summary))
    raised.__cause__ = pickle.loads(failure.error) if failure.error else None
    raised.add_note(failure.trace)
    return raised


def describe_exit(exit_code: int) -> str:
    """`ended with exit code 3`, `was killed by SIGKILL ...`: how a process ended, from its exit
    code (minus the signal)."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = (
        " (often the kernel, out of memory)"
        if name == "SIGKILL"
        else (" (its last words are above)")
        if name == "SIGABRT"
        else ""
    )
    return f"was killed by {name}{hint}"


def late(found: Mapping[int, Whereabouts | None], board: Board, timeout_s: float) -> RankFailure:
    """The failure of a job that took too long: names the ranks that wait for nobody, else what all wait in."""
    halt = explain(found, board)
    if halt.is_circle or not halt.holders:
        return _explained(f"the ranks still wait for each other after {timeout_s:g} s", halt, None)
    return _explained(f"{_named_ranks(halt.holders)} did not finish within {timeout_s:g} s", halt, halt.holders[0])


def not_begun(found: Mapping[int, Whereabouts | None], board: Board, setup_s: float) -> RankFailure:
    """The failure of a run whose set-up takes too long: says where every rank is in it."""
    return _explained(f"no rank has begun its first step {setup_s:g} s after the start", explain(found, board), None)


def stalled(found: Mapping[int, Whereabouts | None], board: Board, stall_s: float) -> RankFailure:
    """The failure of a job in which no rank comes further: names those that the others wait for."""
    halt = explain(found, board)
    summary = f"no rank has come further for {stall_s:g} s"
    if halt.is_circle:
        return _explained(f"{summary}: {_named_ranks(halt.holders)} wait for each other", halt, None)
    if not halt.holders:
        return _explained(summary, halt, None)
    holds = "holds" if len(halt.holders) == 1 else "hold"
    return _explained(f"{summary}: {_named_ranks(halt.holders)} {holds} up the others", halt, halt.holders[0])


def _explained(summary: str, halt: Halt, global_rank: int | None, *, others: str = "all ranks") -> RankFailure:
    lines = "".join(f"\n  {line}" for line in halt.lines)
    return RankFailure(f"{summary}; {others} were ended.{lines}", global_rank, halt.report(summary))


def _named_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
