"""The process that starts ranks: it loads torch once and forks, so that a rank is there in
milliseconds instead of seconds.

`launch` starts one such server per Python process and says over a Unix socket what to fork. The standard library's
fork server does a similar job, but takes over the caller's environment as it is (torch must find `MKL_CBWR` and
`OMP_NUM_THREADS` set) and imports the caller's script into every child, so that a three-line training script would have
to be guarded by `if __name__ == "__main__"`.

The server has one thread, torch included while OMP_NUM_THREADS is 1, so forking is safe. It ends when its starter does,
and not by SIGINT, SIGTERM or SIGUSR1, which its starter has blocked: somebody has to remove the starter's folder and
end its ranks. These can be ended by them. Protocol: the starter sends one *lifeline* socket per pool over the control
socket, and one connection per rank over the lifeline. The server reports over the lifeline how each rank ended. Closing
the lifeline kills the pool. Names of modules to load, too, come over the control socket (`launch.preload`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NoReturn

from ..watch.rank_messages import NAMES_LENGTH, RANK_ENDED
from ..watch.stop import SERVER_BLOCKS

PRELOAD = (
    "numpy",
    "numpy.ma",
    "numpy.random",
    "torch",
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",
    "shardproof.backend.launching.rank",
    "shardproof.backend.trainer",
    "shardproof.backend.ranks.rank_of_plan",
    "shardproof.backend.huggingface.save",
    "shardproof.backend.numerics.probe",
    "shardproof.verify.dynamic.proof",
)
"""What the jobs of this package need, so that no rank loads it anew. The shapes (with sympy, 0.4 s) are loaded
by the first backward."""


def main(control_fd: int, folder: str) -> NoReturn:
    """Forks ranks until the other end of the control socket is closed, then kills those left,
    removes `folder` and ends."""
    _load(PRELOAD)
    server = _Server(socket.socket(fileno=control_fd))
    server.serve()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # nothing to tidy up that the kernel does not


def _load(modules: Iterable[str]) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception:  # loading early only saves time; the job that needs the module reports what is wrong with it
            continue
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, the pages that all ranks share


@dataclass
class _Pool:
    """The ranks of one lifeline. `alive` maps process ids to rank numbers."""

    lifeline: socket.socket
    num_started: int = 0
    alive: dict[int, int] = field(default_factory=dict)
    closing: bool = False


class _Server:
    def __init__(self, control: socket.socket):
        self._control = control
        self._pools: list[_Pool] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._child_ended, notify = socket.socketpair()
        self._child_ended.setblocking(False)
        notify.setblocking(False)
        self._notify = notify
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(notify.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._child_ended, selectors.EVENT_READ)

    def serve(self) -> None:
        """Answers until the starter is gone."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    kind, fd = _receive(self._control)
                    if not kind:
                        return self._end_all()
                    if fd is None:
                        _load(_receive_names(self._control))
                    else:
                        self._open_pool(fd)
                elif key.fileobj is self._child_ended:
                    self._child_ended.recv(4096)
                    self._reap()
                else:
                    self._serve_pool(key.data)

    def _open_pool(self, lifeline_fd: int) -> None:
        pool = _Pool(socket.socket(fileno=lifeline_fd))
        self._pools.append(pool)
        self._selector.register(pool.lifeline, selectors.EVENT_READ, pool)

    def _serve_pool(self, pool: _Pool) -> None:
        _, connection_fd = _receive(pool.lifeline)
        if connection_fd is None:
            self._end(pool)
            return
        pid = os.fork()
        if pid == 0:
            self._become_rank(connection_fd)
        os.close(connection_fd)
        pool.alive[pid] = pool.num_started
        pool.num_started += 1

    def _become_rank(self, connection_fd: int) -> NoReturn:
        """The child's side of the fork: lets go of everything that is the server's, and never returns."""
        try:
            signal.set_wakeup_fd(-1)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SERVER_BLOCKS)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for other in (self._control, self._child_ended, self._notify, *(pool.lifeline for pool in self._pools)):
                other.close()
            from .rank import serve_jobs

            serve_jobs(Connection(connection_fd))
        finally:
            os._exit(1)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            pool = next(pool for pool in self._pools if pid in pool.alive)
            self._report(pool, pool.alive.pop(pid), os.waitstatus_to_exitcode(status))

    def _report(self, pool: _Pool, rank: int, exit_code: int) -> None:
        with contextlib.suppress(OSError):  # nobody may want to know any more
            pool.lifeline.send(RANK_ENDED.pack(rank, exit_code))
        self._forget_if_done(pool)

    def _end(self, pool: _Pool) -> None:
        """Kills the ranks of a pool whose lifeline was closed; how they ended is still reported, for who
        closed only one direction."""
        pool.closing = True
        self._selector.unregister(pool.lifeline)
        for pid in pool.alive:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the id is still theirs
        self._forget_if_done(pool)

    def _forget_if_done(self, pool: _Pool) -> None:
        if pool.closing and not pool.alive:
            pool.lifeline.close()
            self._pools.remove(pool)

    def _end_all(self) -> None:
        """Kills all ranks; returns when they are gone and write no more files."""
        ranks = [pid for pool in self._pools for pid in pool.alive]
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        for pid in ranks:
            os.waitpid(pid, 0)


def _receive(sender: socket.socket) -> tuple[bytes, int | None]:
    """The next byte, empty when the other side is closed, and the file descriptor that came with it, if any."""
    try:
        data, fds, _, _ = socket.recv_fds(sender, 1, 1)
    except OSError:
        return b"", None
    return data, fds[0] if fds else None


def _receive_names(sender: socket.socket) -> list[str]:
    (length,) = NAMES_LENGTH.unpack(sender.recv(NAMES_LENGTH.size, socket.MSG_WAITALL))
    return sender.recv(length, socket.MSG_WAITALL).decode().split()
