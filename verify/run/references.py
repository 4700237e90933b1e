"""What one device computes, once for all layouts of a problem."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

from ...core.plan.plan import AnyPlan
from ...core.plan.train import Train
from ..ledger.ledger import RunLedger
from .proof_run import ProofJob, run_ledger
from .reference import Reference, checked_ledger

Checked = tuple[RunLedger, Reference | None]
"""A ledger of one device, and what formulas say of it; None where they were not asked."""


class References:
    """The ledgers of one device, of the last `most` problems. Threads that need the same one wait
    for the first that does.

    A plan that names files of data or weights is run each time, because these may change.
    """

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.Lock()
        self._runs: OrderedDict[tuple[Any, ...], Future[Checked]] = OrderedDict()

    def of(self, job: ProofJob) -> Checked:
        """The ledger of a job of one device; where its ranks train and do nothing else, held to the formulas too."""
        if not _is_fixed(job.plan):
            return _run(job)
        key = job.plan, job.steps, job.block, job.scenario, job.device
        mine: Future[Checked] = Future()
        with self._lock:
            found = self._runs.setdefault(key, mine)
            self._runs.move_to_end(key)
            while len(self._runs) > self._most:
                self._runs.popitem(last=False)
        if found is mine:
            try:
                mine.set_result(_run(job))
            except BaseException as error:
                mine.set_exception(error)
        return found.result()


def _run(job: ProofJob) -> Checked:
    return checked_ledger(job) if job.scenario is None else (run_ledger(job, "memory"), None)


def _is_fixed(plan: AnyPlan) -> bool:
    """Whether a plan alone says what is computed."""
    return all(
        part.train.data == Train().data and part.train.validation_data is None and part.train.load is None
        for part in plan.parts
    )
