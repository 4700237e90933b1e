"""Runs mutants: each plan as it is, which must have no finding, then broken, and what the verifier and the
usual practice say of it."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ...backend.launching.launch import scratch_folder
from ...core.base.errors import PlanError, RankFailure
from ...core.plan.plan import Plan
from ..causes.describe import describe, divergence
from ..causes.first_cause import run_against
from ..dynamic.proof import Proof, prove
from ..ledger.ledger import RunLedger
from ..run.proof_run import ProofJob, Scenario, one_device, run_ledger, train_steps
from .mutant import Mutant, Stops
from .patches import NO, Broken
from .practice import NOTICED, UNNOTICED, Practice, first_step_keys, judge_by_habit

STALL_S = 15.0
"""Ranks of these plans take milliseconds for an action; a machine may be busy."""

Result = TypeVar("Result")
Progress = Callable[[str], None]
Problem = tuple[Plan, int, Scenario]
"""What is run, for how many steps, and what the ranks do."""


@dataclass(frozen=True)
class Verdict:
    """What was said of one mutant. `first` is the JSON form of the first divergence, None where nothing differs or the
    run stopped; `words` is the finding for people. `is_placed` and `is_classed` compare with what was expected. Of a
    mutant that is not caught `failed` says that the verifier or the mutant itself did, as `words` say."""

    mutant: Mutant
    caught: bool
    is_placed: bool
    is_classed: bool
    words: str
    first: dict[str, Any] | None
    practice: Practice
    failed: bool = False

    @property
    def located(self) -> bool:
        """At the right action and tensor, and by the right name."""
        return self.is_placed and self.is_classed


@dataclass(frozen=True)
class Score:
    """All verdicts; the findings in plans that nobody broke, each with a mutant of that plan; and how many
    such plans there were."""

    verdicts: tuple[Verdict, ...]
    false_alarms: tuple[tuple[str, str], ...]
    num_clean: int

    @property
    def ok(self) -> bool:
        """True when every mutant was caught and nothing else."""
        return not self.false_alarms and all(verdict.caught for verdict in self.verdicts)


def judge_mutants(mutants: Sequence[Mutant], *, progress: Progress = lambda line: None) -> Score:
    """Every mutant in a run of threads over memory, as many mutants at a time as there are cores."""
    with ExitStack() as stack:
        judge = Judge(stack.enter_context(scratch_folder("mutations-")))
        pool = stack.enter_context(ThreadPoolExecutor(len(os.sched_getaffinity(0))))
        futures = {pool.submit(judge.verdict_or_failure, mutant): mutant for mutant in mutants}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                progress(
                    f"{number}/{len(mutants)} {futures[future].id} {_summary(future.result())}: {future.result().words}"
                )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        alarms = [(mutant.id, alarm) for mutant in mutants if (alarm := judge.false_alarms.get(mutant.id)) is not None]
        return Score(tuple(future.result() for future in futures), tuple(alarms), judge.num_clean)


def _assert_reached(broken: Broken) -> None:
    """A mutant whose replaced functions nobody calls is a defect of the catalog: the backend has changed under it."""
    assert broken.reached is not None
    if broken.reached.exists() and broken.reached.read_text() == NO:
        raise AssertionError("nothing that the mutant replaces was called. Let it replace what the backend calls now")


def _summary(verdict: Verdict) -> str:
    if not verdict.caught:
        return "FAILED" if verdict.failed else "MISSED"
    wrong = [what for what, right in (("place", verdict.is_placed), ("class", verdict.is_classed)) if not right]
    return f"caught, {' and '.join(wrong)} WRONG" if wrong else "located"


class Judge:
    """Judges mutants, several at a time. Plans that mutants share run once, and so do their
    references; values lie in `folder`.

    `false_alarms` has the finding in a plan as it is by the id of the mutant that it was run for.
    """

    def __init__(self, folder: Path):
        self.false_alarms: dict[str, str] = {}
        self._folder = folder
        self._lock = threading.Lock()
        self._references: dict[Problem, Future[RunLedger]] = {}
        self._clean: dict[Problem, Future[Proof]] = {}

    @property
    def num_clean(self) -> int:
        """How many plans were run as they are."""
        return len(self._clean)

    def verdict_or_failure(self, mutant: Mutant) -> Verdict:
        """`verdict`, or that there is none: an error of the verifier, or a plan that does not run as it is,
        costs one mutant alone."""
        try:
            return self.verdict(mutant)
        except Exception as error:
            words = f"there is no verdict: {type(error).__name__}: {error}"
            return Verdict(mutant, False, False, False, words, None, UNNOTICED, failed=True)

    def verdict(self, mutant: Mutant) -> Verdict:
        """What is found in the mutant's plan when it is broken; what is found when it is not is
        added to `false_alarms`."""
        plan = mutant.plan()
        job = ProofJob(plan, mutant.steps, scenario=mutant.scenario, stall_s=STALL_S)
        reference = self._reference(job)
        self._once(self._clean, job, lambda: self._prove_clean(mutant.id, job))
        owned = self._with_folder(job)
        assert owned.folder is not None
        broken = Broken(mutant.breaks, owned.folder / "reached")
        try:
            run, differences = run_against(reference, replace(owned, wraps_rank=broken), "memory")
        except (RankFailure, PlanError) as failure:
            _assert_reached(broken)
            if not isinstance(mutant.expected, Stops):  # an error in the mutant itself is no bug that was found
                raise RuntimeError(f"the run stopped, which this bug does not: {failure}") from failure
            return Verdict(mutant, True, mutant.expected.is_placed(failure), True, str(failure), None, NOTICED)
        _assert_reached(broken)
        practice = judge_by_habit(reference, run)
        if not differences:
            return Verdict(mutant, False, False, False, "no bit differs", None, practice)
        words, first = str(describe(plan, run, differences)[0]), divergence(plan, differences[0])
        if isinstance(mutant.expected, Stops):
            return Verdict(mutant, True, False, False, words, first, practice)
        placed, classed = mutant.expected.is_placed(first), first["class"] in mutant.expected.kinds
        return Verdict(mutant, True, placed, classed, words, first, practice)

    def _reference(self, job: ProofJob) -> RunLedger:
        """One device."""
        job = replace(job, plan=one_device(job.plan))
        return self._once(self._references, job, lambda: run_ledger(self._with_folder(job), "memory"))

    def _prove_clean(self, mutant_id: str, job: ProofJob) -> Proof:
        """The plan as it is through every floor, as `verify --dynamic` asks them."""
        scenario = None if job.scenario is train_steps else job.scenario
        proof = prove(job.plan, transport="memory", steps=job.steps, scenario=scenario)
        if not proof.ok:
            self.false_alarms[mutant_id] = "\n".join(map(str, proof.findings))
        return proof

    def _once(self, known: dict[Problem, Future[Result]], job: ProofJob, run: Callable[[], Result]) -> Result:
        """What `run` gives for the problem of a job; who comes later waits for who came first."""
        assert isinstance(job.plan, Plan) and job.scenario is not None
        problem = job.plan, job.steps, job.scenario
        with self._lock:
            is_first = problem not in known
            future = known.setdefault(problem, Future())
        if is_first:
            try:
                future.set_result(run())
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def _with_folder(self, job: ProofJob) -> ProofJob:
        """The same job, which keeps the values that the usual practice looks at."""
        assert isinstance(job.plan, Plan)
        return replace(job, capture=first_step_keys(job.plan), folder=Path(tempfile.mkdtemp(dir=self._folder)))
