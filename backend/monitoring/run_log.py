"""`RunLog`: what a rank does after each step so that the run can be seen."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ...core.base.terminal import say
from ...core.plan.plan import AnyPlan
from ...core.schedule.timeline import Span
from ..base.step_result import StepResult
from ..transport.base import Transport
from .energy import Energy
from .header import header_lines
from .lines import Lines
from .live import Live
from .metrics import MetricsFile, row_of
from .sampling import Sample
from .services import services
from .shown import Shown
from .timers import Timers
from .writer import Writer


class RunLog(AbstractContextManager["RunLog"]):
    """One run as rank 0 writes it down. All ranks make one, and call `step` together.

    `shown` says what is to be seen, None that nothing is, and no rank sends anything. `first` is how many steps are
    done, `num_steps` how many there are to be; `first_validation` is the held-out loss
    before the first, where it was taken.
    """

    def __init__(
        self,
        transport: Transport,
        plan: AnyPlan,
        shown: Shown | None,
        *,
        first: int,
        num_steps: int,
        first_validation: float | None = None,
    ):
        self._prediction = None if shown is None else shown.prediction
        self._device = transport.device
        self._more: dict[str, Any] = {}
        self._every, self._num_steps = plan.log.every, num_steps
        self._num_tokens = 0
        self._timers = Timers(transport, plan) if plan.log.timers and shown is not None else None
        self._energy = Energy(transport) if plan.log.energy and shown is not None else None
        self._writers: list[Writer] = []
        if shown is not None and transport.global_rank == 0:
            if shown.display != "none":
                for line in header_lines(shown, None if self._energy is None else self._energy.reason):
                    say(line, sys.stderr)
            self._writers = _writers(plan, shown, first, num_steps)
        if first_validation is not None:
            self._more["validation_loss_before"] = first_validation

    def stepping(self) -> AbstractContextManager[None]:
        """Around each step of this rank."""
        return nullcontext() if self._timers is None else self._timers.stepping()

    def step(self, result: StepResult, spans: Sequence[Span], sample: Sample | None = None) -> None:
        """A step is done, these are the spans of this rank, and that is what the model says after it."""
        self._num_tokens += result.num_tokens
        if self._timers is not None:
            self._timers.add(spans)
        if (result.step + 1) % self._every == 0 or result.step + 1 == self._num_steps:
            self._of_all_ranks()
        if not self._writers:
            return
        if sample is not None:
            self._more["sample"] = {"prompt": sample.prompt, "text": sample.text}
        row = row_of(result, self._prediction, held_bytes(self._device), self._more)
        self._more = {}
        for writer in self._writers:
            writer.add(result, row)

    def _of_all_ranks(self) -> None:
        """What all ranks say of the steps since the last time, who come here together."""
        if self._timers is not None:
            self._more.update(self._timers.report())
        joules = None if self._energy is None else self._energy.spent()
        if joules is not None:
            self._more.update(energy_joules=joules, joules_per_token=joules / self._num_tokens)
        self._num_tokens = 0

    def __exit__(self, *raised: object) -> None:
        for writer in self._writers:
            writer.close()


def _writers(plan: AnyPlan, shown: Shown, first: int, num_steps: int) -> list[Writer]:
    writers: list[Writer] = []
    if shown.metrics is not None:
        writers.append(MetricsFile(shown.metrics, first))
    writers += services(plan, first)
    if shown.display == "live":
        writers.append(Live(f"{plan.title} on {plan.world_size} ranks, {plan.degrees}", num_steps))
    elif shown.display == "lines":
        writers.append(Lines(num_steps, plan.log.every))
    return writers


def held_bytes(device: torch.device) -> int:
    """What this rank holds: on a GPU the most that torch has had allocated there, else the resident memory of its
    process, or the most it has been where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
