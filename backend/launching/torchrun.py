"""Ranks that torchrun, or a launcher that speaks its environment variables, has started: the way in, and the
failure of one of them."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...core.base.errors import RankDefect, RankFailure, error_words
from ...core.base.terminal import say
from ..transport.interfaces import is_one_host, loopback_variables
from ..watch.halt import last_words
from ..watch.watch import Board

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..transport.base import Transport


def under_torchrun() -> bool:
    """True when torchrun, or another launcher that speaks its environment variables, started this process as a rank."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def torchrun_transport(
    device: str | None = None,
    backend: Literal["shm", "gloo", "nccl", "kernels"] = "shm",
    timeout_s: float | None = None,
    groups: Mapping[str, dist.ProcessGroup] | None = None,
) -> Transport:
    """The transport of a process that torchrun started; with NCCL it uses GPU `LOCAL_RANK` unless
    `device` says otherwise.

    A call fails when its peers have not come for `timeout_s`. The ranks of one machine share a board, which shows what
    each was doing then. A process may make several, one after the other, if all ranks do. Where all ranks are on one
    machine they listen on loopback, unless the environment names interfaces. `groups` by axis are used in place of new
    ones (`given`); ranks then meet in the store of torch's default group, which the user has made.

    Keys carry torchrun's restart count: a restarted worker would otherwise read the addresses that the
    workers before it left behind.
    """
    import torch
    import torch.distributed as dist

    from ..transport.base import DEFAULT_TIMEOUT_S
    from ..transport.given import GivenGroups
    from ..transport.process_group import ProcessGroupTransport, own_part

    torch.set_num_threads(1)
    if is_one_host(os.environ):
        for name, interface in loopback_variables().items():
            os.environ.setdefault(name, interface)
    if groups is None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        shared = _store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=is_master)
    else:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        shared = dist.distributed_c10d._get_default_store()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = own_part(dist.PrefixStore(f"shardproof/{attempt}", shared), world_size)
    timeout_s, board = timeout_s or DEFAULT_TIMEOUT_S, _shared_board(store, world_size)
    given = None if groups is None else GivenGroups(groups, store, rank, world_size)
    transport: ProcessGroupTransport
    if backend == "shm":
        from ..transport.symmetric.shared_memory import SharedMemoryTransport

        transport = SharedMemoryTransport(store, rank, world_size, timeout_s=timeout_s, board=board)
    else:
        device = device or ("cpu" if backend == "gloo" else f"cuda:{os.environ.get('LOCAL_RANK', rank)}")
        if backend == "kernels":
            from ..kernels.transport import KernelTransport

            transport = KernelTransport(store, rank, world_size, device=device, timeout_s=timeout_s, board=board)
        else:
            transport = ProcessGroupTransport(
                store, rank, world_size, backend=backend, device=device, timeout_s=timeout_s, board=board
            )
    transport.given = given
    return transport


@functools.cache
def _store(address: str, port: int, *, is_master: bool) -> dist.Store:
    """The store that all ranks share. It stays until the process ends: rank 0 may serve it, and others read it
    when rank 0 has left."""
    import torch.distributed as dist

    listener = _listener(address, port) if is_master else None
    return dist.TCPStore(
        address,
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listener(address: str, port: int) -> socket.socket | None:
    """A socket that listens on the master's address alone, where the store by itself would on every interface. None
    where this machine has not that address: others may reach it through one that is translated on the way."""
    for family, kind, protocol, _, place in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(socket.SOMAXCONN)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    print(
        (f"MASTER_ADDR={address} is no address of this machine, so the store listens on all interfaces: docs/hosts.md"),
        file=sys.stderr,
    )
    return None


def _shared_board(store: dist.Store, world_size: int) -> Board | None:
    """The board that the ranks of this machine share: that of the first of them to come. None where the system has none
    without a name, and a rank's own where it may not open that of others, as in a container of its own."""
    try:
        own = Board.nameless(world_size)
    except OSError:
        return None
    first = store.compare_set(f"board/{_machine()}", "", own.address).decode()
    if first == own.address:
        return own
    try:
        return Board.at(first, world_size)
    except OSError:
        return own


def _machine() -> str:
    """What the processes have in common that see each other under the same ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{Path('/proc/self/ns/pid').stat().st_ino}"


@contextlib.contextmanager
def set_up_within(transport: Transport, setup_s: float) -> Iterator[None]:
    """Ends this process, a rank, with exit code 2 where it walks over no row of a schedule `setup_s` after the body has
    begun, and says where it is."""

    def check() -> None:
        if transport.watch.phase:
            return
        from .rank import whereabouts

        at = whereabouts(transport.global_rank)[transport.global_rank]
        doing = f"waits in {', '.join(at.waits)}" if at.waits else f"is in {at.at}"
        text = f"rank {transport.global_rank} has not begun its first step within train.setup_timeout_s={setup_s:g}: it"
        say(f"{text} {doing}.", sys.stderr, flush=True)
        os._exit(2)

    timer = threading.Timer(setup_s, check)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def failed(transport: Transport, error: Exception) -> RankFailure:
    """The failure of a rank that torchrun started and that raised `error`, which is not one of the user's input."""
    from ..watch.rank_errors import place_of, whose

    rank, origin = transport.global_rank, whose(error)
    place = "" if origin == "foreseen" else place_of(error, transport.recorder, transport.watch)
    kind = RankDefect if origin == "defect" else RankFailure
    return kind(f"rank {rank} failed: {error_words(error)}{place}", rank)


def gave_up(transport: Transport, error: Exception) -> RankFailure:
    """The failure of a rank that torchrun started and whose call `error` says was in vain, with what all
    ranks of this machine did."""
    board, rank = transport.watch.board, transport.global_rank
    summary = f"rank {rank} gave up: {error}"
    if board is None:
        return RankFailure(summary, rank)
    halt = last_words(board, [rank])
    return RankFailure("\n  ".join([summary, *halt.lines]), rank, halt.report(summary))
