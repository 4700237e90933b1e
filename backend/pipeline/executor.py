"""The executor: one pipeline rank's row of a lowered schedule, action by action, on real tensors.

The calling thread is the compute lane and walks the row. It starts a compute action when its inputs have arrived and never waits
for a message to leave. Message lanes (`messages.py`) and the `dp` lane, which reduces gradients, are threads of their own; STEP waits
for the `dp` lane. This is the simulator's execution rule, and a test compares the two orders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ...core.action import RECEIVES, Action, ActionArray, Kind
from ...core.schedule import Schedule
from ...core.timeline import COMPUTE_LANE, Span
from ..recorder import Recorder
from .activations import MemoryMeter
from .messages import Clock, Lane, Mail, MessageChannel, lane_name, message_lanes
from .watch import Place, RankWatch

DP_LANE = "dp"


class WeightWork(Protocol):
    """Weight gradients that an input-gradient action (I) leaves for its weight-gradient action (W)."""

    def defer(self, microbatch: int) -> AbstractContextManager[None]:
        """Inside, weight gradients are kept as work for later instead of being computed."""

    def run(self, microbatch: int) -> None:
        """Computes what was deferred for a microbatch."""


class EarlyReduction(Protocol):
    """Says when the `dp` lane may begin REDUCE_GRAD before its place in the row; `backend.data_parallel.early` has one."""

    def begin(self, mail: Mail, num_microbatches: Mapping[int, int]) -> None:
        """A walk begins, with so many microbatches of each stage. Waits go through `mail`, which fails with any lane."""

    def wait_for_first(self, stage: int) -> None:
        """Returns when REDUCE_GRAD of a stage has something to do."""

    def complete(self, stage: int) -> None:
        """The compute lane has come to REDUCE_GRAD of a stage: all weight gradients are there."""


class ExecutableStage(Protocol):
    """What the executor needs of a stage; `backend.model.transformer.Stage` is one."""

    weight_work: WeightWork

    def __call__(self, microbatch: Any, hidden_BSH: Tensor | None) -> Tensor:
        """Hidden states for the next stage, or token losses `[b, s]` on the last one."""

    def finish_gradients(self, microbatch: Any) -> None:
        """Called after B, or W, when all weight gradients of a microbatch are computed."""


@dataclass
class Trace:
    """What one pass over a row left behind: spans of all lanes, and token losses per microbatch where the last stage is."""

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
    saved: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    meter: MemoryMeter | None = None
    reduce_gradients: Callable[[int], None] | None = None
    step: Callable[[dict[int, Tensor]], None] | None = None
    early: EarlyReduction | None = None

    def watch(self, action: Action | None) -> AbstractContextManager[object]:
        """Where a lane's thread (None), or one of its actions, runs."""
        if self.meter is None:
            return nullcontext()
        return self.meter.watch() if action is None else self.meter.during(action, compute=False)


class Executor:
    """Runs the row of one pipeline rank.

    `stages` are the rank's own, by stage number; `channel(direction, peer, sending)` is the line to a pipeline rank;
    `message_shape` is the shape `[samples, sequence, hidden]` of every message.
    """

    def __init__(
        self,
        schedule: Schedule,
        pp_rank: int,
        stages: Mapping[int, ExecutableStage],
        *,
        channel: Callable[[Literal["F", "B"], int, bool], MessageChannel],
        message_shape: tuple[int, ...],
        dtype: torch.dtype,
        global_rank: int,
        recorder: Recorder,
        watch: RankWatch | None = None,
        global_rank_of: Callable[[int], int] = lambda pp_rank: pp_rank,
    ):
        """`watch` shows others where the lanes are; there, pipeline ranks are called `global_rank_of(pp_rank)`."""
        assert schedule.is_lowered
        self.row = schedule.row(pp_rank)
        self.forward_row = forward_only(self.row)
        self.stages = stages
        self._placement = schedule.placement
        self._pp_rank = pp_rank
        self._last_stage = schedule.num_stages - 1
        self._channel = channel
        self._message_shape = message_shape
        self._dtype = dtype
        self._global_rank = global_rank
        self._recorder = recorder
        self._watch = watch or RankWatch(global_rank)
        self._global_rank_of = global_rank_of
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

        `reduce_gradients(stage)` is REDUCE_GRAD and runs on the `dp` lane; `step(token_losses)` is STEP. `microbatches[i]` is
        microbatch i of this rank. With `early` gradients are reduced as they become ready. A failure on any lane is raised here.
        """
        current = Pass(
            microbatches,
            Mail(),
            clock,
            Trace(),
            self._watch.place(total=len(self.row)),
            meter=meter,
            reduce_gradients=reduce_gradients,
            step=step,
            early=early,
        )
        if early is not None:
            parts = (part for action in self.row for part in action.parts)
            early.begin(current.mail, Counter(part.stage for part in parts if part.kind is Kind.F))
        return self._walk(self.row, current)

    def evaluate(self, microbatches: Sequence[Any], *, clock: Clock) -> Trace:
        """The forwards of the row and their messages, without gradients."""
        with torch.no_grad():
            place = self._watch.place(total=len(self.forward_row))
            return self._walk(self.forward_row, Pass(microbatches, Mail(), clock, Trace(), place))

    def _walk(self, row: Sequence[Action], current: Pass) -> Trace:
        mail = current.mail
        try:
            lanes = self._start_lanes(row, current)
            for number, action in enumerate(row, 1):
                current.place.comes_to(number)
                if action.kind in RECEIVES:
                    lanes[lane_name(action, self._placement)].permit()
                elif action.kind is Kind.REDUCE_GRAD and current.early is not None:
                    current.early.complete(action.stage)
                elif action.kind is Kind.REDUCE_GRAD:
                    lanes[DP_LANE].permit()
                elif action.kind is Kind.STEP:
                    if DP_LANE in lanes:
                        current.place.waits(action, needs=f"lane {DP_LANE}")
                        lanes[DP_LANE].finish()
                    self._step(action, current)
                elif action.kind not in (Kind.SEND_F, Kind.SEND_B):
                    self._compute(action, current)
            for name, lane in lanes.items():
                current.place.waits("the end of the row", needs=f"lane {name}")
                lane.finish()
            current.place.done()
        except BaseException as error:
            mail.fail(error)
            raise
        assert not current.saved, f"forwards without a backward: {sorted(current.saved)}"
        for lane in lanes.values():
            current.trace.spans += lane.spans
        return current.trace

    def _start_lanes(self, row: Sequence[Action], current: Pass) -> dict[str, Lane]:
        lanes = message_lanes(
            row,
            placement=self._placement,
            channel=self._channel,
            shape=self._message_shape,
            dtype=self._dtype,
            mail=current.mail,
            clock=current.clock,
            global_rank=self._global_rank,
            record=self._recorder.message,
            watch=current.watch,
            places=self._watch,
        )
        if reductions := [action for action in row if action.kind is Kind.REDUCE_GRAD]:

            def reduce_gradients(action: Action, _: Tensor | None) -> None:
                assert current.reduce_gradients is not None
                with self._recorder.action(action):
                    current.reduce_gradients(action.stage)

            def wait_for_first(action: Action) -> None:
                if current.early is not None:
                    current.early.wait_for_first(action.stage)

            lanes[DP_LANE] = Lane(
                DP_LANE,
                reductions,
                mail=current.mail,
                clock=current.clock,
                global_rank=self._global_rank,
                prepare=wait_for_first,
                perform=reduce_gradients,
                permits=0 if current.early is None else len(reductions),
                watch=current.watch,
                place=self._watch.place(DP_LANE, len(reductions)),
            )
        return lanes

    def _step(self, action: Action, current: Pass) -> None:
        assert current.step is not None
        with self._span(action, current), self._recorder.action(action):
            current.step(current.trace.token_losses)
        if current.meter is not None:
            current.meter.sample(current.clock.now_s())

    def _compute(self, action: Action, current: Pass) -> None:
        """An action of the compute lane: waits for its inputs, then works inside one span."""
        inputs = [self._input_of(part, current) for part in action.parts]
        with self._span(action, current):
            for part, tensor in zip(action.parts, inputs, strict=True):
                with self._recorder.action(part):
                    _WORK[part.kind](self, part, tensor, current)
        if current.meter is not None:
            for part in action.parts:
                if part.kind in (Kind.B, Kind.W):
                    current.meter.release(part.stage, part.microbatch)
            current.meter.sample(current.clock.now_s())

    def _input_of(self, action: Action, current: Pass) -> Tensor | None:
        """What must have arrived before `action` starts: hidden states for F, the output's gradient for B and I."""
        if action.kind is Kind.F and action.stage > 0:
            self._show_wait(action, Action(action.stage - 1, Kind.F, action.microbatch), current)
            return current.mail.take(Action(action.stage, Kind.RECV_F, action.microbatch))
        if action.kind in (Kind.B, Kind.I) and action.stage < self._last_stage:
            self._show_wait(action, Action(action.stage + 1, Kind.B, action.microbatch), current)
            return current.mail.take(Action(action.stage, Kind.RECV_B, action.microbatch))
        return None

    def _show_wait(self, action: Action, needs: Action, current: Pass) -> None:
        peer = self._placement.rank_of(needs.stage, needs.microbatch)
        current.place.waits(action, needs=str(needs), peer=self._global_rank_of(peer))

    def _forward(self, action: Action, hidden_BSH: Tensor | None, current: Pass) -> None:
        stage, microbatch = action.stage, action.microbatch
        training = torch.is_grad_enabled()
        if hidden_BSH is not None and training:
            hidden_BSH.requires_grad_(True)
        metering = current.meter.forward(stage, microbatch) if current.meter is not None else nullcontext()
        with metering:
            output = self.stages[stage](current.microbatches[microbatch], hidden_BSH)
        if training:
            current.saved[stage, microbatch] = hidden_BSH, output
        if stage == self._last_stage:
            current.trace.token_losses[microbatch] = output.detach()
        else:
            self._hand_over(Action(stage, Kind.SEND_F, microbatch), Action(stage + 1, Kind.RECV_F, microbatch), output.detach(), current)

    def _backward(self, action: Action, gradient_BSH: Tensor | None, current: Pass) -> None:
        """B and I: the gradient of the stage's input; the last stage starts from the sum of its token losses."""
        stage, microbatch = action.stage, action.microbatch
        hidden_BSH, output = current.saved.pop((stage, microbatch))
        work = self.stages[stage].weight_work
        with work.defer(microbatch) if action.kind is Kind.I else nullcontext():
            torch.autograd.backward(output, torch.ones_like(output) if gradient_BSH is None else gradient_BSH)
        if action.kind is Kind.B:
            self._finish_gradients(action, current)
        if hidden_BSH is not None:
            self._hand_over(Action(stage, Kind.SEND_B, microbatch), Action(stage - 1, Kind.RECV_B, microbatch), hidden_BSH.grad, current)

    def _weight_gradient(self, action: Action, _: Tensor | None, current: Pass) -> None:
        with torch.no_grad():
            self.stages[action.stage].weight_work.run(action.microbatch)
        self._finish_gradients(action, current)

    def _finish_gradients(self, action: Action, current: Pass) -> None:
        with torch.no_grad():
            self.stages[action.stage].finish_gradients(current.microbatches[action.microbatch])

    def _hand_over(self, send: Action, receive: Action, tensor: Tensor, current: Pass) -> None:
        """To the send lane, or directly to the neighbour stage where this rank holds that too."""
        here = self._placement.rank_of(receive.stage, receive.microbatch) == self._pp_rank
        current.mail.put(receive if here else send, tensor)

    @contextmanager
    def _span(self, action: Action, current: Pass) -> Iterator[None]:
        current.place.runs(action)
        start_s = current.clock.now_s()
        with current.meter.during(action, compute=True) if current.meter is not None else nullcontext():
            yield
        current.trace.spans.append(Span(self._global_rank, COMPUTE_LANE, action, start_s, current.clock.now_s()))


_WORK: dict[Kind, Callable[[Executor, Action, Tensor | None, Pass], None]] = {
    Kind.F: Executor._forward,
    Kind.B: Executor._backward,
    Kind.I: Executor._backward,
    Kind.W: Executor._weight_gradient,
}


def forward_only(row: ActionArray) -> list[Action]:
    """The forwards of a row with their messages, in the row's order: a part of a legal order is legal."""
    kept = (Kind.F, Kind.SEND_F, Kind.RECV_F)
    return [part for action in row for part in action.parts if part.kind in kept]
