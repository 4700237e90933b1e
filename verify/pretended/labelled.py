"""`labelled_steps`: what a rank of a proof does on pretended CUDA, saying in the log what it works on."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from ...backend.base.recorder import CollectiveOp, Recorder
from ...backend.ranks.training_rank import TrainingRank
from ...backend.transport.base import Group, Transport
from ...backend.transport.memory import MemoryTransport
from ...core.plan.plan import AnyPlan, Plan
from ...core.plan.schedule_of import schedule_for
from ...core.program import Collective, Operation, Product
from ...core.program.of_rank import differences, recorded_by_action, step_of_rank
from ...core.program.orthogonal import AXIS, muon_calls, muon_set_up
from ...core.schedule import lower
from ...core.schedule.action import Action, Kind
from ..ledger.ledger import RankLedger
from ..run.proof_run import ProofJob, train_steps

CHANGE_VARIABLE = "SHARDPROOF_PRETENDED_CHANGE"
"""What is made wrong in the ranks (`changes`), where it is set."""


def pretended() -> Any:
    """The library of this process. Raises `RuntimeError` where CUDA is not pretended."""
    stubs = sys.modules.get("shardproof_pretended_stubs")
    if stubs is None:
        raise RuntimeError("CUDA is not pretended in this process.")
    return stubs.library


class LabelledRecorder(Recorder):
    """Names the action and layer of each thread in the log of streams, and what groups record."""

    def collective(self, op: CollectiveOp, axis: str, group_size: int, sent_bytes: int) -> None:
        super().collective(op, axis, group_size, sent_bytes)
        note("recorded", str(sent_bytes))

    def message(self, action: Action, num_bytes: int) -> None:
        super().message(action, num_bytes)
        pretended().pretended_label(str(action).encode())  # of what is sent next

    @contextlib.contextmanager
    def action(self, action: Action | None) -> Iterator[None]:
        with super().action(action):
            self._label()
            try:
                yield
            finally:
                pretended().pretended_label(b"")

    def layer(self, layer: str) -> AbstractContextManager[None]:
        return self._in(super().layer(layer))

    @contextlib.contextmanager
    def _in(self, entered: AbstractContextManager[None]) -> Iterator[None]:
        with entered:
            self._label()
            try:
                yield
            finally:
                pass
        self._label()

    def _label(self) -> None:
        action, layer = self.scope
        pretended().pretended_label(" ".join(filter(None, [str(action or ""), layer])).encode())


def _change(what: str, global_rank: int) -> None:
    """Makes a change of that name in the process of a rank. Raises `KeyError`."""
    from .changes import CHANGES
    from .graph_changes import GRAPH_CHANGES, LAYER_CHANGES
    from .registered_changes import CALL_CHANGES

    if what in CALL_CHANGES:
        CALL_CHANGES[what].make(global_rank)
        return
    change = {each.what: each for each in (*CHANGES, *GRAPH_CHANGES, *LAYER_CHANGES)}[what]
    setattr(change.owner, change.name, change.changed)


def note(kind: str, what: str) -> None:
    """A line of the log that is no work of a stream."""
    pretended().pretended_write(kind.encode(), 0, what.encode(), b"", b"")


def labelled_steps(transport: Transport, job: ProofJob) -> RankLedger:
    """The steps of `train_steps`; the log of this process begins with the number of the rank, and ends with what the
    rank computed and sent otherwise than `core.program` says."""
    recorder = LabelledRecorder(enabled=True)
    is_rank = transport.world_size > 1 and not isinstance(transport, MemoryTransport)  # whose ranks share one log
    if is_rank:
        _begin(transport, recorder)
        _say_groups()
        _leave_out_evaluations(recorder)
    try:
        ledger = train_steps(transport, job)
        if is_rank and isinstance(job.plan, Plan) and not job.plan.runtime.trim_padding:
            _say_differences(job.plan, job.steps, transport.global_rank, recorder)
        if is_rank:
            note("ended", "")
        return ledger
    finally:
        pretended().pretended_flush()


def plain_steps(transport: Transport, given: tuple[AnyPlan, int]) -> None:
    """So many steps of a plan as training does them, without an observer, saving where the plan says so; each begins
    with a line in the log."""
    from ...backend.checkpoint.saver import Checkpoints
    from ...backend.ranks.rank_of_plan import training_rank

    plan, steps = given
    _begin(transport, LabelledRecorder())
    rank = training_rank(transport, plan)
    checkpoints = None
    if plan.checkpoint.folder is not None:
        corpus = rank.batches.corpus
        checkpoints = Checkpoints(plan, corpus, transport.everyone, transport.device, transport.watch)
        checkpoints.before_steps(0, rank, transport.stop)
    for step in range(steps):
        note("step", str(step))
        rank.step(step)
        if checkpoints is not None:
            if checkpoints.is_busy(step + 1):
                note("step", "")  # ranks talk about a checkpoint: no wait of every step
            checkpoints.after_step(step + 1, rank, last=False)
    note("step", "")
    if checkpoints is not None:
        checkpoints.finish()
    rank.settle()
    pretended().pretended_flush()


def _begin(transport: Transport, recorder: Recorder) -> None:
    """Gives the log of a rank its number, and makes what the environment asks for wrong."""
    transport.recorder = recorder
    note("rank", str(transport.global_rank))
    if name := os.environ.get(CHANGE_VARIABLE):
        _change(name, transport.global_rank)


def _say_groups() -> None:
    """Every call of a group is in the log, with the group's name, before what NCCL is given for it."""
    begin = Group._begin_call

    def said(group: Group) -> None:
        note("asked", group.name)
        begin(group)

    setattr(Group, "_begin_call", said)  # noqa: B010 - a method, for this process


def _leave_out_evaluations(recorder: Recorder) -> None:
    """The program says what steps do."""
    evaluate = TrainingRank.evaluate
    setattr(TrainingRank, "evaluate", lambda rank: without_forwards(recorder, lambda: evaluate(rank)))  # noqa: B010


def without_forwards(recorder: Recorder, evaluate: Callable[[], float]) -> float:
    """What `evaluate` gives; of what is recorded meanwhile only what belongs to STEP stays. Its late gathers go on in
    another thread while held-out data are looked at, whose forwards wait for all of them."""
    first = len(recorder.events)
    try:
        return evaluate()
    finally:
        recorder.events[first:] = [
            (action, operation)
            for action, operation in recorder.events[first:]
            if action is not None and action.kind is Kind.STEP
        ]


def _say_differences(plan: Plan, steps: int, global_rank: int, recorder: Recorder) -> None:
    here = plan.layout.coordinates(global_rank)
    dp_rank, own_stages = here["dp"], plan.placement.stages_of(here["pp"])
    whole: defaultdict[Action | None, Counter[Operation]] = defaultdict(Counter)
    for each in map(plan.of_step, range(steps)):
        for action, of in step_of_rank(
            each, lower(schedule_for(each, each.microbatches_of(dp_rank))), global_rank
        ).items():
            whole[action] += Counter(of)
            if action is not None and action.kind is Kind.STEP:
                whole[action] += Counter(call for stage in own_stages for call in muon_calls(each, stage))
    whole[None] += Counter(call for stage in own_stages for call in muon_set_up(plan, stage))
    expected = {action: _foreseen(of) for action, of in whole.items()}
    recorded = {action: _foreseen(of) for action, of in recorded_by_action(recorder.events).items()}
    for action, (missing, more) in differences(expected, recorded).items():
        rule = "other-than-program" if action is not None else "without-action"
        words = [f"{len(missing)} missing ({missing[0]})"] if missing else []
        words += [f"{len(more)} not in the program ({more[0]})"] if more else []
        note("noticed", f"{rule}: {action or 'outside of actions'}: {', '.join(words)}")


def _foreseen(operations: Counter[Operation]) -> Counter[Operation]:
    """What the program can tell without the tokens and the pieces of ranks: of experts and Muon's matrices that calls
    are made, not how much they move, and of experts not how many rows are multiplied."""
    found: Counter[Operation] = Counter()
    for operation, count in operations.items():
        layer = operation.layer.rpartition(".mlp.")[2]
        if isinstance(operation, Product) and layer.startswith("experts"):
            continue
        if isinstance(operation, Collective) and (
            layer in ("dispatch", "combine") or operation.axis in ("ep", "etp", AXIS)
        ):
            operation = replace(operation, sent_bytes=0)
        found[operation] += count
    return found
