"""The executor: one pipeline rank's row of a lowered schedule, action by action, on real tensors.

The calling thread is the compute lane and walks the row. It starts a compute action when its inputs have
arrived and never waits for a message to leave. Message lanes (`messages.py`) and the `dp` lane, which reduces
gradients, are threads of their own; STEP waits for the `dp` lane. This is the simulator's execution rule, and a
test compares the two orders.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ...core.schedule.action import RECEIVES, SENDS, Action, Kind
from ...core.schedule.schedule import Schedule
from ...core.schedule.timeline import COMPUTE_LANE, Span, collective_lane
from ..base.recorder import Recorder
from ..base.streams import Moment, now, wait_for
from ..watch.watch import BACKWARD_LANE, Place, RankWatch
from .activations import MemoryMeter
from .graphs import StepGraphs
from .messages import Clock, Lane, Mail, Mark, MessageChannel, lane_name, message_lanes
from .overlap import PairRunner
from .row_messages import RowMessages, RowOrder

DP_LANE = "dp"

MESSAGES = SENDS | RECEIVES
DP_ACTIONS = (Kind.REDUCE_GRAD, Kind.UNSHARD, Kind.RESHARD)
"""What that lane does, in list order."""


class WeightWork(Protocol):
    """Weight gradients that an input-gradient action (I) leaves for its weight-gradient action (W)."""

    def defer(self, microbatch: int) -> AbstractContextManager[None]:
        """Inside, weight gradients are kept as work for later instead of being computed."""

    def run(self, microbatch: int) -> None:
        """Computes what was deferred for a microbatch."""


class EarlyReduction(Protocol):
    """Says when the `dp` lane may begin REDUCE_GRAD before its place in the row;
    `backend.data_parallel.early` has one."""

    def begin(self, mail: Mail, num_microbatches: Mapping[int, int]) -> None:
        """A walk begins, with so many microbatches of each stage. Waits go through `mail`,
        which fails with any lane."""

    def wait_for_first(self, stage: int) -> None:
        """Returns when REDUCE_GRAD of a stage has something to do."""

    def complete(self, stage: int) -> None:
        """The compute lane has come to REDUCE_GRAD of a stage: all weight gradients are there."""


class StageWeights(Protocol):
    """The weights of a stage, which UNSHARD and RESHARD bring and take;
    `backend.data_parallel.base.DataParallel` is one."""

    def gather(self) -> None:
        """UNSHARD."""

    def free(self) -> None:
        """RESHARD."""


class ExecutableStage(Protocol):
    """What the executor needs of a stage; `backend.model.transformer.Stage` is one."""

    @property
    def weight_work(self) -> WeightWork:
        """Whether weight gradients are computed at once or later."""

    def __call__(self, microbatch: Any, hidden_BSH: Tensor | None) -> Tensor:
        """Hidden states for the next stage, or token losses `[b, s]` on the last one."""

    def finish_gradients(self, microbatch: Any) -> None:
        """Called after B, or W, when all weight gradients of a microbatch are computed."""


@dataclass
class Trace:
    """What one pass over a row left behind: spans of all lanes, and token losses per microbatch
    where the last stage is."""

    spans: list[Span] = field(default_factory=list)
    token_losses: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass:
    """Everything that belongs to one walk over a row."""

    microbatches: Sequence[Any]
    mail: Mail
    clock: Clock
    trace: Trace
    place: Place
    saved: dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge]] = field(default_factory=dict)
    meter: MemoryMeter | None = None
    reduce_gradients: Callable[[int], None] | None = None
    step: Callable[[dict[int, Tensor]], None] | None = None
    early: EarlyReduction | None = None
    needs: Mapping[Action, int] = field(default_factory=dict)
    gathers: Counter[int] = field(default_factory=Counter)
    gathered: dict[int, Moment] = field(default_factory=dict)
    times: list[tuple[Action, Mark, Mark]] = field(default_factory=list)

    def gather(self, stage: int, moment: Moment) -> None:
        """The weights of a stage are together from that moment on, once more."""
        self.gathers[stage] += 1
        self.gathered[stage] = moment

    def forget(self, stage: int) -> None:
        """The weights of a stage are no longer together."""
        self.gathered.pop(stage, None)

    def has_weights(self, action: Action) -> bool:
        """Whether those of the UNSHARD before an action are together: not that they still are, as the lane that frees
        them may be behind."""
        return action.stage in self.gathered and self.gathers[action.stage] == self.needs[action]

    def watch(self, action: Action | None) -> AbstractContextManager[object]:
        """Where a lane's thread (None), or one of its actions, runs."""
        if self.meter is None:
            return nullcontext()
        return self.meter.watch() if action is None else self.meter.during(action, compute=False)


class Lanes(Protocol):
    """What did a part of a row."""

    @property
    def spans(self) -> list[Span]:
        """When each action began and ended."""


@dataclass(frozen=True)
class Given:
    """A row, or what comes before its STEP, of which a device has been given everything."""

    current: Pass
    lanes: Sequence[Lanes]

    def again(self, step: Callable[[dict[int, Tensor]], None] | None = None) -> Given:
        """The same for one more replay, with today's STEP: times and losses lie where they lay before."""
        current = self.current
        trace = Trace([], current.trace.token_losses)
        return replace(self, current=replace(current, trace=trace, times=list(current.times), step=step))


class Executor:
    """Runs the row of one pipeline rank.

    `stages` are the rank's own, by stage number; `channel(direction, peer, sending)` is the line to a pipeline rank;
    `message_shape` is the shape `[samples, sequence, hidden]` of every message, or a function that gives it from the
    microbatch: both ends of a message have the microbatch, so they know how long it is without asking each other.
    """

    def __init__(
        self,
        schedule: Schedule,
        pp_rank: int,
        stages: Mapping[int, ExecutableStage],
        *,
        channel: Callable[[Literal["F", "B"], int, bool], MessageChannel],
        message_shape: tuple[int, ...] | Callable[[Any], tuple[int, ...]],
        dtype: torch.dtype,
        global_rank: int,
        recorder: Recorder,
        watch: RankWatch | None = None,
        global_rank_of: Callable[[int], int] = lambda pp_rank: pp_rank,
        pairs: PairRunner | None = None,
        weights: Mapping[int, StageWeights] | None = None,
        row_order: RowOrder | None = None,
        graphs: StepGraphs | None = None,
    ):
        """`watch` shows others where the lanes are; there, pipeline ranks are called `global_rank_of(pp_rank)`. Without
        `pairs` the parts of a pair run one after the other. `weights` are needed for a row with UNSHARD and RESHARD.
        With `row_order` the compute lane sends and receives itself, without lanes for messages. With `graphs` a GPU is
        given everything but STEP as one."""
        assert schedule.is_lowered
        self.row = tuple(schedule.row(pp_rank))
        self.forward_row = forward_only(self.row)
        self.stages = stages
        self._placement = schedule.placement
        self._pp_rank = pp_rank
        self._channel = channel
        self._message_shape = message_shape
        self._dtype = dtype
        self._global_rank = global_rank
        self._recorder = recorder
        self._watch = watch or RankWatch(global_rank)
        self._global_rank_of = global_rank_of
        self._pairs = pairs
        self._weights = weights or {}
        self._row_order = row_order
        self._graphs = graphs
        self._unsharded = {action.stage for action in self.row if action.kind is Kind.UNSHARD}
        self._needs = gathers_before(self.row)
        self._watch.walks(self.row)

    def train(
        self,
        microbatches: Sequence[Any],
        *,
        reduce_gradients: Callable[[int], None],
        step: Callable[[dict[int, Tensor]], None],
        clock: Clock,
        meter: MemoryMeter | None = None,
        early: EarlyReduction | None = None,
    ) -> Trace:
        """One optimizer step: the whole row.

        `reduce_gradients(stage)` is REDUCE_GRAD and runs on the `dp` lane; `step(token_losses)` is STEP.
        `microbatches[i]` is microbatch i of this rank. With `early` gradients are reduced as they become ready. A
        failure on any lane is raised here.
        """

        def given(row: Sequence[Action], own: Sequence[Any]) -> Given:
            place = self._watch.place(total=len(self.row))
            current = Pass(
                own, Mail(), clock, Trace(), place, meter=meter, reduce_gradients=reduce_gradients, step=step
            )
            current = replace(current, early=early, needs=self._needs)
            if early is not None:
                parts = (part for action in self.row for part in action.parts)
                early.begin(current.mail, Counter(part.stage for part in parts if part.kind is Kind.F))
            return self._give(row, current)

        # who measures the memory of a step sees every operation of it: it is not replayed
        if self._graphs is None or meter is not None:
            return self._finished(given(self.row, microbatches))
        *work, last = self.row
        assert last.kind is Kind.STEP, f"{last} comes after STEP"
        done = self._graphs.give("training", microbatches, functools.partial(given, work)).again(step)
        self._step(last, done.current)
        return self._finished(done)

    def evaluate(self, microbatches: Sequence[Any], *, clock: Clock) -> Trace:
        """The forwards of the row and their messages, without gradients."""

        def given(own: Sequence[Any]) -> Given:
            place = self._watch.place(total=len(self.forward_row))
            return self._give(
                self.forward_row, Pass(own, Mail(), clock, Trace(), place, needs=gathers_before(self.forward_row))
            )

        with torch.no_grad():
            if self._graphs is None:
                return self._finished(given(microbatches))
            return self._finished(self._graphs.give("validation", microbatches, given).again())

    def _give(self, row: Sequence[Action], current: Pass) -> Given:
        """Gives the device all actions of a row."""
        mail = current.mail
        try:
            lanes = self._start_lanes(row, current)
            messages = None if self._row_order is None else self._row_messages(self._row_order, current)
            for number, action in enumerate(row, 1):
                if messages is not None and action.kind not in MESSAGES:
                    messages.settle()
                current.place.comes_to(number)
                if messages is not None and action.kind in MESSAGES:
                    messages.add(action)
                elif action.kind in RECEIVES:
                    lanes[lane_name(action, self._placement)].permit()
                elif action.kind in DP_ACTIONS:
                    if action.kind is Kind.REDUCE_GRAD and current.early is not None:
                        current.early.complete(action.stage)
                    lanes[DP_LANE].permit()
                elif action.kind is Kind.STEP:
                    if DP_LANE in lanes:
                        current.place.waits(action, needs=f"lane {DP_LANE}")
                        lanes[DP_LANE].finish()
                    self._step(action, current)
                elif action.kind not in (Kind.SEND_F, Kind.SEND_B):
                    self._compute(action, current)
            if messages is not None:
                messages.settle()
            for name, lane in lanes.items():
                current.place.waits("the end of the row", needs=f"lane {name}")
                lane.finish()
            current.place.done()
        except BaseException as error:
            mail.fail(error)
            raise
        assert not current.saved, f"forwards without a backward: {sorted(current.saved)}"
        return Given(current, (*lanes.values(), *(() if messages is None else (messages,))))

    def _finished(self, given: Given) -> Trace:
        """What is left of a walk, once the device is done with it."""
        current = given.current
        current.clock.settle()
        seconds = current.clock.seconds
        current.trace.spans += [
            Span(self._global_rank, COMPUTE_LANE, action, seconds(start), seconds(end))
            for action, start, end in current.times
        ]
        for lane in given.lanes:
            current.trace.spans += lane.spans
        return current.trace

    def _start_lanes(self, row: Sequence[Action], current: Pass) -> dict[str, Lane]:
        lanes = message_lanes(
            row if self._row_order is None else (),
            placement=self._placement,
            channel=self._channel,
            shape_of=functools.partial(self._shape_of, current),
            dtype=self._dtype,
            mail=current.mail,
            clock=current.clock,
            global_rank=self._global_rank,
            record=self._recorder.message,
            watch=current.watch,
            places=self._watch,
        )
        if over_copies := [action for action in row if action.kind in DP_ACTIONS]:

            def perform(action: Action, _: Tensor | None) -> None:
                with self._recorder.action(action):
                    self._over_copies(action, current)

            def wait_for_first(action: Action) -> None:
                if current.early is not None and action.kind is Kind.REDUCE_GRAD:
                    current.early.wait_for_first(action.stage)

            begins_early = current.early is not None and all(action.kind is Kind.REDUCE_GRAD for action in over_copies)
            lanes[DP_LANE] = Lane(
                DP_LANE,
                over_copies,
                mail=current.mail,
                clock=current.clock,
                global_rank=self._global_rank,
                prepare=wait_for_first,
                perform=perform,
                permits=len(over_copies) if begins_early else 0,
                watch=current.watch,
                place=self._watch.place(DP_LANE, len(over_copies)),
            )
        return lanes

    def _shape_of(self, current: Pass, action: Action) -> tuple[int, ...]:
        shape = self._message_shape
        return shape(current.microbatches[microbatch_of(action)]) if callable(shape) else shape

    def _row_messages(self, order: RowOrder, current: Pass) -> RowMessages:
        return RowMessages(
            order,
            placement=self._placement,
            channel=self._channel,
            shape_of=functools.partial(self._shape_of, current),
            dtype=self._dtype,
            mail=current.mail,
            clock=current.clock,
            global_rank=self._global_rank,
            global_rank_of=self._global_rank_of,
            record=self._recorder.message,
            watch=current.watch,
            place=current.place,
        )

    def _over_copies(self, action: Action, current: Pass) -> None:
        """An action of the `dp` lane."""
        stage = action.stage
        if action.kind is Kind.REDUCE_GRAD:
            assert current.reduce_gradients is not None
            current.reduce_gradients(stage)
        elif action.kind is Kind.UNSHARD:
            self._weights[stage].gather()
            moment = now(current.clock.device)
            current.mail.notify(lambda: current.gather(stage, moment))
        else:
            current.mail.notify(lambda: current.forget(stage))
            self._weights[stage].free()

    def _step(self, action: Action, current: Pass) -> None:
        assert current.step is not None
        with self._span(action, current), self._recorder.action(action):
            current.step(current.trace.token_losses)
        if current.meter is not None:
            current.meter.sample(current.clock.now_s())

    def _compute(self, action: Action, current: Pass) -> None:
        """An action of the compute lane: waits for its inputs, then works inside one span."""
        inputs = [self._input_of(part, current) for part in action.parts]
        for part in action.parts:
            self._await_weights(part, current)
        with self._span(action, current):
            if self._pairs is not None and action.kind is Kind.OVERLAP_F_B:
                self._run_pair(self._pairs, action, inputs, current)
            else:
                for part, tensor in zip(action.parts, inputs, strict=True):
                    self._work(part, tensor, current)
        if current.meter is not None:
            for part in action.parts:
                if part.kind in (Kind.B, Kind.W):
                    current.meter.release(part.stage, microbatch_of(part))
            current.meter.sample(current.clock.now_s())

    def _work(self, part: Action, tensor: Tensor | None, current: Pass) -> None:
        with self._recorder.action(part):
            _WORK[part.kind](self, part, tensor, current)

    def _run_pair(self, pairs: PairRunner, action: Action, inputs: Sequence[Tensor | None], current: Pass) -> None:
        """Forward and backward in turns, each under the other's collectives."""
        (forward, backward), (hidden_BSH, gradient_BSH) = action.parts, inputs
        place = self._watch.place(BACKWARD_LANE)
        place.waits(backward)

        def on_lane() -> None:
            place.runs(backward)
            with current.watch(None), current.watch(backward):
                self._work(backward, gradient_BSH, current)
            place.done()

        pairs.run(lambda: self._work(forward, hidden_BSH, current), on_lane)
        for wait in pairs.take_waits():
            times_s = current.clock.at(wait.start_s), current.clock.at(wait.end_s)
            current.trace.spans.append(
                Span(self._global_rank, collective_lane(wait.part, wait.axis), wait.part, *times_s)
            )

    def _input_of(self, action: Action, current: Pass) -> Tensor | None:
        """What must have arrived before `action` starts: hidden states for F, the output's gradient for B and I."""
        if action.kind is Kind.F and (sources := self._placement.sources_of(action.stage)):
            self._show_wait(action, Action(sources[0], Kind.F, action.microbatch), current)
            if not self._is_here(sources[0], action.microbatch):
                return current.mail.take(Action(action.stage, Kind.RECV_F, action.microbatch))
            return current.mail.take(Action(sources[0], Kind.SEND_F, action.microbatch))
        if action.kind in (Kind.B, Kind.I) and not self._placement.has_loss(action.stage):
            self._show_wait(action, Action(self._placement.target_of(action.stage), Kind.B, action.microbatch), current)
            return current.mail.take(Action(action.stage, Kind.RECV_B, action.microbatch))
        return None

    def _is_here(self, stage: int, microbatch: int | None) -> bool:
        return self._placement.rank_of(stage, microbatch) == self._pp_rank

    def _await_weights(self, action: Action, current: Pass) -> None:
        """Returns when a stage that rests in parts has come together."""
        if action.stage in self._unsharded and not current.has_weights(action):
            current.place.waits(action, needs=f"lane {DP_LANE}")
            current.mail.wait_until(lambda: current.has_weights(action))
        if action.stage in self._unsharded:
            wait_for(current.gathered[action.stage], current.clock.device)

    def _show_wait(self, action: Action, needs: Action, current: Pass) -> None:
        peer = self._placement.rank_of(needs.stage, needs.microbatch)
        needs = replace(needs, stage=self._placement.called_there(needs.stage))
        current.place.waits(action, needs=str(needs), peer=self._global_rank_of(peer))

    def _forward(self, action: Action, hidden_BSH: Tensor | None, current: Pass) -> None:
        stage, microbatch = action.stage, microbatch_of(action)
        training = torch.is_grad_enabled()
        if hidden_BSH is not None and training:
            hidden_BSH.requires_grad_(True)
        metering = current.meter.forward(stage, microbatch) if current.meter is not None else nullcontext()
        with metering:
            output = self.stages[stage](current.microbatches[microbatch], hidden_BSH)
        if training:
            # what is sent is freed when it has left: of an output, its backward needs no more than its
            # place in autograd's graph
            current.saved[stage, microbatch] = (
                hidden_BSH,
                output if self._placement.has_loss(stage) else get_gradient_edge(output),
            )
        if self._placement.has_loss(stage):
            current.trace.token_losses[microbatch] = output.detach()
        else:
            # for the send lane, or a later stage of this rank
            current.mail.put(Action(stage, Kind.SEND_F, microbatch), output.detach())

    def _backward(self, action: Action, gradient_BSH: Tensor | None, current: Pass) -> None:
        """B and I: the gradient of the stage's input; the last stage starts from the sum of its token losses."""
        stage, microbatch = action.stage, microbatch_of(action)
        hidden_BSH, output = current.saved.pop((stage, microbatch))
        work = self.stages[stage].weight_work
        # Autograd has a thread of its own for a GPU: collectives of the backward would not know their action there, and
        # ranks that are threads would wait for each other in it.
        in_this_thread = torch.autograd.set_multithreading_enabled(False)
        with in_this_thread, work.defer(microbatch) if action.kind is Kind.I else nullcontext():
            torch.autograd.backward(output, torch.ones_like(output) if isinstance(output, Tensor) else gradient_BSH)
        if action.kind is Kind.B:
            self._finish_gradients(action, current)
        if hidden_BSH is not None:
            assert hidden_BSH.grad is not None
            sources = self._placement.sources_of(stage)
            here = self._is_here(sources[0], microbatch)
            taken_as = Action(sources[0], Kind.RECV_B, microbatch) if here else Action(stage, Kind.SEND_B, microbatch)
            current.mail.put(taken_as, hidden_BSH.grad)

    def _weight_gradient(self, action: Action, _: Tensor | None, current: Pass) -> None:
        with torch.no_grad():
            self.stages[action.stage].weight_work.run(microbatch_of(action))
        self._finish_gradients(action, current)

    def _finish_gradients(self, action: Action, current: Pass) -> None:
        with torch.no_grad():
            self.stages[action.stage].finish_gradients(current.microbatches[microbatch_of(action)])

    @contextmanager
    def _span(self, action: Action, current: Pass) -> Iterator[None]:
        current.place.runs(action)
        start = current.clock.mark()
        with current.meter.during(action, compute=True) if current.meter is not None else nullcontext():
            yield
        current.times.append((action, start, current.clock.mark()))


_WORK: dict[Kind, Callable[[Executor, Action, Tensor | None, Pass], None]] = {
    Kind.F: Executor._forward,
    Kind.B: Executor._backward,
    Kind.I: Executor._backward,
    Kind.W: Executor._weight_gradient,
}


def microbatch_of(action: Action) -> int:
    """That of a compute action or a message."""
    assert action.microbatch is not None, f"{action} has no microbatch"
    return action.microbatch


def forward_only(row: Sequence[Action]) -> list[Action]:
    """The forwards of a row with their messages and the gathers they need, in the row's order: a part of a
    legal order is legal."""
    kinds = (Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD)
    forward: list[Action] = []
    gathers: dict[int, Action] = {}  # by stage those that no forward has needed yet
    for action in (part for each in row for part in each.parts if part.kind in kinds):
        if action.kind is Kind.UNSHARD:
            gathers[action.stage] = action
            continue
        if action.kind is Kind.RESHARD and gathers.pop(action.stage, None) is not None:
            continue
        if action.kind is Kind.F and action.stage in gathers:
            forward.append(gathers.pop(action.stage))
        forward.append(action)
    return forward


def gathers_before(row: Sequence[Action]) -> dict[Action, int]:
    """For every action how often the weights of its stage have come together before it in a row."""
    counts, found = Counter[int](), dict[Action, int]()
    for action in (part for each in row for part in each.parts):
        counts[action.stage] += action.kind is Kind.UNSHARD
        found[action] = counts[action.stage]
    return found
