"""Published measurements of parts of a step: bubbles, layers, stages, products, kernels, collectives; predicted
by the same functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ....core.plan.plan import Plan
from ....core.schedule import build
from ....core.schedule.action import Kind
from ....simulator.cost.pricing import Pricing
from ....simulator.engine.engine import run_schedule
from ..machines import SCHEDULES
from ..plans import plan_of
from ..row import Row, RowError
from .collectives import SIZES, predict_collective
from .kernels import predict_kernel

ZB_2P_LIMIT = 3
"""Activations per pipeline rank that stand for the authors' limit of twice 1F1B's memory: they count only what the
weight gradient needs, 0.37 to 0.5 of an activation for these models, once its input gradient is done (section 4.1);
`ZBAuto` counts all of it."""


@dataclass(frozen=True)
class PartPrediction:
    """One part: the section it belongs to, what was measured and predicted, in one unit. `absolute`
    errors are differences."""

    row: Row
    section: str
    what: str
    measured: float
    predicted: float
    unit: str
    absolute: bool = False

    @property
    def error(self) -> float:
        """Relative error, or the difference where the unit is a share already."""
        return self.predicted - self.measured if self.absolute else self.predicted / self.measured - 1


def predict_parts(rows: Iterable[Row]) -> list[PartPrediction]:
    """Every part of the rows that can be predicted, in file order."""
    rows = list(rows)
    found: list[PartPrediction] = []
    for row in rows:
        match row["kind"]:
            case "bubble":
                found += _bubble(row, rows)
            case "layer_time":
                found += _layer_time(row)
            case "stage_time":
                found += _stage_time(row)
            case "matmul" | "kernel_efficiency":
                found += _kernel(row)
            case "collective":
                found += _collective(row)
    return found


def _bubble(row: Row, rows: Iterable[Row]) -> Iterator[PartPrediction]:
    """A bubble rate from published stage times: the schedule runs with them, and the idle share of the rank that is
    busy longest, from its first to its last action, is compared (the authors' cost: Qi et al. 2024, section 5.3)."""
    if row["measured.bubble_rate"] is None:
        return
    fields = ("source", "model.name", "parallel.pp", "batch.num_microbatches")
    times = next(
        (other for other in rows if other["kind"] == "stage_time" and all(other[name] == row[name] for name in fields)),
        None,
    )
    said = str(row["schedule"])
    name = {"ZB-H1": "ZBH1", "ZB-H2": "ZBH2", **SCHEDULES, "ZB-1p": "ZBAuto", "ZB-2p": "ZBAuto"}.get(said)
    if times is None or name is None:
        return
    forward, backward, weight, send = (float(times[f"measured.T_{part}_ms"]) for part in ("F", "B", "W", "comm"))
    pp, chunks, count = row["parallel.pp"], row["parallel.vpp"] or 1, row["batch.num_microbatches"]
    options: dict[str, float] = {}
    if name == "ZBAuto":
        limit = ZB_2P_LIMIT * pp if said == "ZB-2p" else pp
        options = {
            "memory_limit": limit,
            "forward_s": forward,
            "backward_input_s": backward,
            "backward_weight_s": weight,
            "send_s": send,
        }
    schedule = build(name, pp=pp, vpp=chunks, num_microbatches=count, **options)
    spans = run_schedule(schedule, forward / chunks, backward / chunks, weight / chunks, send).spans
    first, last = dict.fromkeys(range(pp), math.inf), dict.fromkeys(range(pp), 0.0)
    for span in spans:
        first[span.global_rank] = min(first[span.global_rank], span.start_s)
        last[span.global_rank] = max(last[span.global_rank], span.end_s)
    cost = max(last[rank] - first[rank] for rank in range(pp))
    work = count * (forward + backward + weight)
    yield PartPrediction(
        row,
        "bubbles",
        f"{row['model.name']} {row['schedule']} m={count}",
        row["measured.bubble_rate"],
        1 - work / cost,
        "",
        True,
    )


def _layer_time(row: Row) -> Iterator[PartPrediction]:
    """One transformer layer: forward, and backward with what it recomputes."""
    try:
        plan = _single_stage(row)
    except RowError:
        return
    without = dataclasses.replace(plan, model=dataclasses.replace(plan.model, num_layers=2))
    for kind, name in ((Kind.F, "fwd_ms"), (Kind.B, "bwd_ms")):
        seconds = Pricing(without).seconds(kind, 0).total_s - Pricing(plan).seconds(kind, 0).total_s
        what = f"{row['model.name']}, recompute {row['recompute']}, {'sp, ' if row['parallel.sp'] else ''}{name}"
        yield PartPrediction(row, "layers", what, row[f"measured.{name}"], seconds * 1e3, "ms")


def _single_stage(row: Row) -> Plan:
    """The plan of a row that measures a part: one microbatch."""
    data = {**row.data, "batch": {**row.data["batch"], "global": row.need("batch.micro"), "num_microbatches": 1}}
    return plan_of(Row(data)).plan


def _stage_time(row: Row) -> Iterator[PartPrediction]:
    """A pipeline stage of one microbatch: forward, input gradient, weight gradient."""
    try:
        plan = plan_of(row).plan
    except RowError:
        return
    pricing = Pricing(dataclasses.replace(plan, runtime=dataclasses.replace(plan.runtime, p2p_overlap=True)))
    for kind, name in ((Kind.F, "T_F_ms"), (Kind.I, "T_B_ms"), (Kind.W, "T_W_ms")):
        seconds = pricing.seconds(kind, 1).total_s
        yield PartPrediction(row, "stages", f"{row['model.name']} {name}", row[f"measured.{name}"], seconds * 1e3, "ms")


def _kernel(row: Row) -> Iterator[PartPrediction]:
    """Achieved FLOP/s of one product, of grouped ones, or of fused attention, as shares of the peak counted
    as the source counts."""
    prediction = predict_kernel(row)
    if prediction.predicted_s is None or prediction.measured_s is None:
        return
    share = row.need("measured.efficiency")
    section = f"{_KERNELS.get(prediction.kernel, 'best products')}, {row['hardware.gpu']}"
    what = (
        str(row["measured.shape_mnk"] or row["measured.shape"])
        .split(", layout")[0]
        .split(", dtype")[0]
        .split(", qkv")[0]
    )
    yield PartPrediction(row, section, what, share, share * prediction.measured_s / prediction.predicted_s, "of peak")


_KERNELS = {
    "matmul": "products",
    "group_matmul": "grouped products",
    "sdp_fwd": "attention forward",
    "sdp_bwd": "attention backward",
}


def _collective(row: Row) -> Iterator[PartPrediction]:
    """Seconds of a collective of NCCL, or of one hop."""
    found = predict_collective(row)
    if found.predicted_s is None or found.measured_s is None:
        return
    size = "hops" if row["measured.op"] == "p2p" else next(name for end, name in SIZES if found.num_bytes < end)
    what = f"{row['measured.op']} of {found.num_bytes} bytes on {row['hardware.count']}, {found.algorithm}"
    yield PartPrediction(row, f"collectives, {size}", what, found.measured_s * 1e6, found.predicted_s * 1e6, "us")
