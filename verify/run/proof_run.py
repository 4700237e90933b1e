"""One run of a proof: what every rank does, with a ledger as observer, and the single device that it is compared
with."""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from ...backend.base.libraries import libraries_of
from ...backend.launching.launch import ON_GPUS as ON_GPUS
from ...backend.launching.launch import TransportName as TransportName
from ...backend.launching.launch import preload, run_ranks
from ...backend.launching.launch import scratch_folder as scratch_folder  # of those that may not use the backend
from ...core.base.errors import PlanError, RankFailure
from ...core.base.findings import Finding
from ...core.layout.layout import Layout
from ...core.layout.products import ProductChoices
from ...core.machine.variation import NO_VARIATION
from ...core.plan.plan import AnyPlan, ModularPlan, Plan
from ...core.plan.runtime import Recompute
from ...core.plan.sections import DataParallel, ScheduleChoice
from ..ledger.ledger import (
    ACTIVATION,
    HELD_OUT,
    NO_STEP,
    OPTIMIZER,
    WEIGHT,
    Key,
    LedgerWriter,
    RankLedger,
    RunLedger,
)
from ..ledger.stored import StoredValues
from .contributions import ContributionWriter
from .drop import DropReduction, drop_reduction
from .given_groups import groups_brought

if TYPE_CHECKING:
    from ...backend.model.block import BlockFactory

if TYPE_CHECKING:
    from ...backend.base.microbatch import Microbatch
    from ...backend.model.router import Router
    from ...backend.ranks.training_rank import TrainingRank
    from ...backend.transport.base import Transport

PARTS_FILE = "parts.npz"

ALLOCATIONS_BETWEEN_COLLECTIONS = 50_000
"""Of Python's collector of cycles. A ledger is many small objects and has none: with Python's own 700 ranks of tiny
models spend a tenth of their time looking for them (1.24 s of processor instead of 1.40 for one rank, 1.73 instead of
1.86 for four; medians of five runs)."""

EVALUATED_BEFORE = 1
"""The step, counted from 0, before which ranks evaluate held-out data: what the first has updated is read, and what is
left behind is seen in the second. A third follows a step of training alone."""

Scenario = Callable[[Any, "ProofJob"], RankLedger]
"""What a rank does with its transport for a job."""


@dataclass(frozen=True)
class ProofJob:
    """What every rank of one run needs to know."""

    plan: AnyPlan
    steps: int
    capture: frozenset[Key] = frozenset()
    folder: Path | None = None
    fault: DropReduction | None = None
    block: BlockFactory | None = None
    skips_not_finite: bool = False
    """Lets a run with numbers that are not finite go on to its end, where it is compared with one that has none."""
    start: Mapping[Key, StoredValues] = field(default_factory=dict)
    """Where weights and moments lie that every step but the first starts from, and what routers choose by; none to go
    on from the step before, and to choose by their own scores."""
    core: int | None = None
    """The core that the ranks keep to, where they are threads that would only wake each other on
    several; None for any."""
    scenario: Scenario | None = None
    """What every rank does, where it is not `train_steps`."""
    wraps_rank: Callable[[int], AbstractContextManager[None]] | None = None
    """What a rank of the sharded run does that in, by its number."""
    stall_s: float | None = None
    """Ends the run when no rank has come further for so long; None for the plan's own limit, `train.timeout_s`."""
    device: str = "cpu"
    """Where one device computes, and ranks that are threads."""
    brings_groups: bool = False
    """Whether ranks, which are processes then, bring process groups of their own (`given_groups`)."""
    parts_of: Key | None = None
    """A tensor of which one device writes what it is the sum of (`contributions`) to `PARTS_FILE` in `folder`."""


@overload
def one_device(plan: Plan) -> Plan: ...
@overload
def one_device(plan: ModularPlan) -> ModularPlan: ...
def one_device(plan: AnyPlan) -> AnyPlan:
    """The same problem on one device: layout 1, one sample per microbatch, one after the other, every activation kept.
    Of several modules each has such a device."""
    if isinstance(plan, ModularPlan):
        return _uncut(plan)
    return replace(
        plan,
        layout=Layout(),
        cluster=replace(plan.cluster, num_devices=1),
        batch=replace(plan.batch, micro_size=1),
        runtime=replace(
            plan.runtime,
            tp_comm_overlap=None,
            ep_comm_overlap=None,
            p2p_overlap=None,
            p2p_batched=None,
            cuda_graphs=None,
            cuda_graph_scope="step",
            compile=None,
            trim_padding=False,
        ),
        schedule=ScheduleChoice("1F1B"),
        recompute=Recompute("none"),
        data_parallel=DataParallel(),
        variation=NO_VARIATION,
    )


def _uncut(plan: ModularPlan) -> ModularPlan:
    """The same problem with no module cut: a rank for each, one sample per microbatch, one after the other,
    every activation kept."""
    numbers = {module.name: number for number, module in enumerate(plan.modules)}
    return plan.replaced(
        lambda module: replace(
            module, first_rank=numbers[module.name], last_rank=numbers[module.name], layout=Layout()
        ),
        cluster=replace(plan.cluster, num_devices=len(numbers)),
        batch=replace(plan.batch, micro_size=1),
        runtime=replace(plan.runtime, tp_comm_overlap=None),
        schedule=ScheduleChoice("1F1B"),
        recompute=Recompute("none"),
        data_parallel=DataParallel(),
        variation=NO_VARIATION,
    )


def chosen_products(plan: AnyPlan, device: str) -> tuple[AnyPlan, ProductChoices]:
    """The plan with who makes which product chosen on a device, and why; in a process that has torch. Raises
    `PlanError` where the plan asks for kernels that cannot run there."""
    import torch

    from ...backend.numerics.product_choice import choose

    return choose(plan, torch.device(device))


def probe_rank(transport: Transport, plan: Plan) -> dict[str, Finding | None]:
    """Every assumption of exact numerics about the library by name, with a finding where it does not hold for
    the plan's shapes here."""
    from ...backend.numerics.probe import PROBES, probe

    broken = {finding.rule: finding for finding in probe(plan, transport.device)}
    return {entry.name: broken.get(entry.name) for entry in PROBES}


def probed(one: AnyPlan, device: str = "cpu") -> dict[str, Finding | None]:
    """`probe_rank` of every model of a plan on a device, in a process that has torch."""
    found: dict[str, Finding | None] = {}
    for part in {part.model: part for part in one.parts}.values():
        for name, finding in _probed(part, device).items():
            found[name] = found.get(name) or finding
    return found


@functools.lru_cache(maxsize=64)
def _probed(part: Plan, device: str) -> Mapping[str, Finding | None]:
    """Measured once for equal plans of a process: the library and the machine stay what they are."""
    return run_ranks(probe_rank, part, world_size=1, transport="memory", device=device)[0]


def prove_rank(transport: Transport, job: ProofJob) -> RankLedger:
    """What one rank does, in a process that has torch."""
    gc.set_threshold(ALLOCATIONS_BETWEEN_COLLECTIONS)
    if job.core is not None:
        os.sched_setaffinity(0, {job.core})  # of this thread, and of those that it starts
    with (
        nullcontext() if job.wraps_rank is None else job.wraps_rank(transport.global_rank),
        _groups_of(transport, job),
    ):
        return (job.scenario or train_steps)(transport, job)


def _groups_of(transport: Any, job: ProofJob) -> AbstractContextManager[None]:
    """What brings the groups of a rank where it does; one device has none."""
    if not job.brings_groups or transport.world_size == 1:
        return nullcontext()
    assert isinstance(job.plan, Plan), "groups are those of one model's layout"
    return groups_brought(transport, job.plan)


def train_steps(transport: Transport, job: ProofJob) -> RankLedger:
    """The trainer's steps with a ledger as observer."""
    return trained(transport, job)[1].finish()


def trained(transport: Any, job: ProofJob) -> tuple[Any, LedgerWriter]:
    """A training rank after the steps of a job, and the ledger that it has shown them to.

    Before the second step it evaluates held-out data, as training does between steps. Every other step follows a step.
    """
    from ...backend.numerics import make_numerics
    from ...backend.ranks.rank_of_plan import training_rank

    part = job.plan.part_of(transport.global_rank)
    numerics = make_numerics(part, transport.device, global_rank=transport.global_rank)
    if job.fault is not None and job.fault.global_rank == transport.global_rank:
        numerics = drop_reduction(numerics, job.fault, lambda: transport.recorder.current_layer)
    writer = writer_of(transport, job, part)
    rank = training_rank(transport, job.plan, model=job.block, numerics=numerics, observer=writer)
    rank.skips_not_finite = job.skips_not_finite
    follow(writer, rank)
    if job.start:
        _hold_routing(rank, job.start)
    rank.show_state(NO_STEP)
    for step in range(job.steps):
        if step and job.start:
            _restore(rank, job.start, step - 1)
        if step == EVALUATED_BEFORE:
            rank.evaluate()
        rank.step(step)
    rank.settle()
    return rank, writer


def writer_of(transport: Transport, job: ProofJob, part: Plan) -> LedgerWriter:
    """The ledger of a rank that trains by `part`, as the job wants it. `follow` has to be called
    when the rank is there."""
    common = transport.global_rank, job.plan.named_shapes, job.capture, job.folder
    if job.parts_of is None:
        return LedgerWriter(*common, cp=part.layout.cp)
    assert job.folder is not None
    return ContributionWriter(*common, cp=part.layout.cp, wanted=job.parts_of, target=job.folder / PARTS_FILE)


def follow(writer: LedgerWriter, rank: TrainingRank) -> None:
    """Lets a writer that records contributions see what a training rank computes."""
    if isinstance(writer, ContributionWriter):
        writer.follow(rank)


def _restore(rank: TrainingRank, start: Mapping[Key, StoredValues], step: int) -> None:
    """Gives a training rank the weights and moments that are in `start` as they were after a step."""
    import torch

    rank.settle()  # a gather under way reads what is changed here

    def load(key: Key, target: Any, slices: tuple[slice, ...]) -> None:
        with torch.no_grad():
            target.copy_(torch.from_numpy(start[key].load()[slices]))

    for held in rank.optimizer.held:
        load(Key(step, WEIGHT, held.name), held.tensor, held.slices)
        for moment, tensor in rank.optimizer.moments(held).items():
            load(Key(step, OPTIMIZER, f"{held.name}.{moment}"), tensor, held.slices)
    rank.refresh()


def _hold_routing(rank: Any, start: Mapping[Key, StoredValues]) -> None:
    """Has routers choose experts by the logits that are in `start`. Rounding may rank two experts of nearly equal
    scores apart otherwise, and what another expert makes of a token is no rounding of what the first one does."""
    import torch

    def chooses_by(router: Router) -> Callable[[Any], Any]:
        def logits(microbatch: Microbatch) -> object:
            of_step = microbatch.step
            assert of_step is None or isinstance(of_step, int), "steps with experts are not captured"
            step, phase = (EVALUATED_BEFORE - 1, HELD_OUT) if of_step is None else (of_step, ACTIVATION)
            samples = range(microbatch.first_sample, microbatch.first_sample + len(microbatch.tokens))
            whole = torch.stack(
                [torch.from_numpy(start[Key(step, phase, router.name, sample)].load()) for sample in samples]
            )
            places = router.context.own_places()
            return whole.to(places.device)[:, places]

        return logits

    for stage in rank.stages.values():
        for router in stage.routers:
            router.chooses_by = chooses_by(router)


def run_ledger(job: ProofJob, transport: TransportName) -> RunLedger:
    """What all ranks of a job's plan computed. Raises `RankFailure` when one dies, `PlanError` for what
    only a rank could find."""
    preload(*libraries_of(job.plan, saves=False))
    try:
        with _CORES.one() if transport == "memory" and job.plan.world_size > 1 else nullcontext(None) as core:
            job = replace(job, core=core)
            found = run_ranks(
                prove_rank,
                job,
                world_size=job.plan.world_size,
                transport=transport,
                stall_s=_stall_s(job),
                device=job.device if transport == "memory" else "cpu",
            )
        return RunLedger.merge(found)
    except RankFailure as failure:
        if isinstance(failure.__cause__, PlanError):  # the user's problem, found by a rank: no fault of that rank
            raise failure.__cause__ from None
        raise


def _stall_s(job: ProofJob) -> float | None:
    """What ranks may wait for each other. One rank waits for nobody, and may have work besides a
    schedule's (`reference_run`)."""
    if job.plan.world_size == 1:
        return None
    return job.plan.train.timeout_s if job.stall_s is None else job.stall_s


class _Cores:
    """Hands every run whose ranks are threads a core: one of those that the fewest runs have.

    Threads hand the interpreter's lock to each other at every operation, and between cores each time wake a thread that
    sleeps: eight ranks of a matrix' size take 1.1 s of processor on two cores, 0.4 s on one (measured).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: Counter[int] = Counter()

    @contextmanager
    def one(self) -> Iterator[int | None]:
        """A core for the time of a run; None where the system pins no threads."""
        if not hasattr(os, "sched_getaffinity"):
            yield None
            return
        with self._lock:
            core = min(sorted(os.sched_getaffinity(0)), key=lambda each: self._runs[each])
            self._runs[core] += 1
        try:
            yield core
        finally:
            with self._lock:
                self._runs[core] -= 1


_CORES = _Cores()
