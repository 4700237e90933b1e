"""Peers for kernels: processes of this host that share memory, started once, that run one job after the other.

A server process loads torch and Triton and forks the peers, so that they are loaded once, and with the environment that
a floor needs (`TRITON_INTERPRET`). Each peer maps the buffers and signal pads of all others, at other addresses in each
process. A kernel that waits too long says for whom; nothing is left behind.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Any, Self

import torch

from ...backend.kernels.kernel import Launcher
from ...backend.transport.symmetric.heap import Mapped, Neighbour, Region, SharedMemoryHeap
from ...backend.transport.symmetric.view import SymmetricMemory

INTERPRETED = "shardproof.verify.kernels.interpreter:launcher"
PTX_EXECUTED = "shardproof.verify.kernels.ptx_floor:launcher"
BUFFER_BYTES = 1 << 20
PAD_BYTES = 1 << 12
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 1e-4, 4e-3
"""How long a peer sleeps between two looks at a signal: each look is some hundred instructions that are carried out,
and a peer waits for seconds while another one compiles."""
MULTICAST = 1 << 60
"""An address that no process has; a floor that models multicast finds the peers' buffers in `Ground`."""


class PeersMissing(RuntimeError):
    """Peers did not come in time; `ranks` are those that others waited for or that never answered."""

    def __init__(self, ranks: tuple[int, ...], message: str):
        super().__init__(message)
        self.ranks = ranks


class PeerFailed(RuntimeError):
    """A job raised in a peer; the message has its traceback."""


class StillWaiting(RuntimeError):
    """In a peer: a signal did not come in time. `awaited` is whose."""

    def __init__(self, rank: int, awaited: int, block: int):
        super().__init__(f"rank {rank} waits for rank {awaited} in block {block}")
        self.awaited = awaited


class Ground:
    """What a floor's launcher stands on in a peer: its view of the memory, where every rank's buffer and pad begin in
    this process, and what to do while a signal has not come."""

    def __init__(self, rank: int, mapped: Sequence[Mapped], patience_s: float):
        self.pads = tuple(each.address for each in mapped)
        self.buffers = tuple(address + PAD_BYTES for address in self.pads)
        self._mapped = mapped
        whole = torch.frombuffer(mapped[rank].view, dtype=torch.uint8)
        self.memory = SymmetricMemory.of(rank, whole, self.pads, PAD_BYTES, MULTICAST - PAD_BYTES)
        self.patience_s = patience_s
        self.begin()

    def begin(self) -> None:
        """A launch begins: its patience is whole."""
        self._deadline = time.monotonic() + self.patience_s
        self._awaited, self._pause_s = 0, SHORTEST_PAUSE_S

    def failed(self, address: int) -> None:
        """A compare-and-swap at `address` found another value: sleeps, for peers that share a core with this one.

        Raises `StillWaiting` where the launch has waited longer than its patience.
        """
        if time.monotonic() < self._deadline:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if address == self._awaited else SHORTEST_PAUSE_S
            self._awaited = address
            time.sleep(self._pause_s)
            return
        for owner, pad in enumerate(self.pads):
            if pad <= address < pad + self.memory.pad_bytes:
                block, peer = divmod((address - pad) // 4, self.memory.world_size)
                raise StillWaiting(self.memory.rank, peer if owner == self.memory.rank else owner, block)
        raise RuntimeError(f"rank {self.memory.rank} waits at {address:#x}, which is in no signal pad")


@dataclass(frozen=True)
class Peer:
    """One rank in its process: its memory, on a device or not, and how it runs kernels."""

    memory: SymmetricMemory
    launch: Launcher


Job = Callable[..., Any]
"""`job(peer, *arguments)`, a function that a module defines, run in every peer."""


class Peers:
    """`world_size` processes on a floor. A context manager: leaving it ends them.

    `floor` names the function `launcher(ground) -> Launcher` as `module:function`, `environment` is set in the
    processes, and a kernel waits `patience_s` for its peers.
    """

    def __init__(
        self,
        world_size: int,
        floor: str = INTERPRETED,
        environment: Mapping[str, str] | None = None,
        patience_s: float = 60.0,
    ):
        self.world_size = world_size
        self.patience_s = patience_s
        pipes = [Pipe() for _ in range(world_size)]
        theirs = [connection.fileno() for _, connection in pipes]
        given = {"TRITON_INTERPRET": "1"} if environment is None else environment
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, repr((sys.path, theirs, floor, patience_s))],
            env={**os.environ, "OMP_NUM_THREADS": "1", **given},
            pass_fds=theirs,
            start_new_session=True,
        )
        self._connections: list[Connection] = [connection for connection, _ in pipes]
        for _, connection in pipes:
            connection.close()
        try:
            regions = self._answers(range(world_size), 120.0)
            for connection in self._connections:
                _send(connection, regions)
            self._answers(range(world_size), 60.0)
        except BaseException:
            self.close()
            raise

    def run(self, job: Job, *arguments: Any, world_size: int | None = None) -> list[Any]:
        """What `job(peer, *arguments)` returns in each of the first `world_size` peers, by rank.

        Raises `PeersMissing` where some did not come, `PeerFailed` where one raised. Pads are 0 again afterwards; where
        a peer has ended, all have.
        """
        ranks = range(world_size or self.world_size)
        try:
            for rank in ranks:
                _send(self._connections[rank], (job, len(ranks), arguments))
            return self._answers(ranks, 2 * self.patience_s)
        except PeersMissing as missing:
            self._renew(missing)
            raise
        except PeerFailed as failed:
            self._renew(failed)
            raise

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            connection.close()
        try:
            self._server.wait(5.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _renew(self, reason: Exception) -> None:
        """After a failure: pads at 0 where all peers are there, else no peers."""
        try:
            for connection in self._connections:
                _send(connection, (clear, self.world_size, ()))
            self._answers(range(self.world_size), 10.0)
        except (OSError, PeersMissing, PeerFailed) as error:
            reason.add_note(f"the peers were ended: {error}")
            self.close()

    def _answers(self, ranks: range, limit_s: float) -> list[Any]:
        """What each of `ranks` answers within `limit_s`, by rank."""
        deadline = time.monotonic() + limit_s
        answers: dict[int, Any] = {}
        pending = {self._connections[rank]: rank for rank in ranks}
        while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    answers[rank] = _receive(connection)
                except (EOFError, OSError):
                    answers[rank] = ("ended", None)
        return _values({rank: answers.get(rank, ("silent", None)) for rank in ranks})


def _send(connection: Connection, value: Any) -> None:
    """By value: a connection's own `send` has tensors fetched by whoever receives them."""
    connection.send_bytes(pickle.dumps(value))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _values(answers: Mapping[int, tuple[str, Any]]) -> list[Any]:
    """The values of the ranks, or what the reason is that there are none."""
    raised = [f"rank {rank}:\n{value}" for rank, (kind, value) in answers.items() if kind == "raised"]
    if raised:
        raise PeerFailed("\n".join(raised))
    gone = {rank for rank, (kind, _) in answers.items() if kind in ("ended", "silent")}
    waits = {rank: value for rank, (kind, value) in answers.items() if kind == "waits"}
    if gone or waits:
        awaited = {awaited for awaited, _ in waits.values()}
        missing = tuple(sorted(gone | (awaited - set(waits)) or awaited))
        lines = [f"rank {rank}: {answers[rank][0]}" for rank in sorted(gone)] + [text for _, text in waits.values()]
        raise PeersMissing(missing, f"ranks {list(missing)} did not come: {'; '.join(lines)}")
    return [value for _, value in answers.values()]


SERVER = (
    "import sys; path, *rest = eval(sys.argv[1]); sys.path[:] = path; "
    "from shardproof.verify.kernels.processes import serve; serve(*rest)"
)


def serve(connections: list[int], floor: str, patience_s: float) -> None:
    """The server's process: loads what a floor needs and forks a peer for each connection; ends after the last."""
    torch.set_num_threads(1)
    module, name = floor.split(":")
    make_launcher = getattr(importlib.import_module(module), name)
    for rank, descriptor in enumerate(connections):
        if os.fork() == 0:
            for other in connections:
                if other != descriptor:
                    os.close(other)
            try:
                _peer(rank, Connection(descriptor), make_launcher, patience_s)
            finally:
                os._exit(0)
    for descriptor in connections:
        os.close(descriptor)
    for _ in connections:
        os.wait()


def clear(peer: Peer) -> None:
    """A job: own pad and buffer at 0."""
    peer.memory.own.zero_()
    peer.memory.own_pad.zero_()


def _still_waiting(error: BaseException | None) -> StillWaiting | None:
    """The reason behind an error of Triton's interpreter, where it is that a peer has not come."""
    while error is not None and not isinstance(error, StillWaiting):
        error = error.__cause__
    return error


def _peer(rank: int, connection: Connection, make_launcher: Callable[[Ground], Launcher], patience_s: float) -> None:
    """A peer's process: shares memory, then runs jobs until the other end closes the connection."""
    heap = SharedMemoryHeap()
    region, own = heap.allocate(PAD_BYTES + BUFFER_BYTES)
    _send(connection, ("done", region))
    regions: list[Region] = _receive(connection)
    mapped = [own if peer == rank else Neighbour(each.process).map(each) for peer, each in enumerate(regions)]
    _send(connection, ("done", None))
    while True:
        try:
            job, world_size, arguments = _receive(connection)
        except EOFError:
            return
        ground = Ground(rank, mapped[:world_size], patience_s)
        try:
            answer = ("done", job(Peer(ground.memory, make_launcher(ground)), *arguments))
        except Exception as error:
            late = _still_waiting(error)
            answer = ("raised", traceback.format_exc()) if late is None else ("waits", (late.awaited, str(late)))
        _send(connection, answer)
