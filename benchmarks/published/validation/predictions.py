"""A published training row -> its prediction: seconds and bytes next to what was measured, or the
reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ....core.base.errors import ShardproofError
from ....simulator.simulation.simulate import simulate
from ....simulator.step.step import worst
from ..plans import PublishedPlan, plan_of
from ..row import Measured, Row, RowError, measured_of

TRAINING = ("train_step", "finetune_step")


@dataclass(frozen=True)
class Prediction:
    """One training row predicted. `refused` says why there is no prediction; `assumed` lists the fields
    that were not published."""

    row: Row
    measured: Measured
    layout: str = ""
    predicted_s: float | None = None
    predicted_bytes: float | None = None
    fits: bool | None = None
    peak_rank: int | None = None
    time_s: Mapping[str, float] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    refused: str = ""

    @property
    def error(self) -> float | None:
        """Relative error of the step time; positive is too slow."""
        return self.predicted_s / self.measured.step_s - 1 if self.predicted_s and self.measured.step_s else None

    @property
    def memory_error(self) -> float | None:
        """Relative error of the peak memory; positive is too much."""
        return (
            self.predicted_bytes / self.measured.memory_bytes - 1
            if self.predicted_bytes and self.measured.memory_bytes
            else None
        )

    def to_json(self) -> dict[str, Any]:
        """The prediction as plain values."""
        return {
            "id": self.row.id,
            "source": self.row.source,
            "family": self.row.family,
            "tier": self.row["tier"],
            "layout": self.layout,
            "measured_s": self.measured.step_s,
            "predicted_s": self.predicted_s,
            "error": self.error,
            "measured_bytes": self.measured.memory_bytes,
            "predicted_bytes": self.predicted_bytes,
            "memory_kind": self.measured.memory_kind,
            "memory_error": self.memory_error,
            "time_s": dict(self.time_s),
            "assumed": list(self.assumed),
            "refused": self.refused,
        }


def predict_row(row: Row, instead: Mapping[str, Any] | None = None) -> Prediction:
    """The prediction of one training row, with `instead` for fields that were not published; a row that no plan
    describes says why in `refused`."""
    measured = Measured(None, "", None, "", oom=False)
    try:
        for name in ("experts", "topk") if row["model.moe"] else ():
            row.need(f"model.moe.{name}")
        measured = measured_of(row)
        return _predicted(row, measured, plan_of(row, instead))
    except RowError as error:
        return Prediction(row, measured, refused=" ".join(str(error).split()))


def _predicted(row: Row, measured: Measured, published: PublishedPlan) -> Prediction:
    plan = published.plan
    try:
        simulation = simulate(plan)
    except ShardproofError as error:
        raise RowError(f"not simulated: {error}") from error
    report, heaviest = simulation.report, worst(simulation.memory)
    sizes = {"reserved": heaviest.reserved_bytes, "nvidia-smi": heaviest.device_bytes}
    return Prediction(
        row,
        measured,
        layout=f"{plan.layout.degrees}, micro {plan.batch.micro_size} x {plan.num_microbatches}",
        predicted_s=simulation.period_s,
        predicted_bytes=sizes.get(measured.memory_kind, heaviest.peak_bytes),
        fits=heaviest.peak_bytes <= report["capacity_bytes"],
        peak_rank=report["peak_memory_rank"],
        time_s=report["time_s"],
        assumed=published.assumed,
    )
