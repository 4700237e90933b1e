"""What a rank process does: it takes jobs from its connection, runs them over a transport, and answers."""

from __future__ import annotations

import importlib
import importlib.util
import io
import linecache
import multiprocessing.spawn
import os
import pickle
import queue
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ...core.base.errors import RankFailure, error_words
from ...core.schedule.timeline import COMPUTE_LANE
from ..base.recorder import Recorder
from ..pipeline.messages import Mail
from ..transport.base import Channel, Group, Transport, TransportError
from ..transport.baton import Baton, PairedGroup
from ..transport.memory import MemoryWorld, run_threads
from ..transport.process_group import ProcessGroupTransport
from ..transport.symmetric.shared_memory import SharedMemoryTransport
from ..watch.rank_errors import place_of, whose
from ..watch.rank_messages import RANK_VARIABLE, Call, Failure, Job, ThreadAt, Whereabouts
from ..watch.stop import StopRequest, stop_signals
from ..watch.watch import Board, RankWatch


@dataclass
class _Inbox:
    """Jobs to do, each with its request to stop, and the one connection that several threads answer on."""

    connection: Connection
    jobs: queue.SimpleQueue[tuple[Job, StopRequest]] = field(default_factory=queue.SimpleQueue)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, kind: str, body: Any) -> None:
        with self.lock:
            self.connection.send_bytes(pickle.dumps((kind, body)))

    def signalled(self, stop: StopRequest, number: int) -> None:
        """A signal has come: this rank knows, and so does who started it, who tells the others. In a thread of its own,
        as the handler may have interrupted an answer."""
        stop.ask(number)
        threading.Thread(target=self.answer, args=("stop", number), daemon=True).start()


def serve_jobs(connection: Connection) -> None:
    """Runs the jobs of one connection until it is closed; then the process ends at once, whatever it is doing."""
    os.environ[RANK_VARIABLE] = "1"
    torch.set_num_threads(1)
    inbox = _Inbox(connection)
    threading.Thread(target=_listen, args=(inbox,), name="listener", daemon=True).start()
    while True:
        job, stop = inbox.jobs.get()
        with stop_signals(partial(inbox.signalled, stop)) if job.stops else nullcontext():
            kind, body = _run(job, stop)
        sys.stdout.flush()
        sys.stderr.flush()
        inbox.answer(kind, body)


def _listen(inbox: _Inbox) -> None:
    global_rank: int | None = None
    stop = StopRequest()
    while True:
        try:
            kind, body = pickle.loads(inbox.connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)
        if kind == "where":
            inbox.answer("where", whereabouts(global_rank))
        elif kind == "stop":
            stop.ask(body)
        else:
            global_rank = None if body.transport == "memory" else body.global_rank
            stop = StopRequest()
            inbox.jobs.put((body, stop))


def _run(job: Job, stop: StopRequest) -> tuple[str, bytes | Failure]:
    """`("result", pickled list of one result per rank run here)` or `("failure", Failure)`."""
    places: dict[int, tuple[Recorder, RankWatch]] = {}
    try:
        os.chdir(job.folder)
        function, payload = _load(job)
        if job.transport == "memory":
            world = MemoryWorld(job.world_size, device=job.device, board=Board.open(job.board_file, job.world_size))
            places, world.stop = world.places, stop
            results = run_threads(world, function, payload)
        else:
            with _connect(job) as transport:
                places[job.global_rank], transport.stop = (transport.recorder, transport.watch), stop
                results = [function(transport, payload)]
        return "result", pickle.dumps(results)
    except BaseException as error:  # also SystemExit: a job that asks to exit has failed
        return "failure", _failure(job.global_rank, error, places)


def _connect(job: Job) -> Transport:
    store = dist.FileStore(job.store_file, job.world_size)
    board = Board.open(job.board_file, job.world_size)
    if job.transport == "shm":
        return SharedMemoryTransport(store, job.global_rank, job.world_size, board=board)
    if job.transport == "kernels":
        from ..kernels.transport import KernelTransport

        device = torch.device("cuda", job.global_rank)
        return KernelTransport(store, job.global_rank, job.world_size, device=device, board=board)
    return ProcessGroupTransport(
        store,
        job.global_rank,
        job.world_size,
        backend="nccl" if job.transport == "nccl" else "gloo",
        device=f"cuda:{job.global_rank}" if job.transport == "nccl" else "cpu",
        board=board,
    )


def _failure(global_rank: int, error: BaseException, places: Mapping[int, tuple[Recorder, RankWatch]]) -> Failure:
    if isinstance(error, RankFailure) and error.__cause__ is not None and error.global_rank is not None:
        global_rank, error = error.global_rank, error.__cause__
    trace = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # an exception that cannot be pickled is reported in words
        pickled = b""
    origin = whose(error)
    summary = error_words(error) + ("" if origin == "foreseen" else place_of(error, *places.get(global_rank, ())))
    return Failure(global_rank, summary, trace, pickled, isinstance(error, TransportError), origin == "defect")


def _load(job: Job) -> tuple[Any, Any]:
    """`(function, payload)`, after loading the modules they come from."""
    if job.main is not None:
        multiprocessing.spawn.prepare(dict(job.main))  # does nothing the second time
    for name, file in job.modules.items():
        if name not in sys.modules:
            _load_module(name, file)
    return pickle.load(io.BytesIO(job.call))


def _load_module(name: str, file: str) -> None:
    """Imports a module by name, or where that fails from its file: pytest's importlib mode gives test
    modules names of no package."""
    try:
        importlib.import_module(name)
        return
    except ModuleNotFoundError:
        spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def whereabouts(global_rank: int | None) -> dict[int, Whereabouts]:
    """What the ranks of this process are doing: all threads are those of `global_rank`, or of the ranks that
    thread names begin with."""
    frames = sys._current_frames()
    found: dict[int, Whereabouts] = {}
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        match = re.match(r"rank (\d+)(?: lane (.*))?", thread.name)
        rank = int(match[1]) if match else global_rank
        if frame is None or rank is None or thread is threading.current_thread():
            continue
        known = found.get(rank, Whereabouts((), ""))
        is_own = thread.name == f"rank {rank}" or thread is threading.main_thread()
        lane = COMPUTE_LANE if is_own else (match[2] if match else None) or thread.name
        place = _transport_place(frame)
        call = None if place is None else _call(*place)
        waits = () if place is None else (f"{place[0]} ({place[1]})",)
        at = ThreadAt(
            lane, call, any(isinstance(each, (Mail, Baton, Future)) for each in _selves(frame)), _innermost(frame)
        )
        found[rank] = Whereabouts((*known.waits, *waits), at.at if is_own else known.at, (*known.threads, at))
    return found


def _selves(frame: FrameType | None) -> Iterator[Any]:
    """The objects whose methods a thread is in, from the innermost."""
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back


def _transport_place(frame: FrameType | None) -> tuple[str, Group | Channel | Transport] | None:
    """The group's or channel's method that a thread is in, if any, and whose it is."""
    found = None
    while frame is not None:
        place = frame.f_locals.get("self")
        if isinstance(place, (Group, Channel, Transport)) and not isinstance(place, PairedGroup):
            found = frame.f_code.co_name, place  # goes on outward: the public method is the outermost
        frame = frame.f_back
    return found


def _call(op: str, place: Group | Channel | Transport) -> Call | None:
    if isinstance(place, Group):
        return Call(op, place.name, place.ranks, (place.ranks[place.rank],), place.num_calls)
    if isinstance(place, Channel):
        own = place.source if op.endswith("send") else place.destination
        return Call(op, place.name, (place.source, place.destination), (own,), None)
    return None


def _innermost(frame: FrameType) -> str:
    name, line = frame.f_code.co_filename, frame.f_lineno
    return f"{frame.f_code.co_name} ({name}:{line}: {linecache.getline(name, line).strip()})"
