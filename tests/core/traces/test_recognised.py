"""Actions recognised in traces that name none: by what ran forwards and backwards, messages between, and a schedule."""

import pytest

from shardproof import build, lower
from shardproof.core.base.errors import TimelineError
from shardproof.core.schedule.action import COMPUTE, Kind
from shardproof.core.traces.load import recording_of


class Rank:
    """Events of one rank as Kineto writes them: a host that computes, or one that launches kernels."""

    def __init__(self, on_device=False):
        self.events, self.now, self.number, self.made = [], 0, 0, {}
        self.on_device, self.launch, self.slower = on_device, 0, 1

    def event(self, name, length, category="cpu_op", thread=1, **args):
        start, self.now = self.now, self.now + length
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 1,
                "tid": thread,
                "ts": start,
                "dur": length,
                "args": args,
            }
        )
        return start

    def kernel(self, name, start, length, thread=1):
        self.launch += 1
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": thread, "dur": 1}
        self.events.append({**launch, "ts": self.now - 1, "args": {"correlation": self.launch}})
        kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start, "dur": length}
        self.events.append({**kernel, "args": {"correlation": self.launch}})

    def forward(self, key):
        """Two operations of a layer, of which autograd numbers both, and one that it only looks at."""
        self.made[key] = [self.number, self.number + 1]
        for number in self.made[key]:
            self.event("aten::mm", 10 * self.slower, **{"Sequence number": number})
            if self.on_device:
                self.kernel("gemm", 1000 + 10 * self.now, 50)
        self.number += 2
        self.event("aten::detach", 1, **{"Sequence number": self.number})

    def backward(self, key):
        for number in reversed(self.made[key]):
            name = "autograd::engine::evaluate_function: MmBackward0"
            self.event(name, 20 * self.slower, thread=2, **{"Sequence number": number})
            if self.on_device:
                self.kernel("gemm", 2000 + 10 * self.now, 80, thread=2)
        self.event("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 1, thread=2)

    def message(self, word, length=5):
        self.event(f"gloo:{word}", length, "user_annotation")

    def run(self, row, slower=1):
        """The actions of a row, one after the other."""
        self.slower = slower
        for action in row:
            if action.kind is Kind.F:
                self.forward((action.stage, action.microbatch))
            elif action.kind in (Kind.B, Kind.I):
                self.backward((action.stage, action.microbatch))
            elif action.kind is Kind.STEP:
                self.event("Optimizer.step#AdamW.step", 30, "user_annotation")
            elif action.kind in (Kind.SEND_F, Kind.SEND_B):
                self.message("send")
            elif action.kind in (Kind.RECV_F, Kind.RECV_B):
                self.message("recv")
            self.now += 3
        return self


def recorded(ranks, schedule=None):
    documents = {
        f"{rank}.json": {"traceEvents": each.events, "distributedInfo": {"rank": rank}}
        for rank, each in enumerate(ranks)
    }
    return recording_of(documents, (lambda rank: list(schedule.row(rank))) if schedule else None)


UNDECIDED = {("1F1B", 1), ("Interleaved1F1B", 1)}
"""Ranks that receive from both sides, in an order that programs choose: their receives are left out."""


def names(timeline, rank):
    own = sorted((span for span in timeline.spans if span.global_rank == rank), key=lambda span: span.start_s)
    return [str(span.action) for span in own]


@pytest.mark.parametrize(("name", "vpp", "microbatches"), [("GPipe", 1, 3), ("1F1B", 1, 5), ("Interleaved1F1B", 2, 6)])
def test_the_last_whole_step_of_a_schedule_is_found_with_its_messages(name, vpp, microbatches):
    """Two steps, and the begin of a third."""
    schedule = lower(build(name, pp=3, vpp=vpp, num_microbatches=microbatches))
    rows = [[action for action in row if action.kind is not Kind.REDUCE_GRAD] for row in schedule.rows()]
    ranks = [Rank().run(row).run(row, slower=2).run(row[: len(row) // 2]) for row in rows]
    timeline = recorded(ranks, schedule).timeline
    for rank, row in enumerate(rows):
        found = names(timeline, rank)
        sorts = {"SEND", "RECV"} - ({"RECV"} if (name, rank) in UNDECIDED else set())
        wanted = [str(each) for each in row if each.kind in COMPUTE or any(sort in str(each) for sort in sorts)]
        assert [each for each in found if "STEP" not in each] == wanted
        assert found[-1] == f"{rank}STEP"
    lasted = {str(span.action): span.duration_s for span in timeline.spans}
    assert lasted["0F0"] == pytest.approx(40e-6) and lasted["2B1"] == pytest.approx(81e-6)  # of the second step


def test_a_forward_and_a_backward_last_from_their_first_kernel_to_their_last():
    rank = Rank(on_device=True)
    rank.forward("a")
    rank.backward("a")
    forward, backward = recorded([rank]).timeline.spans
    assert str(forward.action) == "0F0" and forward.duration_s == pytest.approx(150e-6)  # kernels at 1100 and 1200
    assert str(backward.action) == "0B0" and backward.duration_s == pytest.approx(280e-6)  # 2410 and 2610


def test_without_messages_the_pairs_before_an_optimizer_step_are_the_microbatches_of_one_stage():
    rank = Rank()
    for _ in range(2):
        for key in "abc":
            rank.forward(key)
            rank.backward(key)
        rank.event("Optimizer.step#SGD.step", 30, "user_annotation")
    assert names(recorded([rank]).timeline, 0) == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2", "0STEP"]


def test_forwards_with_nothing_between_them_are_distinguished_by_their_backwards():
    rank = Rank()
    for key in "ab":
        rank.forward(key)
    for key in "ab":
        rank.backward(key)
        rank.message("send")
    schedule = lower(build("GPipe", pp=2, num_microbatches=2))
    document = {"1.json": {"traceEvents": rank.events, "distributedInfo": {"rank": 1}}}
    timeline = recording_of(document, lambda at: list(schedule.row(at))).timeline
    assert [name for name in names(timeline, 1) if "SEND" not in name] == ["1F0", "1F1", "1B0", "1B1"]


def test_messages_inside_of_an_operation_do_not_cut_it():
    rank = Rank()
    begins = rank.now
    rank.forward("a")
    rank.message("send")  # around a ring, inside of what follows
    rank.number += 1
    rank.events.append(
        {"ph": "X", "cat": "cpu_op", "name": "RingAttention", "pid": 1, "tid": 1, "ts": begins, "dur": rank.now + 5}
    )
    rank.backward("a")
    assert names(recorded([rank]).timeline, 0) == ["0F0", "0B0"]


def test_collectives_are_exposed_where_nothing_is_computed():
    """An all-reduce from 90 to 130 microseconds of which a product hides 10; a message is none."""
    rank = Rank()
    rank.forward("a")
    rank.now = 100
    rank.event("aten::mm", 10)
    rank.backward("a")
    for name, at, length in (("gloo:all_reduce", 90, 40), ("gloo:recv", 40, 20)):
        rank.now = at
        rank.event(name, length, "user_annotation", thread=9)
    row = lower(build("1F1B", pp=1, num_microbatches=1)).row(0)
    recording = recording_of({"0.json": {"traceEvents": rank.events}}, lambda _: list(row))
    found = recording.communication[0]
    assert found.seconds == pytest.approx(40e-6) and found.exposed_s == pytest.approx(30e-6)


def test_what_cannot_be_recognised_is_refused_with_what_to_do():
    one = lower(build("1F1B", pp=2, num_microbatches=4))
    ranks = [Rank().run(row) for row in one.rows()]
    with pytest.raises(TimelineError, match=r"ranks send messages\. Give --compare PLAN"):
        recorded(ranks)
    with pytest.raises(TimelineError, match="rank 0 computed 8 forwards and backwards, FFBFBFBB, of which no 8 in a"):
        recorded(ranks, lower(build("GPipe", pp=2, num_microbatches=4)))
    with pytest.raises(TimelineError, match="forwards and backwards at the same time"):
        recorded(ranks, lower(build("DualPipeV", pp=2, vpp=2, num_microbatches=4)))
    with pytest.raises(TimelineError, match="no backward has its forward in this trace"):
        recorded([Rank().run([action for action in one.row(0) if action.kind is Kind.F])])
