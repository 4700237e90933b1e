"""`Trainer`: a plan trained on real ranks, and `train_rank`, what each of those ranks does."""

from __future__ import annotations

import math
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.base.errors import DivergedError, PlanError, RankFailure, ShardproofError
from ..core.base.terminal import say
from ..core.base.urls import is_url
from ..core.layout.products import choices_text
from ..core.plan.plan import AnyPlan, Plan, only_model
from ..core.schedule.timeline import MemorySample, Span, Timeline
from .base.libraries import libraries_of
from .base.measured_peak import MeasuredPeak
from .base.urls import place_of
from .checkpoint.resume import resumption
from .data.vocabulary import other_tokens
from .huggingface.config import check_load, check_room, check_save
from .launching.launch import preload, run_ranks
from .launching.torchrun import failed, gave_up, set_up_within, torchrun_transport, under_torchrun
from .memory_check import check_memory
from .monitoring.experimental import experimental_lines
from .monitoring.metrics import check_metrics_file, metrics_file
from .monitoring.prediction import predicted
from .monitoring.services import check_services
from .monitoring.shown import Display, Shown
from .unsupported import unsupported
from .watch.rank_messages import ON_GPUS, TransportName
from .watch.stop import stopping_here

if TYPE_CHECKING:
    import torch.distributed as dist

    from .base.observe import Observer
    from .base.step_result import StepResult
    from .model.block import BlockFactory
    from .ranks.training_rank import TrainingRank
    from .transport.base import Group, Transport

NUM_VALIDATIONS = 4
"""Held-out losses after the one before the first step, evenly spread, the last one after the last step."""


@dataclass(frozen=True)
class TrainJob:
    """What every rank of a run gets. Everything in it can be pickled; functions are those of modules.

    `on_step` is called with each `StepResult` on global rank 0, in that rank's process. `validate` adds the held-out
    losses; `live_memory` counts every tensor storage of the last step, which slows that step down; `save_huggingface`
    is the folder that the trained weights are written to, `resume` the checkpoint that training goes on from. `shown`
    is what is to be seen of its steps.
    """

    plan: AnyPlan
    model: BlockFactory | None = None
    on_step: Callable[[StepResult], None] | None = None
    observer: Callable[[int], Observer | None] | None = None
    validate: bool = True
    live_memory: bool = False
    save_huggingface: str | None = None
    resume: str | None = None
    shown: Shown | None = None


@dataclass(frozen=True)
class RankResult:
    """What one rank knows after training. `validation_losses` maps the number of steps done to the held-out loss.

    `timeline` holds the last step of all ranks, on global rank 0 only; `peaks` those of all ranks in that step, where
    it was asked for. `checkpoint` is the folder of the last checkpoint that the run saved or went on from, `first_step`
    how many steps were done before it; the rest is that of `TrainResult`.
    """

    steps: Sequence[StepResult]
    validation_losses: dict[int, float]
    timeline: Timeline | None
    peaks: tuple[MeasuredPeak, ...] = ()
    checkpoint: str | None = None
    first_step: int = 0
    resumed_from: str | None = None
    stopped_by: str | None = None
    events: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class TrainResult:
    """A finished run. `losses[i]` is the mean loss per token of its step i, before its update; `grad_norms[i]` the norm
    before clipping. A resumed run has only its own steps here, after the `first_step` that had been done before.

    `validation_losses[i]` is the held-out loss after `validation_steps[i]` steps. `tokens_per_s` is that of all ranks
    together, without the first step where there are more. `timeline` is the measured last step; `peak_memory` that of
    every rank in it, where `Trainer` was asked for it. `aux_losses` are what routers add to the loss that is minimised,
    where the plan has such losses. `checkpoint` is the folder of the last checkpoint, if there is one. `skipped_steps`
    are those whose gradients fp16 could not hold. `stopped_by` names the signal after which the run saved and left,
    before its last step; it has no timeline then. `resumed_from` is the checkpoint that it went on from. `events` tell
    in order of what was `resumed`, `saved` and `stopped`, each after its `step`.
    """

    steps: int
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    validation_steps: tuple[int, ...]
    validation_losses: tuple[float, ...]
    tokens_per_s: float
    world_size: int
    timeline: Timeline | None
    peak_memory: tuple[MeasuredPeak, ...] = ()
    aux_losses: tuple[float, ...] = ()
    checkpoint: str | None = None
    first_step: int = 0
    skipped_steps: tuple[int, ...] = ()
    resumed_from: str | None = None
    stopped_by: str | None = None
    events: tuple[dict[str, Any], ...] = ()

    @property
    def report(self) -> dict[str, object]:
        """The JSON form of the interface."""
        return {
            "steps": self.steps,
            "losses": list(self.losses),
            "validation_losses": list(self.validation_losses),
            "tokens_per_s": self.tokens_per_s,
            "world_size": self.world_size,
            "checkpoint": self.checkpoint,
            "resumed_from": self.resumed_from,
            "stopped_by": self.stopped_by,
            "events": list(self.events),
            "validation_steps": list(self.validation_steps),
            "grad_norms": [norm if math.isfinite(norm) else None for norm in self.grad_norms],  # JSON has no infinity
            **({"skipped_steps": list(self.skipped_steps)} if self.skipped_steps else {}),
            **({"first_step": self.first_step} if self.first_step else {}),
            **({"aux_losses": list(self.aux_losses)} if self.aux_losses else {}),
            **({"peak_memory": [asdict(peak) for peak in self.peak_memory]} if self.peak_memory else {}),
        }


class Trainer:
    """Trains a plan: `Trainer(plan).fit()`.

    `model` replaces our transformer blocks by the user's own, `model(context, layer_index) -> nn.Module`, built from
    our layers; `on_step` hears of every step on global rank 0. Both are functions of a module, because ranks are other
    processes. Started by torchrun, this process is one of the ranks; otherwise `fit` starts them all on this machine.
    They talk over `transport`, or else as `usual_transport` says. `live_memory` counts every tensor storage in the last
    step (which takes longer for it), so that the timeline's memory is all that was held. `save_huggingface` is a new or
    empty folder, seen by all ranks, for the trained weights and their `config.json`. `resume` goes on from the newest
    checkpoint in the plan's `checkpoint.folder`, under this plan's layout, whatever layout saved it; without one from
    the start. `resumption` says which it is. `observer(global_rank)`, a function of a module too, makes who sees the
    numbers of a rank. `groups` are process groups of torch by axis that this process, a rank in which torch.distributed
    is initialised, is a member of: they are used in place of new ones. What every step came to goes to the file that
    `monitoring.metrics.metrics_file` says, or else to `metrics`, and to `display` on standard error. Raises
    `PlanError` at once for a plan that the backend does not run, whose data are not tokens of its model, that loads or
    saves what Hugging Face files do not hold, or that does not go on from what its `checkpoint.folder` holds."""

    def __init__(
        self,
        plan: AnyPlan,
        model: BlockFactory | None = None,
        *,
        transport: TransportName | None = None,
        on_step: Callable[[StepResult], None] | None = None,
        live_memory: bool = False,
        save_huggingface: str | None = None,
        resume: bool = False,
        observer: Callable[[int], Observer | None] | None = None,
        groups: Mapping[str, dist.ProcessGroup] | None = None,
        metrics: str | None = None,
        display: Display = "none",
    ):
        if groups is not None:
            _check_groups(plan, groups)
        if problems := [*unsupported(plan), *other_tokens(plan)]:
            raise PlanError(problems)
        self.resumption = resumption(plan, resume=resume)
        for part in plan.parts:
            check_load(part)
        if save_huggingface is not None:
            check_save(only_model(plan, "save_huggingface"), save_huggingface)
            check_room(only_model(plan, "save_huggingface"), save_huggingface)
        check_metrics_file(plan)
        check_services(plan)
        self.plan = plan
        self.groups = groups
        self._seen: tuple[str | None, Display] = metrics_file(plan, metrics), display
        self.transport = transport or usual_transport(plan)
        self.experimental = experimental_lines(plan, self.transport)
        path = None if self.resumption is None else str(self.resumption.saved.path)
        self._job = TrainJob(
            plan, model, on_step, observer, live_memory=live_memory, save_huggingface=save_huggingface, resume=path
        )

    def fit(self) -> TrainResult:
        """Trains `plan.train.steps` steps. Raises `PlanError` where this machine has not the memory, `RankFailure` that
        names the rank when one ends before its work is done."""
        if warning := check_memory(self.plan, self.transport):
            say(f"warning: {warning}", sys.stderr)
        self._job = replace(self._job, shown=self._shown())
        if self.groups is not None or under_torchrun():
            return self._fit_as_rank()
        _check_picklable(self._job)
        if self.transport in ON_GPUS:
            from .base.environment import check_devices  # imports torch

            check_devices(self.plan.world_size)
        preload(*libraries_of(self.plan, saves=self.plan.checkpoint.folder is not None))
        try:
            ranks = run_ranks(
                train_rank,
                self._job,
                world_size=self.plan.world_size,
                transport=self.transport,
                stall_s=self.plan.train.timeout_s,
                setup_s=self.plan.train.setup_timeout_s,
                stop_budget_s=self._stop_budget_s,
            )
        except RankFailure as failure:
            # the user's problem, found by a rank: no fault of that rank
            if isinstance(failure.__cause__, (PlanError, DivergedError)):
                raise failure.__cause__ from None
            raise
        return self._result(ranks[0])

    def _shown(self) -> Shown:
        """What is to be seen of the run; rank 0 alone needs the step that is expected."""
        metrics, display = self._seen
        leads = os.environ.get("RANK", "0") == "0"
        prediction = predicted(self.plan, self.transport) if leads else None
        return Shown(metrics, display, prediction, self.experimental)

    def _fit_as_rank(self) -> TrainResult:
        """This process is one of the ranks; torchrun sees to the others."""
        if self.transport == "memory":
            raise PlanError(
                "transport 'memory' keeps all ranks in one process, but torchrun started several. Use shm, gloo or "
                "nccl."
            )
        from .transport.base import TransportError

        budget_s = self._stop_budget_s
        with (
            torchrun_transport(
                backend=self.transport, timeout_s=self.plan.train.timeout_s, groups=self.groups
            ) as transport,
            nullcontext() if budget_s is None else stopping_here(transport.stop, budget_s),
            set_up_within(transport, self.plan.train.setup_timeout_s),
        ):
            if transport.world_size != (expected := self.plan.world_size):
                raise PlanError(
                    f"torchrun started {transport.world_size} ranks, but the layout tp*pp*dp has {expected}. "
                    f"Use torchrun --nproc-per-node so that there are {expected}, or another layout."
                )
            try:
                return self._result(train_rank(transport, self._job))
            except TransportError as error:
                raise gave_up(transport, error) from error
            except ShardproofError:
                raise
            except Exception as error:
                raise failed(transport, error) from error

    @property
    def _stop_budget_s(self) -> float | None:
        """How long the run may take to leave after a signal; None where it has nowhere to save, and just ends."""
        return None if self.plan.checkpoint.folder is None else self.plan.checkpoint.stop_budget_s

    def _result(self, rank: RankResult) -> TrainResult:
        timed = rank.steps[1:] or rank.steps
        tokens = sum(step.num_tokens for step in timed)
        return TrainResult(
            steps=len(rank.steps),
            losses=tuple(step.loss for step in rank.steps),
            grad_norms=tuple(step.grad_norm for step in rank.steps),
            validation_steps=tuple(rank.validation_losses),
            validation_losses=tuple(rank.validation_losses.values()),
            tokens_per_s=tokens / sum(step.elapsed_s for step in timed) if timed else 0.0,
            world_size=self.plan.world_size,
            timeline=rank.timeline,
            peak_memory=rank.peaks,
            aux_losses=tuple(step.aux_loss for step in rank.steps) if self.plan.train.adds_router_losses else (),
            checkpoint=rank.checkpoint,
            skipped_steps=tuple(step.step for step in rank.steps if step.skipped),
            first_step=rank.first_step,
            resumed_from=rank.resumed_from,
            stopped_by=rank.stopped_by,
            events=rank.events,
        )


def _check_groups(plan: AnyPlan, axes: Iterable[str]) -> None:
    """Raises `PlanError` where groups cannot be used."""
    import torch.distributed as dist

    if not isinstance(plan, Plan):
        raise PlanError("groups are those of one model's layout, and this plan has several modules. Leave groups out.")
    if not dist.is_initialized():
        raise PlanError(
            "groups are given, but torch.distributed is not initialised in this process, so it is no rank. Call "
            "init_process_group first, or leave groups out."
        )
    if not plan.model.is_moe and (unused := sorted({"ep", "etp", "edp"}.intersection(axes))):
        raise PlanError(f"groups: {unused[0]} joins ranks of experts, which the model has not. Leave it out.")


def _check_picklable(job: TrainJob) -> None:
    """Raises `TypeError` for a model or callback that cannot be sent to the ranks."""
    for name, value in (("model", job.model), ("on_step", job.on_step), ("observer", job.observer)):
        try:
            pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"{name}={value!r} cannot be sent to the ranks, which are other processes: {error}. "
                "Use a function or class at the top level of a module, or functools.partial of one."
            ) from error


def validation_points(steps: int, every: int | None = None) -> tuple[int, ...]:
    """After how many steps the held-out loss is taken: before the first, after the last, and between them after `every`
    so many, or four times evenly.

    >>> validation_points(20), validation_points(2), validation_points(20, 8)
    ((0, 5, 10, 15, 20), (0, 1, 2), (0, 8, 16, 20))
    """
    if every is not None:
        return (*range(0, steps, every), steps)
    return tuple(sorted({-(-steps * i // NUM_VALIDATIONS) for i in range(NUM_VALIDATIONS + 1)}))


def usual_transport(plan: AnyPlan) -> TransportName:
    """Processes that share memory where they are on one host, unless the plan's `cluster.collective_library` says
    gloo."""
    return "gloo" if plan.parts[0].cluster.collective_library == "gloo" else "shm"


def train_rank(transport: Transport, job: TrainJob) -> RankResult:
    """The whole run on one rank: the job for `launch.run_ranks`."""
    import torch

    from .base.observe import ObserversOfRun

    transport.communicators = job.plan.communicators
    if transport.device.type == "cuda":  # before the observer is made, which records where the rank runs
        torch.cuda.set_device(transport.device)
    plan, maker = with_products(transport, job.plan), job.observer
    if isinstance(maker, ObserversOfRun):
        maker = maker.of_run(plan)
    observer = maker(transport.global_rank) if maker is not None else None
    with _own_folder(transport, plan), observer if isinstance(observer, AbstractContextManager) else nullcontext():
        return run_steps(
            transport,
            plan,
            model=job.model,
            observer=observer,
            on_step=job.on_step,
            validate=job.validate,
            live_memory=job.live_memory,
            save_huggingface=job.save_huggingface,
            resume=job.resume,
            shown=job.shown,
        )


def with_products(transport: Transport, plan: AnyPlan) -> AnyPlan:
    """The plan with who makes which product chosen, by all ranks together; rank 0 says it where GPUs choose."""
    from .numerics.product_choice import choose

    measured = transport.device.type == "cuda" and plan.numerics.triton_products is None
    if plan.numerics.mode == "fast" or not measured:
        return choose(plan, transport.device)[0]
    chosen, choices = choose(plan, transport.device, transport.everyone)
    if transport.global_rank == 0:
        say(choices_text(choices), sys.stderr)
    return chosen


def _own_folder(transport: Transport, plan: AnyPlan) -> AbstractContextManager[None]:
    """Holds the plan's folder of checkpoints, if it has one, for this run alone."""
    if plan.checkpoint.folder is None or is_url(plan.checkpoint.folder):  # a store of objects has no locks
        return nullcontext()
    from .checkpoint.lock import locked

    return locked(Path(plan.checkpoint.folder), transport.everyone, transport.device)


def run_steps(
    transport: Transport,
    plan: AnyPlan,
    *,
    steps: int | None = None,
    model: BlockFactory | None = None,
    observer: Observer | None = None,
    on_step: Callable[[StepResult], None] | None = None,
    validate: bool = False,
    live_memory: bool = False,
    save_huggingface: str | None = None,
    resume: str | None = None,
    shown: Shown | None = None,
) -> RankResult:
    """`steps` optimizer steps (by default the plan's) on one rank; all ranks of the plan's world call it together. With
    `resume` those that the checkpoint has behind it are among them; a run that saves is left when `transport.stop` says
    so. The weights then go to the folder `save_huggingface`, if it is given and all steps were done. `shown` says what
    is to be seen of the steps; by default nothing is."""
    from .base.step_result import StepResults
    from .data.decoding import decoder_of
    from .huggingface.save import check_complete, save_weights
    from .monitoring.run_log import RunLog
    from .monitoring.sampling import sampled
    from .pipeline.measure import gather_recorded
    from .ranks.rank_of_plan import training_rank

    steps = plan.train.steps if steps is None else steps
    world = transport.everyone
    if plan.checkpoint.folder is not None:
        # with torch's module for it, which takes longer to load than a small step
        from .checkpoint.saver import Checkpoints, agreed_place

        resume = agreed_place(plan, resume, world, transport.device)
    # the checkpoint's weights replace those
    started = plan if resume is None else replace(plan, train=replace(plan.train, load=None))
    rank = training_rank(transport, started, model=model, observer=observer)
    for note in transport.notes:
        say(f"warning: {note}", sys.stderr)
    checkpoints = None
    if plan.checkpoint.folder is not None:
        checkpoints = Checkpoints(plan, rank.batches.corpus, world, transport.device, transport.watch)
    first, stopped_by = 0, None
    if checkpoints is not None:
        first = 0 if resume is None else checkpoints.restore(place_of(resume), rank)
        stopped_by = checkpoints.before_steps(first, rank, transport.stop)
    rank.show_state(first - 1)
    if save_huggingface is not None:
        check_complete(only_model(plan, "save_huggingface"), rank.saved_shards, world, transport.device)
    validate_at = validation_points(steps, plan.train.eval_every) if validate else ()
    validation_losses = {first: rank.evaluate()} if first in validate_at else {}
    results = StepResults()
    recorded: tuple[list[Span], list[MemorySample], list[MeasuredPeak]] = ([], [], [])
    decode = None if plan.train.sample_every is None else decoder_of(plan.parts[-1])
    with RunLog(
        transport,
        plan,
        shown,
        first=first,
        num_steps=steps,
        first_validation=validation_losses.get(0),
    ) as log:
        for step in range(first, steps if stopped_by is None else first):
            with log.stepping():
                if step == steps - 1:
                    result, recorded = _step_ending_at_ctrl_c(rank, step, transport, world, live_memory=live_memory)
                    spans = recorded[0]
                else:
                    result, spans = rank.step(step)
            if step + 1 in validate_at:
                validation_losses[step + 1] = rank.evaluate()
                result = replace(result, validation_loss=validation_losses[step + 1])
            results.append(result)
            if on_step is not None and transport.global_rank == 0:
                on_step(result)
            log.step(result, spans, sampled(rank, plan, world, step + 1, decode=decode))
            if checkpoints is not None:
                stopped_by = checkpoints.after_step(step + 1, rank, last=step + 1 == steps)
            if stopped_by is not None:
                break
    rank.settle()
    if save_huggingface is not None and stopped_by is None:
        with rank.whole_masters():
            save_weights(
                only_model(plan, "save_huggingface"), save_huggingface, rank.saved_shards, world, transport.device
            )
    everyone = gather_recorded(world, recorded, transport.device)
    has_timeline = transport.global_rank == 0 and stopped_by is None
    timeline = _timeline(plan, everyone, steps - 1) if has_timeline else None
    newest = None if checkpoints is None or checkpoints.newest is None else str(checkpoints.newest)
    events = () if checkpoints is None else tuple(checkpoints.events)
    return RankResult(
        results,
        validation_losses,
        timeline,
        tuple(peak for rank in everyone for peak in rank[2]),
        newest,
        first,
        next((event["path"] for event in events if event["event"] == "resumed"), None),
        stopped_by,
        events,
    )


def _step_ending_at_ctrl_c(
    rank: TrainingRank, step: int, transport: Transport, world: Group, *, live_memory: bool
) -> tuple[StepResult, tuple[list[Span], list[MemorySample], list[MeasuredPeak]]]:
    """A step that all ranks begin together, with its spans, its memory and, if live storages
    are counted, their peak."""
    from .ranks.live_memory import LiveMeter

    meter = rank.live_meter() if live_memory else rank.meter()
    world.barrier()
    rank.clock.restart()
    meter.sample(0.0)
    result, spans = rank.step(step, meter=meter)
    peak = (
        [MeasuredPeak(transport.global_rank, meter.peak_bytes, meter.peak_action)]
        if isinstance(meter, LiveMeter)
        else []
    )
    return result, (spans, meter.samples, peak)


def _timeline(plan: AnyPlan, everyone: Sequence[Any], step: int) -> Timeline:
    """What all ranks kept of a step, as one timeline."""
    from .pipeline.measure import measured_timeline

    title = f"{plan.title}, step {step}, measured over {len(everyone)} ranks"
    spans, memory = ([item for rank in everyone for item in rank[part]] for part in (0, 1))
    return measured_timeline(spans, memory, plan, title)
