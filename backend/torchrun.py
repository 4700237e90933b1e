"""Ranks that torchrun, or a launcher that speaks its environment variables, has started: the way in, and the failure of one of them."""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..core.errors import RankDefect, RankFailure, error_words
from .pipeline.halt import last_words
from .pipeline.watch import Board

if TYPE_CHECKING:
    import torch.distributed as dist

    from .transport.base import Transport


def under_torchrun() -> bool:
    """True when torchrun, or another launcher that speaks its environment variables, started this process as a rank."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def torchrun_transport(device: str | None = None, backend: Literal["gloo", "nccl"] = "gloo", timeout_s: float | None = None) -> Transport:
    """The transport of a process that torchrun started; with NCCL it uses GPU `LOCAL_RANK` unless `device` says otherwise.

    A call fails when its peers have not come for `timeout_s`. The ranks of one machine share a board, which tells what each was doing then.
    A process may make several, one after the other, if all ranks do.

    Keys carry torchrun's restart count: a restarted worker would otherwise read the addresses that the workers before it left behind.
    """
    import torch
    import torch.distributed as dist

    from .transport.base import DEFAULT_TIMEOUT_S
    from .transport.process_group import ProcessGroupTransport

    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = _store(address, port, is_master=is_master)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    device = device or ("cpu" if backend == "gloo" else f"cuda:{os.environ.get('LOCAL_RANK', rank)}")
    run = f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}-{port}-{attempt}"
    board = Board(Path(tempfile.gettempdir(), f"shardproof-board-{run}"), world_size, create=True)
    atexit.register(board.remove)
    return ProcessGroupTransport(
        dist.PrefixStore(f"shardproof/{attempt}", store),
        rank,
        world_size,
        backend=backend,
        device=device,
        timeout_s=timeout_s or DEFAULT_TIMEOUT_S,
        board=board,
    )


@functools.cache
def _store(address: str, port: int, *, is_master: bool) -> dist.Store:
    """The store that all ranks share. It stays until the process ends: rank 0 may serve it, and others read it when rank 0 has left."""
    import torch.distributed as dist

    return dist.TCPStore(address, port, is_master=is_master, wait_for_workers=False, timeout=timedelta(seconds=60))


def failed(transport: Transport, error: Exception) -> RankFailure:
    """The failure of a rank that torchrun started and that raised `error`, which is not one of the user's input."""
    from .rank_errors import place_of, whose

    rank, origin = transport.global_rank, whose(error)
    place = "" if origin == "foreseen" else place_of(error, transport.recorder, transport.watch)
    kind = RankDefect if origin == "defect" else RankFailure
    return kind(f"rank {rank} failed: {error_words(error)}{place}", rank)


def gave_up(transport: Transport, error: Exception) -> RankFailure:
    """The failure of a rank that torchrun started and whose call `error` says was in vain, with what all ranks of this machine did."""
    board, rank = transport.watch.board, transport.global_rank
    summary = f"rank {rank} gave up: {error}"
    if board is None:
        return RankFailure(summary, rank)
    halt = last_words(board, [rank])
    return RankFailure("\n  ".join([summary, *halt.lines]), rank, halt.report(summary))
