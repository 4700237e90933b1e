"""Message lanes: a thread per (peer, direction) that sends or receives in list order, and the mailbox between
them and the compute lane.

The rule is the simulator's. A send starts when its payload exists. A receive is posted once the compute lane has come
within `recv_buffers` receives of it in the row. So lanes only ever run ahead of the blocking execution in list order,
and a schedule without a cycle there has none here.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter
from typing import Literal, Protocol

import torch
from torch import Tensor

from ...core.schedule.action import RECEIVES, SENDS, Action, Kind
from ...core.schedule.placement import Placement
from ...core.schedule.timeline import Span, message_lane
from ..base.streams import LaneStreams, Moment, capture_of, is_captured, now, take_over, wait_for
from ..watch.watch import Place, RankWatch

RECV_BUFFERS = 2
"""Receives of one lane that may be posted before the compute lane reaches them: one to fill while
the other is consumed."""

_NEXT = {Kind.SEND_F: 1, Kind.RECV_B: 1, Kind.RECV_F: -1, Kind.SEND_B: -1}
"""The stage a message goes to or comes from, relative to the stage it is written with."""

RECEIVE_OF = {Kind.SEND_F: Kind.RECV_F, Kind.SEND_B: Kind.RECV_B}
_SEND_OF = {receive: send for send, receive in RECEIVE_OF.items()}


class MessageChannel(Protocol):
    """What a lane needs of a `transport.base.Channel`."""

    def send(self, tensor: Tensor) -> None:
        """Returns once the peer has it."""

    def begin_send(self, tensor: Tensor) -> Callable[[], None]:
        """Begins a send; what comes back ends it."""

    def sent_bytes(self, tensor: Tensor) -> int:
        """Bytes that leave this rank when `tensor` is sent."""

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next message."""

    def begin_receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
        """Begins a receive; what comes back ends it."""


Mark = float | torch.cuda.Event
"""A time that was taken: of `perf_counter`, or an event of a GPU, which has it when the stream has come there."""


class Clock:
    """Seconds since an origin all ranks share. On a GPU the device takes the times, and the host reads them when all
    is done: `mark` does not wait.

    On one machine `time.perf_counter` is the same clock in every process (CLOCK_MONOTONIC on Linux), so a barrier
    before `restart` makes the ranks' seconds comparable to the length of that barrier.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.streams = LaneStreams(device)
        """Of the lanes whose times it takes: a receive that waits on a shared one would hold up the products behind."""
        self._origin_s, self._origin = perf_counter(), self.mark()

    def restart(self) -> None:
        """The origin is now."""
        self._origin_s, self._origin = self._finished_s(), self.mark()

    def mark(self) -> Mark:
        """This time in the current stream."""
        if self.device.type != "cuda":
            return perf_counter()
        # in a captured step every replay has times of its own
        event = torch.cuda.Event(enable_timing=True, external=is_captured(self.device))
        event.record(torch.cuda.current_stream(self.device))
        return event

    def settle(self) -> None:
        """The host waits once for all that the current stream comes after, whose times are then known."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def seconds(self, mark: Mark) -> float:
        """Seconds from the origin to a time; waits until the GPU has come there."""
        if isinstance(mark, float):
            return mark - self._origin_s
        if not mark.query():
            mark.synchronize()
        assert not isinstance(self._origin, float)
        return self._origin.elapsed_time(mark) / 1e3

    def now_s(self) -> float:
        """Seconds since the origin, when the device has done what the calling thread gave it: for those who sample."""
        return self._finished_s() - self._origin_s

    def at(self, moment_s: float) -> float:
        """Seconds since the origin at a moment of `time.perf_counter`."""
        return moment_s - self._origin_s

    def _finished_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return perf_counter()


def receive_of(send: Action) -> Action:
    """The receive in the peer's row that takes this send: `1SEND_F4` is taken by `2RECV_F4`."""
    return Action(send.stage + _NEXT[send.kind], RECEIVE_OF[send.kind], send.microbatch)


def peer_of(action: Action, placement: Placement) -> int:
    """The pipeline rank at the other end of a send or receive; the first of them where a stage has several sources."""
    forward = _NEXT[action.kind] > 0
    return placement.rank_of(
        placement.target_of(action.stage) if forward else placement.sources_of(action.stage)[0], action.microbatch
    )


def other_end(action: Action, placement: Placement) -> Action:
    """The receive that takes a send, or the send that a receive takes, in the peer's row: `1SEND_F4` and
    `2RECV_F4` are each other's."""
    forward = _NEXT[action.kind] > 0
    stage = placement.target_of(action.stage) if forward else placement.sources_of(action.stage)[0]
    return Action(stage, RECEIVE_OF.get(action.kind) or _SEND_OF[action.kind], action.microbatch)


def direction_of(action: Action) -> Literal["F", "B"]:
    """Whether a message carries activations or gradients."""
    return "F" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "B"


def lane_name(action: Action, placement: Placement) -> str:
    """The communication lane of a send or receive, as `core.schedule.timeline` names it."""
    return message_lane(direction_of(action), action.kind in SENDS, peer_of(action, placement))


class Mail:
    """Tensors on their way between lanes, by the action that sends or receives them, and the first failure of any lane.

    A change wakes only the threads whose wait is over: a rank has as many lanes as peers and directions, and each that
    is woken for nothing takes the interpreter's lock from the compute lane.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Callable[[], bool], threading.Lock]] = []
        self._tensors: dict[Action, tuple[Tensor, Moment]] = {}
        self._failure: BaseException | None = None

    def put(self, action: Action, tensor: Tensor) -> None:
        """Leaves a tensor, which the current stream makes, for whoever takes `action`."""
        with self._lock:
            assert action not in self._tensors, f"{action} was delivered twice"
            self._tensors[action] = tensor, now(tensor.device)
            self._wake()

    def take(self, action: Action) -> Tensor:
        """The tensor of `action` for the current stream, once it was left. Raises the failure of another lane instead
        of waiting for ever."""
        with self._lock:
            self._wait(lambda: action in self._tensors)
            tensor, made = self._tensors.pop(action)
        return take_over(tensor, made)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Returns once `ready()` holds. Raises the failure of another lane."""
        with self._lock:
            self._wait(ready)

    def notify(self, change: Callable[[], None]) -> None:
        """Runs `change` so that those in `wait_until` see it."""
        with self._lock:
            change()
            self._wake()

    def fail(self, error: BaseException) -> None:
        """Wakes every lane with `error`; the first one counts."""
        with self._lock:
            self._failure = self._failure or error
            self._wake()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Called with the lock held, which others have in between."""
        while self._failure is None and not ready():
            over = threading.Lock()
            over.acquire()
            self._waiting.append((ready, over))
            self._lock.release()
            try:
                over.acquire()
            finally:
                self._lock.acquire()
        if self._failure is not None:
            raise self._failure

    def _wake(self) -> None:
        """Lets those go on whose wait is over. Called with the lock held."""
        waiting, self._waiting = self._waiting, []
        for ready, over in waiting:
            if self._failure is not None or ready():
                over.release()
            else:
                self._waiting.append((ready, over))


class Lane:
    """A thread that performs its actions in order, each once `permit` has been called for it,
    and keeps a span for each. Its stream of a GPU goes on from where the one was that called `permit`.

    `prepare(action)` blocks until the action may start and returns what `perform(action, prepared)` needs. The thread
    runs inside `watch(None)`, every action inside `watch(action)`. `place` shows others where the lane is.
    """

    def __init__(
        self,
        name: str,
        actions: Sequence[Action],
        *,
        mail: Mail,
        clock: Clock,
        global_rank: int,
        prepare: Callable[[Action], Tensor | None],
        perform: Callable[[Action, Tensor | None], None],
        permits: int,
        watch: Callable[[Action | None], AbstractContextManager[object]] = lambda _: nullcontext(),
        place: Place | None = None,
    ):
        self.name = name
        self._times: list[tuple[Action, Mark, Mark]] = []
        self._permitted: list[Moment] = [None] * permits
        self._begin = capture_of(clock.device)
        self._done: Moment = None
        self._actions = actions
        self._mail = mail
        self._clock = clock
        self._global_rank = global_rank
        self._prepare = prepare
        self._perform = perform
        self._watch = watch
        self._place = place or RankWatch().place(name)
        self._thread = threading.Thread(target=self._run, name=f"rank {global_rank} lane {name}", daemon=True)
        self._thread.start()

    @property
    def spans(self) -> list[Span]:
        """When each action that is done began and ended."""
        seconds = self._clock.seconds
        return [
            Span(self._global_rank, self.name, action, seconds(start), seconds(end))
            for action, start, end in self._times
        ]

    def permit(self) -> None:
        """Allows one action more, after what the current stream was given."""
        moment = now(self._clock.device)
        self._mail.notify(lambda: self._permitted.append(moment))

    def finish(self) -> None:
        """Returns once every action is done; the current stream goes on from there. Raises the failure of any lane."""
        self._mail.wait_until(lambda: len(self._times) == len(self._actions))
        self._thread.join()
        wait_for(self._done, self._clock.device)

    def _is_permitted(self, number: int) -> bool:
        return number < len(self._permitted)

    def _run(self) -> None:
        try:
            with self._clock.streams.of(self.name), torch.no_grad(), self._watch(None):
                wait_for(self._begin, self._clock.device)
                for number, action in enumerate(self._actions):
                    self._place.comes_to(number + 1)
                    self._place.waits(action)
                    self._mail.wait_until(partial(self._is_permitted, number))
                    wait_for(self._permitted[number], self._clock.device)
                    prepared = self._prepare(action)
                    self._place.runs(action)
                    start = self._clock.mark()
                    with self._watch(action):
                        self._perform(action, prepared)
                    prepared = None  # what was sent is the peer's now
                    end = self._clock.mark()
                    self._done = now(self._clock.device)  # also after the mark, which a capture has to wait for
                    self._mail.notify(partial(self._times.append, (action, start, end)))
                self._place.done()
        except BaseException as error:
            self._mail.fail(error)


def message_lanes(
    actions: Iterable[Action],
    *,
    placement: Placement,
    channel: Callable[[Literal["F", "B"], int, bool], MessageChannel],
    shape_of: Callable[[Action], tuple[int, ...]],
    dtype: torch.dtype,
    mail: Mail,
    clock: Clock,
    global_rank: int,
    record: Callable[[Action, int], None],
    watch: Callable[[Action | None], AbstractContextManager[object]] = lambda _: nullcontext(),
    places: RankWatch | None = None,
) -> dict[str, Lane]:
    """Started lanes by name for the sends and receives of one row.

    `channel(direction, peer, sending)` is the channel to or from a pipeline rank; `shape_of(action)` and
    `dtype` are those of a message; `record(action, num_bytes)` hears of each send; `watch` is that of `Lane`;
    `places` shows where lanes are.
    """
    by_lane: dict[str, list[Action]] = defaultdict(list)
    for action in actions:
        if action.kind in SENDS or action.kind in RECEIVES:
            by_lane[lane_name(action, placement)].append(action)

    def lane(name: str, actions: list[Action]) -> Lane:
        sending = actions[0].kind in SENDS
        line = channel(direction_of(actions[0]), peer_of(actions[0], placement), sending)

        def send(action: Action, tensor: Tensor | None) -> None:
            assert tensor is not None
            record(action, line.sent_bytes(tensor))
            line.send(tensor)

        def receive(action: Action, _: Tensor | None) -> None:
            mail.put(action, line.receive(shape_of(action), dtype))

        return Lane(
            name,
            actions,
            mail=mail,
            clock=clock,
            global_rank=global_rank,
            prepare=mail.take if sending else lambda _: None,
            perform=send if sending else receive,
            permits=len(actions) if sending else RECV_BUFFERS,
            watch=watch,
            place=places.place(name, len(actions)) if places is not None else None,
        )

    return {name: lane(name, actions) for name, actions in by_lane.items()}
