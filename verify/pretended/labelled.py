"""`labelled_steps`: what a rank of a proof does on pretended CUDA, saying in the log what it works on."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from ...backend.base.recorder import Recorder
from ...backend.transport.base import Transport
from ...core.plan.plan import AnyPlan
from ...core.schedule.action import Action
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
    """Names the action and layer of each thread in the log of streams."""

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


def labelled_steps(transport: Transport, job: ProofJob) -> RankLedger:
    """The steps of `train_steps`; the log of this process begins with the number of the rank."""
    if transport.world_size > 1:
        _begin(transport)
    try:
        return train_steps(transport, job)
    finally:
        pretended().pretended_flush()


def plain_steps(transport: Transport, given: tuple[AnyPlan, int]) -> None:
    """So many steps of a plan as training does them, without an observer; each begins with a line in the log."""
    from ...backend.ranks.rank_of_plan import training_rank

    plan, steps = given
    _begin(transport)
    rank = training_rank(transport, plan)
    for step in range(steps):
        pretended().pretended_write(b"step", 0, str(step).encode(), b"", b"")
        rank.step(step)
    pretended().pretended_write(b"step", 0, b"", b"", b"")
    rank.settle()
    pretended().pretended_flush()


def _begin(transport: Transport) -> None:
    """Makes what the environment asks for wrong in this rank, and gives its log its number."""
    if name := os.environ.get(CHANGE_VARIABLE):
        from .changes import changed

        changed(name)()
    transport.recorder = LabelledRecorder()
    pretended().pretended_write(b"rank", 0, str(transport.global_rank).encode(), b"", b"")
