"""The executor on a toy stage: y = tanh(x) * w, so that values, orders and failures are all that is tested."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
import torch

from shardproof import Schedule, build, check, lower, run_schedule
from shardproof.backend.base.recorder import Recorder
from shardproof.backend.pipeline.executor import Executor, forward_only
from shardproof.backend.pipeline.measure import transfers_only
from shardproof.backend.pipeline.messages import Clock, receive_of
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.base.errors import RankFailure
from shardproof.core.layout.layout import Layout
from shardproof.core.schedule.action import Action, Kind
from shardproof.core.schedule.timeline import COMPUTE_LANE, Span, Timeline

SHAPE = (2, 3)


class ToyWork:
    """Weight gradients of one scalar weight, computed at once or when asked."""

    def __init__(self):
        self.sum = torch.zeros(())
        self.order = []
        self._deferred = {}
        self._deferring = None

    @contextmanager
    def defer(self, microbatch):
        self._deferring = microbatch
        try:
            yield
        finally:
            self._deferring = None

    def run(self, microbatch):
        self.add(microbatch, self._deferred.pop(microbatch))

    def submit(self, microbatch, value):
        if self._deferring is None:
            self.add(microbatch, value)
        else:
            self._deferred[microbatch] = value

    def add(self, microbatch, value):
        self.order.append(microbatch)
        self.sum = self.sum + value


class Scale(torch.autograd.Function):
    """x * w, whose weight gradient goes to the stage's work instead of through autograd."""

    @staticmethod
    def forward(ctx, x, weight, work, microbatch):
        ctx.save_for_backward(x)
        ctx.weight, ctx.work, ctx.microbatch = weight, work, microbatch
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        ctx.work.submit(ctx.microbatch, (gradient * x).sum())
        return gradient * ctx.weight, None, None, None


class ToyStage:
    def __init__(self, stage, inputs, last):
        self.weight = 1.0 + stage / 4
        self.weight_work = ToyWork()
        self.inputs, self.last = inputs, last

    def __call__(self, microbatch, hidden):
        x = self.inputs[microbatch] if hidden is None else hidden
        if not x.requires_grad and torch.is_grad_enabled():
            x.requires_grad_(True)
        y = Scale.apply(torch.tanh(x), self.weight, self.weight_work, microbatch)
        return y.sum(dim=1) if self.last else y

    def finish_gradients(self, microbatch):
        """The weight is a scalar: there is nothing to finish."""


def inputs(num_microbatches):
    return [torch.arange(6.0).reshape(SHAPE) / 7 + microbatch for microbatch in range(num_microbatches)]


def expected(num_stages, num_microbatches):
    """Losses and weight gradients by plain autograd, microbatch after microbatch."""
    weights = [torch.tensor(1.0 + stage / 4, requires_grad=True) for stage in range(num_stages)]
    losses = []
    for x in inputs(num_microbatches):
        for weight in weights:
            x = torch.tanh(x) * weight
        losses.append(x.sum(dim=1))
        losses[-1].sum().backward()
    return [loss.detach() for loss in losses], [weight.grad for weight in weights]


def run(
    schedule, prepare=lambda stages, rank: None, row_order=None, timeout_s=60, line=lambda direction, channel: channel
):
    """Every rank's (trace, weight sums, REDUCE_GRAD order, events around STEP), all ranks being threads. `line` may put
    something around a channel."""

    def job(transport, _):
        rank = transport.global_rank
        pairs = [
            (d, a, b) for d in "FB" for a in range(schedule.num_ranks) for b in range(schedule.num_ranks) if a != b
        ]
        channels = {
            pair: transport.channel(f"{pair[0]} {pair[1]}>{pair[2]}", *pair[1:]) for pair in pairs if rank in pair[1:]
        }
        last = schedule.num_stages - 1
        stages = {
            s: ToyStage(s, inputs(schedule.num_microbatches), s == last) for s in schedule.placement.stages_of(rank)
        }
        prepare(stages, rank)
        executor = Executor(
            schedule,
            rank,
            stages,
            channel=lambda d, peer, sending: line(d, channels[(d, rank, peer) if sending else (d, peer, rank)]),
            message_shape=SHAPE,
            dtype=torch.float32,
            global_rank=rank,
            recorder=Recorder(),
            row_order=row_order,
        )
        reduced, stepped = [], []
        microbatches = range(schedule.num_microbatches)
        clock = Clock(torch.device("cpu"))
        trace = executor.train(
            microbatches,
            reduce_gradients=reduced.append,
            step=lambda losses: stepped.append(list(reduced)),
            clock=clock,
        )
        forward = executor.evaluate(microbatches, clock=clock)
        return trace, {s: stage.weight_work for s, stage in stages.items()}, stepped, forward

    return run_threads(MemoryWorld(schedule.num_ranks, timeout_s=timeout_s), job, None)


def check_values(schedule, row_order=None):
    results = run(schedule, row_order=row_order)
    losses, gradients = expected(schedule.num_stages, schedule.num_microbatches)
    last_rank = schedule.placement.rank_of(schedule.num_stages - 1, 0)
    for trace in (results[last_rank][0], results[last_rank][3]):
        assert sorted(trace.token_losses) == list(range(schedule.num_microbatches))
        for microbatch, loss in enumerate(losses):
            torch.testing.assert_close(trace.token_losses[microbatch], loss)
    for _, works, stepped, _ in results:
        assert [sorted(stages) for stages in stepped] == [sorted(works)], (
            "STEP runs once, after every REDUCE_GRAD of its rank"
        )
        for stage, work in works.items():
            torch.testing.assert_close(work.sum, gradients[stage])
    return results


SPLIT = """0F0,0F1,0F2,0I0,0W0,0I1,0I2,0W2,0W1
1F0,1I0,1F1,1I1,1W0,1F2,1W1,1I2,1W2
"""
PAIRS = """0F0,0F1,(0F2;0B0)OVERLAP_F_B,(0F3;0B1)OVERLAP_F_B,0B2,0B3
1F0,(1F1;1B0)OVERLAP_F_B,(1F2;1B1)OVERLAP_F_B,(1F3;1B2)OVERLAP_F_B,1B3
"""
VEE = """0F0,3F0,3B0,0F1,0B0,3F1,3B1,0B1
1F0,2F0,2B0,1F1,1B0,2F1,2B1,1B1
"""

SCHEDULES = {
    "gpipe p4 m8": build("GPipe", pp=4, num_microbatches=8),
    "1f1b p4 m8": build("1F1B", pp=4, num_microbatches=8),
    "1f1b p5 m3, fewer microbatches than ranks": build("1F1B", pp=5, num_microbatches=3),
    "1f1b p2 m1": build("1F1B", pp=2, num_microbatches=1),
    "1f1b p1 m3": build("1F1B", pp=1, num_microbatches=3),
    "interleaved p2 v3 m4": build("Interleaved1F1B", pp=2, vpp=3, num_microbatches=4),
    "interleaved p3 v2 m6": build("Interleaved1F1B", pp=3, vpp=2, num_microbatches=6),
    "split backward": Schedule.from_csv(SPLIT),
    "overlapped pairs": Schedule.from_csv(PAIRS),
    "vee, neighbours on one rank": Schedule.from_csv(VEE),
}


every_order = pytest.mark.parametrize(
    "row_order", [None, "together", "in order"], ids=["lanes", "together", "in-order"]
)


@every_order
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_losses_and_gradients_are_those_of_plain_autograd(schedule, row_order):
    check_values(lower(schedule), row_order)


@every_order
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_order_on_every_lane_is_the_rows_and_the_simulators(schedule, row_order):
    schedule = lower(schedule)
    measured = Timeline.from_spans(
        [span for trace, *_ in run(schedule, row_order=row_order) for span in trace.spans], "measured"
    )
    predicted = run_schedule(schedule)
    assert sorted(measured.spans.lanes) == sorted(predicted.spans.lanes)
    for rank, row in enumerate(schedule.rows()):
        for lane in predicted.spans.lanes:
            order = [span.action for span in measured.select(rank, lane)]
            assert order == [span.action for span in predicted.select(rank, lane)], (rank, lane)
        compute = [action for action in row if action.kind <= Kind.W or action.kind in (Kind.STEP, Kind.OVERLAP_F_B)]
        assert [span.action for span in measured.select(rank, COMPUTE_LANE)] == compute


def test_weight_gradients_run_in_the_order_of_their_w_actions():
    results = check_values(lower(Schedule.from_csv(SPLIT)))
    assert results[0][1][0].order == [0, 2, 1]
    assert results[1][1][1].order == [0, 1, 2]


def test_forward_only_keeps_forwards_and_their_messages_in_order():
    row = lower(Schedule.from_csv(PAIRS)).row(1)
    assert [str(action) for action in forward_only(row)] == [
        *("1RECV_F0", "1F0", "1RECV_F1", "1F1", "1RECV_F2", "1F2", "1RECV_F3", "1F3")
    ]


class CountedReceives:
    """A channel that counts what has been received, whoever waits for that."""

    def __init__(self, channel):
        self.channel, self.count, self.changed = channel, 0, threading.Condition()

    def __getattr__(self, name):
        return getattr(self.channel, name)

    def receive(self, shape, dtype):
        tensor = self.channel.receive(shape, dtype)
        self._received()
        return tensor

    def begin_receive(self, shape, dtype):
        end = self.channel.begin_receive(shape, dtype)

        def counted():
            tensor = end()
            self._received()
            return tensor

        return counted

    def _received(self):
        with self.changed:
            self.count += 1
            self.changed.notify_all()


@pytest.mark.parametrize(("row_order", "ahead"), [(None, 2), ("together", 0), ("in order", 0)])
def test_while_a_forward_runs_two_more_receives_complete_than_its_row_lists_before_it_or_none(row_order, ahead):
    schedule = lower(build("GPipe", pp=2, num_microbatches=6))
    row = [str(action) for action in schedule.row(1)]
    wanted = sum("RECV_F" in cell for cell in row[: row.index("1F0")]) + ahead
    lines, seen = {}, []

    class WaitingStage(ToyStage):
        def __call__(self, microbatch, hidden):
            if microbatch == 0 and torch.is_grad_enabled():
                with lines["F"].changed:
                    assert lines["F"].changed.wait_for(lambda: lines["F"].count >= wanted, timeout=600), lines[
                        "F"
                    ].count
                time.sleep(0.2)  # for what must not come
                seen.append(lines["F"].count)
            return super().__call__(microbatch, hidden)

    def counted(direction, channel):
        return (
            lines.setdefault(direction, CountedReceives(channel))
            if threading.current_thread().name.startswith("rank 1")
            else channel
        )

    def slow_down(stages, rank):
        if rank == 1:
            stages[1].__class__ = WaitingStage

    run(schedule, slow_down, row_order, line=counted)
    assert seen == [wanted]


CROSSING = """0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1
"""


def test_messages_that_cross_pass_each_other_together_and_wait_for_ever_one_by_one_as_check_says():
    schedule = lower(Schedule.from_csv(CROSSING))
    (finding,) = check(schedule)
    assert finding.rule == "rendezvous-cycle" and "rank 0 in 0SEND_F1 waits for 1RECV_F1" in finding.what
    check_values(schedule, "together")
    with pytest.raises(RankFailure, match=r"channel '(F 0>1|B 1>0)' .*: send is not received after 0.5 s"):
        run(schedule, row_order="in order", timeout_s=0.5)


def test_an_error_in_one_rank_ends_all_and_is_named():
    def fail(stages, rank):
        if rank == 2:
            stages[2].inputs, stages[2].last = None, "not a tensor"
            stages[2].weight = "three"

    with pytest.raises(RankFailure, match="rank 2 failed: TypeError"):
        run(lower(build("1F1B", pp=4, num_microbatches=4)), fail)


def test_a_message_is_shown_from_when_both_ends_are_there_in_its_own_pipeline():
    layout = Layout(tp=2, pp=2)  # ranks 0 and 1 hold stage 0, ranks 2 and 3 stage 1
    send, receive = Action(0, Kind.SEND_F, 0), Action(1, Kind.RECV_F, 0)
    spans = [
        Span(0, COMPUTE_LANE, Action(0, Kind.F, 0), 0.0, 3.0),
        Span(0, "F>1", send, 3.0, 4.0),
        Span(2, "F<0", receive, 0.5, 4.1),  # posted early: waits for its send
        Span(1, "F>1", send, 1.0, 6.0),  # waits for its receive, under rendezvous
        Span(3, "F<0", receive, 5.0, 6.1),
    ]
    assert [(span.start_s, span.end_s) for span in transfers_only(spans, layout)] == [
        (0, 3),
        (3, 4),
        (3, 4.1),
        (5, 6),
        (5, 6.1),
    ]


def test_a_send_is_taken_by_the_receive_of_the_neighbour_stage():
    assert str(receive_of(Action.from_str("1SEND_F4"))) == "2RECV_F4"
    assert str(receive_of(Action.from_str("3SEND_B0"))) == "2RECV_B0"


def test_a_forward_waits_for_the_gather_before_it_and_not_for_the_one_before_that():
    """Weights that are freed and gathered again with nothing in between: what is still there is about to go."""
    from shardproof.backend.pipeline.executor import Mail, Pass, Trace, gathers_before
    from shardproof.backend.watch.watch import RankWatch

    row = [Action.from_str(each) for each in ["0UNSHARD", "0F2", "0RESHARD", "0UNSHARD", "0F3", "0RESHARD"]]
    needs = gathers_before(row)
    current = Pass((), Mail(), None, Trace(), RankWatch().place(total=len(row)), needs=needs)
    current.gather(0, None)
    assert [current.has_weights(row[place]) for place in (1, 4)] == [True, False]
    current.forget(0)
    assert not current.has_weights(row[4])
    current.gather(0, None)
    assert current.has_weights(row[4])
