"""Ranks on this machine: `run_ranks` for one job, `Workers` to keep the processes between jobs. Those of
torchrun: `torchrun.py`.

This module does not need torch: the ranks are forked by a server process that has loaded it (`rank_server.py`), with
one thread each and with MKL's reproducible mode on. A job that fails, dies or takes too long ends all ranks, and
`RankFailure` says which one it was.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import multiprocessing.spawn
import os
import pickle
import pickletools
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ...core.base.errors import MissingExtraError, RankFailure
from ..base.mkl import WORKSPACE, WORKSPACE_VARIABLE, mkl_switch
from ..transport.interfaces import loopback_variables
from ..watch.rank_failures import late, not_begun, root_cause, stalled
from ..watch.rank_messages import (
    NAMES_LENGTH,
    RANK_ENDED,
    RANK_VARIABLE,
    Failure,
    Job,
    Whereabouts,
)
from ..watch.rank_messages import (
    ON_GPUS as ON_GPUS,
)
from ..watch.rank_messages import (
    TransportName as TransportName,  # of those that may not use the watch
)
from ..watch.stop import SERVER_BLOCKS
from ..watch.watch import Board
from .stopping import Stopping

if TYPE_CHECKING:
    from ..transport.base import Transport

ROOT_CAUSE_WAIT_S = 2.0
"""A rank that lost a peer may report before the peer's own end is known; so long the cause is waited for."""
WHEREABOUTS_WAIT_S = 2.0
"""How long ranks that are over time may take to say where they are."""
END_WAIT_S = 5.0
"""How long killed ranks may take to be gone."""
STALL_CHECKS = 20
"""How many times in a stall's time limit it is seen whether any rank has moved."""


def run_ranks(
    job: Callable[[Transport, Any], Any],
    payload: Any = None,
    *,
    world_size: int,
    transport: TransportName = "shm",
    timeout_s: float | None = None,
    stall_s: float | None = None,
    setup_s: float | None = None,
    stop_budget_s: float | None = None,
    device: str = "cpu",
) -> list[Any]:
    """What `job(transport, payload)` returned on each rank, in rank order.

    `job` is a function of a module, and results can be pickled. `transport` chooses processes that share memory (shm),
    or talk over gloo or NCCL (rank n on GPU n), or threads of one child process (`memory`), which compute on
    `device`. Raises `RankFailure` when a
    rank raises, dies, or is not done within `timeout_s`, when no rank has come further in its row of a schedule for
    `stall_s`, and when none has begun with it `setup_s` after the start: the failure then says what each waits for.
    With `stop_budget_s` the job sees to `Transport.stop`: SIGTERM and SIGUSR1, to this process or to any rank, are
    passed on to all ranks, and raise `Interrupted` where the job is not over so many seconds later.
    """
    with Workers(world_size, transport, device=device) as workers:
        limits = Limits(timeout_s, stall_s, setup_s)
        return workers.run_within(limits, job, payload, stop_budget_s=stop_budget_s)


def preload(*modules: str) -> None:
    """Has ranks that are started from now on find `modules` loaded, where each would take its own time to load them.

    For modules of libraries, such as `torch.distributed.fsdp`: they must start no threads, and what was loaded stays as
    it was then. One that cannot be loaded is the matter of the job that needs it. Starts no ranks.
    """
    wanted = _wanted()
    new = [module for module in modules if module not in wanted]
    wanted += new
    if new and (servers := _servers()) and servers[0].usable:
        servers[0].load(new)


def private_folder(prefix: str) -> Path:
    """A new folder of this user alone, which is removed after this process has ended, however it ends: in that
    of the server of ranks."""
    return Path(tempfile.mkdtemp(prefix=prefix, dir=None if os.environ.get(RANK_VARIABLE) else _server().folder))


@contextlib.contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """`private_folder` for the body of a `with` statement."""
    folder = private_folder(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class Workers:
    """Ranks that stay between jobs. A context manager; a failed job closes it, since its ranks are no longer in step.

    `timeout_s` is the default for each `run`; None waits for ever (ranks that end are noticed at once either way).
    """

    def __init__(
        self,
        world_size: int,
        transport: TransportName = "shm",
        *,
        timeout_s: float | None = None,
        device: str = "cpu",
    ):
        if world_size < 1:
            raise ValueError(f"world_size={world_size} must be at least 1.")
        if transport not in (known := get_args(TransportName)):
            raise ValueError(f"transport={transport!r} is not known. Use one of {', '.join(known)}.")
        if transport != "memory" and device != "cpu":
            raise ValueError(f"device={device!r} is for ranks that are threads: transport 'memory', not {transport!r}.")
        if os.environ.get(RANK_VARIABLE):
            raise RuntimeError(
                "this process is a rank, and ranks start no ranks. A script whose own classes or functions are sent to "
                "the ranks is "
                "imported by them: put what it does under `if __name__ == '__main__':`."
            )
        self.world_size = world_size
        self.transport: TransportName = transport
        self.timeout_s = timeout_s
        self.device = device
        self._num_jobs = 0
        self._folder = private_folder("workers-")
        self._pool = _server().start_pool(1 if transport == "memory" else world_size)

    def run(
        self,
        job: Callable[[Transport, Any], Any],
        payload: Any = None,
        *,
        timeout_s: float | None = None,
        stall_s: float | None = None,
    ) -> list[Any]:
        """What `job(transport, payload)` returned on each rank, in rank order. Errors as in `run_ranks`."""
        return self.run_within(Limits(timeout_s, stall_s, None), job, payload)

    def run_within(
        self,
        limits: Limits,
        job: Callable[[Transport, Any], Any],
        payload: Any = None,
        *,
        stop_budget_s: float | None = None,
    ) -> list[Any]:
        """`run` within limits, and with an ear for signals where there is a `stop_budget_s`."""
        if self.closed:
            raise RuntimeError("these workers are closed: a job failed, or close() was called. Make new ones.")
        if limits.timeout_s is None:
            limits = replace(limits, timeout_s=self.timeout_s)
        stopping = None if stop_budget_s is None else Stopping(stop_budget_s)
        try:
            self._num_jobs += 1
            board_file = self._folder / f"board-{self._num_jobs}"
            board = Board.create(board_file, self.world_size)
            with contextlib.nullcontext() if stopping is None else stopping.listening():
                for process, body in enumerate(self._jobs(job, payload, board_file, stops=stopping is not None)):
                    self._pool.send(process, "job", body)
                answers = self._pool.results(limits, board, stopping)
        except BaseException:  # Ctrl-C too: whatever interrupts a job ends its ranks
            self.close()
            raise
        return [result for process in range(self._pool.size) for result in pickle.loads(answers[process])]

    @property
    def closed(self) -> bool:
        """True once the ranks have been ended."""
        return self._pool.closed

    def close(self) -> None:
        """Ends the ranks; returns when they are gone. Calling it again does nothing."""
        self._pool.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _jobs(self, job: Callable[..., Any], payload: Any, board_file: Path, *, stops: bool) -> list[Any]:
        call = pickle.dumps((job, payload))
        modules = _named_modules(call)
        main = _main_module() if modules.pop("__main__", None) else None
        store, folder = str(self._folder / f"job-{self._num_jobs}"), str(Path.cwd())
        return [
            Job(
                self.transport,
                rank,
                self.world_size,
                store,
                modules,
                main,
                call,
                str(board_file),
                folder,
                self.device,
                stops,
            )
            for rank in range(self._pool.size)
        ]


@dataclass(frozen=True)
class Limits:
    """Seconds that a job may take, that may pass without any rank coming further in its row, and until the first of
    them walks over one; None is for ever."""

    timeout_s: float | None
    stall_s: float | None
    setup_s: float | None


class _Stall:
    """Whether the ranks have moved lately. Those that walk over no row are judged by the limit of the set-up alone."""

    def __init__(self, board: Board, limits: Limits):
        self._board, self._stall_s, self._setup_s = board, limits.stall_s, limits.setup_s
        self._content, self._since_s = board.content(), float("inf")
        self._started_s, self._is_set_up = time.monotonic(), False

    @property
    def check_s(self) -> float | None:
        """Seconds until the ranks should be looked at again."""
        shortest = min(filter(None, (self._stall_s, self._setup_s)), default=None)
        return None if shortest is None else shortest / STALL_CHECKS

    def is_setup_over(self) -> bool:
        """True when the whole limit of the set-up has passed, and no rank has begun to walk over its row."""
        if self._setup_s is None or self._is_set_up:
            return False
        lanes = (lane for rank in range(self._board.world_size) for lane in self._board.lanes(rank))
        self._is_set_up = any(lane.phase for lane in lanes)
        return not self._is_set_up and time.monotonic() - self._started_s > self._setup_s

    def is_over(self) -> bool:
        """True when nothing has moved for the whole time limit."""
        if self._stall_s is None or (self._setup_s is not None and not self._is_set_up):
            return False
        if (content := self._board.content()) != self._content:
            self._content, self._since_s = content, time.monotonic()
        return time.monotonic() - self._since_s > self._stall_s


@dataclass(eq=False)
class _Pool:
    """The processes of one `Workers`: a connection to each, and the lifeline on which the server reports their ends."""

    lifeline: socket.socket
    connections: list[Connection]
    ended: dict[int, int] = field(default_factory=dict)
    closed: bool = False

    def __post_init__(self) -> None:
        weakref.finalize(self, _close_quietly, self.lifeline, self.connections)

    @property
    def size(self) -> int:
        return len(self.connections)

    def send(self, process: int, kind: str, body: Any) -> None:
        """Hands a message to one process. A process that is gone is noticed when its answer is awaited."""
        with contextlib.suppress(OSError):
            self.connections[process].send_bytes(pickle.dumps((kind, body)))

    def results(self, limits: Limits, board: Board, stopping: Stopping | None = None) -> dict[int, bytes]:
        """The pickled results of every process. Raises `RankFailure` for the first that failed, ended, or was not done
        in time, with what all ranks were doing, and `Interrupted` when the time of `stopping` is over."""
        collected: dict[int, bytes] = {}
        failures: list[Failure] = []
        pending = set(range(self.size))
        deadline_s = None if limits.timeout_s is None else time.monotonic() + limits.timeout_s
        stall = _Stall(board, limits)
        while pending and not self.ended and all(failure.by_peer for failure in failures):
            until_s = _soonest(deadline_s, stall.check_s, None if stopping is None else stopping.deadline_s)
            events = self._receive(pending, until_s, stopping)
            if stopping is not None:
                stopping.check()
            if not events and not self.ended:
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    if failures:
                        break
                    assert limits.timeout_s is not None
                    raise late(self._whereabouts(pending), board, limits.timeout_s)
                if not failures and stall.is_setup_over():
                    assert limits.setup_s is not None
                    raise not_begun(self._whereabouts(pending), board, limits.setup_s)
                if not failures and stall.is_over():
                    assert limits.stall_s is not None
                    raise stalled(self._whereabouts(pending), board, limits.stall_s)
            for process, kind, body in events:
                if kind == "stop":
                    assert stopping is not None, "only a job that stops tells of signals"
                    stopping.ask(body)
                    continue
                pending.discard(process)
                if kind == "result":
                    collected[process] = body
                else:
                    failures.append(body)
            if failures:
                deadline_s = min(deadline_s or float("inf"), time.monotonic() + ROOT_CAUSE_WAIT_S)
        if failures or self.ended:
            raise root_cause(failures, self.ended, board)
        return collected

    def _receive(
        self, pending: set[int], deadline_s: float | None, stopping: Stopping | None = None
    ) -> list[tuple[int, str, Any]]:
        """The next messages of pending processes; empty when the time is over, or when they were asked to stop. Notes
        processes that ended."""
        sources: dict[Any, int] = {self.connections[process]: process for process in pending}
        wakes = () if stopping is None else (stopping.wakes,)
        while True:
            remaining_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            ready = wait([*sources, self.lifeline, *wakes], remaining_s)
            if stopping is not None and (number := stopping.take()):
                for process in pending:
                    self.send(process, "stop", number)
                return []
            if not ready:
                return []
            messages = []
            for source in ready:
                if source is self.lifeline:
                    self._note_end()
                    continue
                assert isinstance(source, Connection)
                try:
                    messages.append((sources[source], *pickle.loads(source.recv_bytes())))
                except (EOFError, OSError):
                    del sources[source]  # the lifeline will report how it ended
            if messages or self.ended:
                return messages

    def _note_end(self) -> bool:
        """Reads one report of the server. False when the lifeline is closed."""
        report = self.lifeline.recv(RANK_ENDED.size, socket.MSG_WAITALL)
        if len(report) < RANK_ENDED.size:
            if not self.closed:
                raise RankFailure("the process that starts ranks has ended; its last words, if any, are above.")
            return False
        process, exit_code = RANK_ENDED.unpack(report)
        self.ended[process] = exit_code
        return True

    def _whereabouts(self, pending: set[int]) -> dict[int, Whereabouts | None]:
        """Where the ranks of pending processes are; None for a process that does not even answer that."""
        for process in pending:
            self.send(process, "where", None)
        found: dict[int, Whereabouts | None] = {}
        silent = set(pending)
        deadline_s = time.monotonic() + WHEREABOUTS_WAIT_S
        while silent and (events := self._receive(silent, deadline_s)):
            for process, kind, body in events:
                if kind == "where":
                    found.update(body or {process: Whereabouts((), "start-up, loading what the job needs")})
                    silent.discard(process)
        return found | dict.fromkeys(silent)

    def close(self) -> None:
        """Has the server kill the processes and waits until it says so."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(OSError):  # raised when the server is gone, and its ranks with it
            self.lifeline.shutdown(socket.SHUT_WR)
            self.lifeline.settimeout(END_WAIT_S)
            while self._note_end():
                pass
        _close_quietly(self.lifeline, self.connections)


class _Server:
    """This process's handle of the rank server: started once, ended when the interpreter exits."""

    def __init__(self) -> None:
        if importlib.util.find_spec("torch") is None:
            raise MissingExtraError("ranks need torch, which is not installed. Run `pip install 'shardproof[train]'`.")
        self.owner_pid = os.getpid()
        self._control, theirs = socket.socketpair()
        self.folder = Path(tempfile.gettempdir(), f"shardproof-{secrets.token_hex(8)}")
        with theirs, _without_signals():
            self._process = self._start(theirs)
            atexit.register(self.close)
            # after the server knows of it, which removes it however this process ends
            self.folder.mkdir(mode=0o700)
        if wanted := _wanted():
            self.load(wanted)

    def _start(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        call = f"main({theirs.fileno()}, {str(self.folder)!r})"
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from {__name__.rpartition('.')[0]}.rank_server import main; "
            f"{call}"
        )
        options = [f"-W{option}" for option in sys.warnoptions]
        return subprocess.Popen(
            [sys.executable, *options, "-c", code],
            env=rank_environment(os.environ, self.folder),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # so that Ctrl-C reaches only this process, which then ends the ranks in order
        )

    def load(self, modules: Sequence[str]) -> None:
        """Has modules loaded before the next pool is started. Returns at once."""
        names = " ".join(modules).encode()
        self._control.sendall(b"m" + NAMES_LENGTH.pack(len(names)) + names)

    def start_pool(self, num_processes: int) -> _Pool:
        """New rank processes. Returns at once; what is sent to them waits until they are there."""
        lifeline, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"p"], [theirs.fileno()])
        connections = []
        for _ in range(num_processes):
            mine, their_end = Pipe()
            with their_end:
                socket.send_fds(lifeline, [b"r"], [their_end.fileno()])
            connections.append(mine)
        return _Pool(lifeline, connections)

    @property
    def usable(self) -> bool:
        """False after a fork of this process, and when the server has ended."""
        return self.owner_pid == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        """Ends the server and every rank."""
        atexit.unregister(self.close)
        self._control.close()
        if self.owner_pid == os.getpid():
            self._process.wait()
            # of a server that was killed; ranks end when their connections do
            shutil.rmtree(self.folder, ignore_errors=True)


@functools.cache
def _servers() -> list[_Server]:
    """Holds the one server of this process; a list, because a server that died is replaced."""
    return []


@functools.cache
def _wanted() -> list[str]:
    """Holds the modules that `preload` was asked for."""
    return []


def _server() -> _Server:
    servers = _servers()
    if servers and not servers[0].usable:
        servers.pop().close()
    if not servers:
        servers.append(_Server())
    return servers[0]


MEMORY_VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""glibc keeps freed memory instead of giving it back to the system, which would zero it anew page by page: a copy of 57
MB takes 6.7 ms instead of 31. Where the system leaves it to programs, memory comes in pages of 2 MB (glibc 2.35 on): an
all-gather of 16 MB takes a seventh less (2 cores of a virtual machine, 2026-11)."""


def rank_environment(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment of ranks of this machine: one thread each (which makes forking safe too), nothing that
    listens but on loopback, temporary files in `folder`, and unless the user chose others MKL's reproducible mode,
    the workspace with which cuBLAS repeats its bits, and memory that is kept, in large pages."""
    fixed = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **loopback_variables()}
    return {"MKL_CBWR": mkl_switch(), WORKSPACE_VARIABLE: WORKSPACE, **MEMORY_VARIABLES, **environment, **fixed}


@contextlib.contextmanager
def _without_signals() -> Iterator[None]:
    """Keeps SIGINT, SIGTERM and SIGUSR1 waiting while the body runs. A process started in it never gets them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SERVER_BLOCKS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _named_modules(call: bytes) -> dict[str, str]:
    """The loaded modules whose names a pickle contains, with their files."""
    words = {argument for _, argument, _ in pickletools.genops(call) if isinstance(argument, str)}
    return {word: file for word in sorted(words) if (file := getattr(sys.modules.get(word), "__file__", None))}


def _main_module() -> dict[str, str]:
    """Where the running script comes from, as `multiprocessing.spawn.prepare` takes it: a name
    (`python -m`) or a path."""
    data = multiprocessing.spawn.get_preparation_data("rank")
    return {key: data[key] for key in ("init_main_from_name", "init_main_from_path") if key in data}


def _soonest(deadline_s: float | None, check_s: float | None, stop_s: float | None) -> float | None:
    """The earliest of two moments and of so many seconds from now."""
    check_at_s = None if check_s is None else time.monotonic() + check_s
    return min(filter(None, (deadline_s, check_at_s, stop_s)), default=None)


def _close_quietly(lifeline: socket.socket, connections: Sequence[Connection]) -> None:
    lifeline.close()
    for connection in connections:
        connection.close()
