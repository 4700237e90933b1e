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


def _change(what: str) -> None:
    """Makes a change of that name in this process. Raises `KeyError`."""
    from .changes import CHANGES
    from .graph_changes import GRAPH_CHANGES

    change = {each.what: each for each in (*CHANGES, *GRAPH_CHANGES)}[what]
    setattr(change.owner, change.name, change.changed)


def labelled_steps(transport: Transport, job: ProofJob) -> RankLedger:
    """The steps of `train_steps`; the log of this process begins with the number of the rank."""
    if transport.world_size > 1:
        if name := os.environ.get(CHANGE_VARIABLE):
            _change(name)
        transport.recorder = LabelledRecorder()
        pretended().pretended_write(b"rank", 0, str(transport.global_rank).encode(), b"", b"")
    try:
        return train_steps(transport, job)
    finally:
        pretended().pretended_flush()
