"""Writers for programs that others look at runs with: TensorBoard, and Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ...core.base.errors import MissingExtraError
from ...core.plan.plan import AnyPlan
from ..base.step_result import StepResult
from ..base.urls import check_writable, place_of
from .metrics import Row
from .writer import Writer

OVER_RANKS = ("least", "middle", "most")
"""What the three numbers of a timer are called."""


def check_services(plan: AnyPlan) -> None:
    """Raises `MissingExtraError` where the plan asks for a program whose package is not installed, and `PlanError`
    where it names a folder that cannot be written to."""
    if plan.log.tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
        raise MissingExtraError(
            f"log.tensorboard={plan.log.tensorboard!r} needs the package tensorboard, which is not installed. Run "
            "`pip install 'shardproof[tensorboard]'`."
        )
    if plan.log.tensorboard is not None:
        check_writable(place_of(plan.log.tensorboard), "log.tensorboard")
    if plan.log.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise MissingExtraError(
            f"log.wandb={plan.log.wandb!r} needs the package wandb, which is not installed. Run `pip install wandb`."
        )


def services(plan: AnyPlan, first: int) -> list[Writer]:
    """The writers that the plan asks for, of a run that goes on after `first` steps."""
    found: list[Writer] = []
    if plan.log.tensorboard is not None:
        found.append(TensorBoard(plan.log.tensorboard, first))
    if plan.log.wandb is not None:
        found.append(WeightsAndBiases(plan.log.wandb, plan))
    return found


class TensorBoard:
    """Writes the numbers of every step into an event file of a folder, each under its name in the metrics, and texts
    from the model. Of a run that is resumed TensorBoard shows the steps after `first` once: as they were done last."""

    def __init__(self, folder: str, first: int):
        from torch.utils.tensorboard import SummaryWriter  # a second to load

        self._writer = SummaryWriter(folder, purge_step=first + 1 if first else None)

    def add(self, result: StepResult, row: Row) -> None:
        """Writes a step."""
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, row["step"])
        if sample := row.get("sample"):
            self._writer.add_text("sample", f"{sample['prompt']}**{sample['text']}**", row["step"])

    def close(self) -> None:
        """All of it is in the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of a project, with the plan as its configuration. Where it goes is set in wandb's own variables."""

    def __init__(self, project: str, plan: AnyPlan):
        import wandb

        self._run: Any = wandb.init(project=project, config={"plan": plan.to_toml()})

    def add(self, result: StepResult, row: Row) -> None:
        """Hands over a step."""
        texts = {"sample": json.dumps(row["sample"], ensure_ascii=False)} if "sample" in row else {}
        self._run.log({**dict(scalars(row)), **texts}, step=row["step"])

    def close(self) -> None:
        """The run is over."""
        self._run.finish()


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """The numbers of a row by name, those of timers as `timers/forward/most`; what is null is left out.

    >>> list(scalars({"step": 3, "loss": 2.5, "mfu": None, "timers": {"forward": [1.0, 2.0, 4.0]}}))
    [('loss', 2.5), ('timers/forward/least', 1.0), ('timers/forward/middle', 2.0), ('timers/forward/most', 4.0)]
    """
    for name, value in row.items():
        if isinstance(value, Mapping) and name.startswith("timers"):
            for kind, over_ranks in value.items():
                yield from (
                    (f"{name}/{kind}/{which}", each) for which, each in zip(OVER_RANKS, over_ranks, strict=True)
                )
        elif isinstance(value, int | float) and name != "step":
            yield name, float(value)
