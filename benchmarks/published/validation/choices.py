"""What choosing the layout that is predicted to be best costs, and what choosing by the measured times
of another day would."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..row import Row, measured_of
from .noise import host_bound_layers
from .predictions import Prediction
from .table import Table, percent

CHOICE_COST = 0.03
"""Asked of the choice in every group."""


def vtrain_group(row: Row) -> Mapping[str, object] | None:
    """Layouts of one model on one machine with one global batch."""
    if not row.source.startswith("vTrain"):
        return None
    return {name: row[name] for name in ("family", "model.name", "hardware.count", "batch.global")}


def bloom_group(row: Row) -> Mapping[str, object] | None:
    """Layouts of one model on one machine on one day (the machine was tuned meanwhile); global
    batches differ by up to 2%."""
    if (
        not row.source.startswith("BLOOM")
        or row["flags.suspect"]
        or (row["batch.global"] or 0) < 2000
        or not row["model.layers"]
    ):
        return None
    names = ("source_ref", "model.layers", "model.hidden", "model.heads", "hardware.count")
    return {name: row[name] for name in names}


@dataclass(frozen=True)
class Regret:
    """What the layout predicted to be best costs against the one measured to be best, as a share of the latter's time.

    `agreement` is Kendall's tau-b of predicted and measured order.
    """

    group: str
    count: int
    regret: float
    chosen: str
    best: str
    agreement: float


def regrets(predictions: Iterable[Prediction], key: Callable[[Row], Mapping[str, object] | None]) -> list[Regret]:
    """Regret of every group of two layouts or more that answer one question: same model, machine and batch
    (`key`; None: no group).

    Layouts of a group whose global batch differs slightly are compared by seconds per sequence.
    """
    groups: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        if prediction.error is not None and (found := key(prediction.row)) is not None:
            groups.setdefault(", ".join(str(value) for value in found.values()), []).append(prediction)
    return [_regret(name, members) for name, members in groups.items() if len(members) > 1]


def _regret(name: str, members: Sequence[Prediction]) -> Regret:
    measured = [_each(one, one.measured.step_s) for one in members]
    predicted = [_each(one, one.predicted_s) for one in members]
    chosen, best = predicted.index(min(predicted)), measured.index(min(measured))
    cost = measured[chosen] / measured[best] - 1
    return Regret(name, len(members), cost, members[chosen].layout, members[best].layout, _kendall(predicted, measured))


def _each(prediction: Prediction, seconds: float | None) -> float:
    assert seconds is not None
    return seconds / float(prediction.row["batch.global"])


def _kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Kendall's tau-b: agreeing less disagreeing pairs, over pairs that are tied in neither."""
    agreeing, first, second = 0, 0, 0
    for i in range(len(one)):
        for j in range(i):
            left, right = (
                math.copysign(1, one[i] - one[j]) * (one[i] != one[j]),
                math.copysign(1, other[i] - other[j]) * (other[i] != other[j]),
            )
            agreeing += int(left * right)
            first, second = first + (left != 0), second + (right != 0)
    return agreeing / math.sqrt(first * second) if first and second else 0.0


@dataclass(frozen=True)
class Quantiles:
    """5%, 50% and 95% of what was drawn."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class AnotherDay:
    """What choosing by the measured times of another day costs over all groups: the mean cost, the worst, and how many
    groups cost at most `CHOICE_COST`."""

    mean: Quantiles
    worst: Quantiles
    met: Quantiles

    def explains(self, costs: Sequence[float]) -> bool:
        """True when choices as bad as these are to be expected of a predictor that is as good as
        measuring on another day."""
        met = sum(cost <= CHOICE_COST for cost in costs)
        return statistics.fmean(costs) <= self.mean.high and max(costs) <= self.worst.high and met >= self.met.low


DAYS = 400


def another_day(rows: Iterable[Row]) -> AnotherDay | None:
    """vTrain's single-node groups on `DAYS` other days. On each, the time of every hidden size, tp and microbatch,
    which is what these rows are put together from, is scaled by a draw of the scatter of `noise.host_bound_layers`.
    None without such layers."""
    rows = [row for row in rows if row.family == "vtrain_single" and measured_of(row).step_s]
    layers = host_bound_layers(rows)
    if len(layers) < 2:
        return None
    scatter = statistics.stdev(map(math.log, layers))
    groups: dict[str, list[tuple[float, tuple[int, ...]]]] = {}
    for row in rows:
        layer = (row["model.hidden"], row["parallel.tp"], row["batch.micro"])
        groups.setdefault(str(vtrain_group(row)), []).append((measured_of(row).step_s or 0.0, layer))
    several = [members for members in groups.values() if len(members) > 1]
    if not several:
        return None
    draw, names = random.Random(2024), sorted({layer for members in several for _, layer in members})
    days = [_costs(several, {name: math.exp(draw.gauss(0.0, scatter)) for name in names}) for _ in range(DAYS)]
    met = [float(sum(cost <= CHOICE_COST for cost in costs)) for costs in days]
    return AnotherDay(_quantiles(map(statistics.fmean, days)), _quantiles(map(max, days)), _quantiles(met))


def _costs(
    groups: Iterable[Sequence[tuple[float, tuple[int, ...]]]], factors: Mapping[tuple[int, ...], float]
) -> list[float]:
    chosen = ((min(members, key=lambda one: one[0] * factors[one[1]])[0], min(members)[0]) for members in groups)
    return [seconds / best - 1 for seconds, best in chosen]


def _quantiles(values: Iterable[float]) -> Quantiles:
    ordered = sorted(values)
    return Quantiles(*(ordered[int(len(ordered) * share)] for share in (0.05, 0.5, 0.95)))


def _is_single(group: Regret) -> bool:
    return group.group.startswith("vtrain_single")


def choice_targets(rows: Sequence[Row], predictions: list[Prediction]) -> list[tuple[str, ...]]:
    """Rows of the table of targets."""
    found = [*regrets(predictions, vtrain_group), *regrets(predictions, bloom_group)]
    day = another_day(rows)
    cells: list[tuple[str, ...]] = []
    for name, single in (("vTrain multi-node and BLOOM", False), ("vTrain single-node", True)):
        costs = [one.regret for one in found if _is_single(one) == single]
        if not costs:
            continue
        within = sum(cost <= CHOICE_COST for cost in costs)
        met, peers = ("yes" if within == len(costs) else "no"), "Calculon, SimuMax 4.5%"
        if single and day is not None:
            met = "within noise" if met == "no" and day.explains(costs) else met
            peers = f"by times of another day {percent(day.mean.low)} to {percent(day.mean.high)}"
        groups = f"{len(costs)} groups, {within} met"
        worst = percent(max(costs))
        cells.append(
            (
                f"{name}, cost of the choice",
                groups,
                percent(statistics.fmean(costs)),
                percent(CHOICE_COST),
                met,
                "",
                worst,
                peers,
            )
        )
    return cells


def choice_table(rows: Sequence[Row], predictions: list[Prediction]) -> Table:
    """Every group of several nodes, those of one node in short, and what another day's times would have cost there."""
    found = [*regrets(predictions, vtrain_group), *regrets(predictions, bloom_group)]
    single = [one for one in found if _is_single(one)]
    cells = [
        (one.group, str(one.count), percent(one.regret), f"{one.agreement:.2f}", one.chosen, one.best)
        for one in found
        if not _is_single(one)
    ]
    if single:
        worst = max(single, key=lambda one: one.regret)
        mean, tau = (
            statistics.fmean(values) for values in ([one.regret for one in single], [one.agreement for one in single])
        )
        met = sum(one.regret <= CHOICE_COST for one in single)
        cells.append(
            (
                (f"vTrain single-node, mean of {len(single)} groups, {met} of them met"),
                "",
                percent(mean),
                f"{tau:.2f}",
                "",
                "",
            )
        )
        cells.append(
            (
                f"worst: {worst.group}",
                str(worst.count),
                percent(worst.regret),
                f"{worst.agreement:.2f}",
                worst.chosen,
                worst.best,
            )
        )
    if (day := another_day(rows)) is not None:
        named = {"mean": day.mean, "worst": day.worst}
        for name, cost in named.items():
            drawn = f"{percent(cost.low)}, {percent(cost.middle)}, {percent(cost.high)}"
            cells.append((f"vTrain single-node by times of another day: {name}", "", drawn, "", "", ""))
        met_of_days = f"{day.met.low:.0f}, {day.met.middle:.0f}, {day.met.high:.0f}"
        cells.append(("vTrain single-node by times of another day: groups met", met_of_days, "", "", "", ""))
    note = (
        "Time of the layout predicted to be best, over that of the best measured one, less 1; `order` is Kendall's "
        "tau-b. Another day: "
        "the measured times themselves, those of each hidden size, tp and microbatch scaled at random as much as "
        "layers of equal kernels "
        f"scatter there; 5%, 50% and 95% of {DAYS} such days."
    )
    return Table(
        "What a wrong choice costs",
        note,
        ("group", "layouts", "cost", "order", "chosen", "best measured"),
        tuple(cells),
    )
