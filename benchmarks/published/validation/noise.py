"""How noisy the data are, from the data alone: one configuration published twice, equal work in
different cuts, equal layers.

No prediction enters here, so that an error can be held against what no model could do better.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from ..row import Row, measured_of
from .statistics import noise_floors


@dataclass(frozen=True)
class Floor:
    """Readings that ought to be equal: what they have in common, how many groups of them there are, and the median and
    largest spread of a group, (largest - smallest) / smallest."""

    source: str
    reading: str
    groups: int
    median: float
    largest: float


def _floor(source: str, reading: str, groups: Iterable[Iterable[float]]) -> Floor | None:
    spreads = [max(values) / min(values) - 1 for values in map(list, groups) if len(values) > 1]
    return Floor(source, reading, len(spreads), statistics.median(spreads), max(spreads)) if spreads else None


def _grouped(rows: Iterable[Row], key: Callable[[Row], Hashable]) -> dict[Hashable, list[Row]]:
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        if measured_of(row).step_s is not None and row["tier"] != "D" and not row["flags.suspect"]:
            groups.setdefault(key(row), []).append(row)
    return groups


_SIZES = ("model.layers", "model.hidden", "model.ffn", "model.seq", "batch.micro", "batch.num_microbatches")
_CUT = ("tp", "pp", "vpp", "cp", "ep", "sp")


BETWEEN = "step of one model and cut"


def across_publications(rows: Iterable[Row]) -> list[Floor]:
    """Steps of one model in one cut, with the same microbatches on the same kind of device, in different publications.
    Replicas may differ: they add a few percent at most where their gradients are reduced over the network. A
    publication with several such rows counts with their median."""

    def setting(row: Row) -> Hashable:
        width = str(row["precision"]).lower().replace("bf16", "16").replace("fp16", "16").replace("None", "16")
        device = str(row["hardware.gpu"]).split()[0].split("-")[0]
        published = (*(row[name] for name in _SIZES), *(row[f"parallel.{name}"] or 1 for name in _CUT))
        return (*published, device, width.replace("none", "16"), str(row["recompute"]).split()[0])

    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for members in _grouped(rows, setting).values():
        by_source = {source: _median_s(found) for source, found in _grouped(members, lambda row: row.source).items()}
        names = sorted(map(str, by_source))
        if setting(members[0])[0] is None:  # type: ignore[index]
            continue
        for one in range(len(names)):
            for other in range(one):
                pairs.setdefault((names[other], names[one]), []).append(
                    (by_source[names[other]], by_source[names[one]])
                )
    found = (_floor(f"{one} and {other}", BETWEEN, values) for (one, other), values in pairs.items())
    return [floor for floor in found if floor is not None]


def _median_s(rows: Iterable[Row]) -> float:
    return statistics.median(seconds for row in rows if (seconds := measured_of(row).step_s) is not None)


def sequence_layer_s(row: Row) -> float:
    """Seconds of one sequence in one layer, from a step under 1F1B: microbatches and bubbles are (m
    + p - 1) times a stage."""
    seconds = measured_of(row).step_s
    assert seconds is not None
    pp, count = row["parallel.pp"], row["batch.num_microbatches"]
    return float(seconds * pp / (row["model.layers"] * (count + pp - 1) * row["batch.micro"]))


def across_stages(rows: Iterable[Row]) -> list[Floor]:
    """vTrain's multi-node rows: seconds of a sequence in a layer for one model, tp and microbatch, from 2, 4, 8 and 16
    stages. The layer is the same; what a step costs once differs by a few percent."""
    multi = [row for row in rows if row.family == "vtrain_multi" and row["parallel.pp"] > 1]
    setting = _grouped(multi, lambda row: (row["parallel.tp"], row["model.name"], row["batch.micro"]))
    times = [(found[0]["parallel.tp"], [sequence_layer_s(row) for row in found]) for found in setting.values()]
    named = [("vTrain multi-node", [values for _, values in times])]
    named += [
        (f"vTrain multi-node, tp={tp}", [values for other, values in times if other == tp])
        for tp in sorted({tp for tp, _ in times})
    ]
    found = (_floor(name, "layer of one microbatch, over pp", values) for name, values in named)
    return [floor for floor in found if floor is not None]


def layer_seconds(rows: Iterable[Row]) -> dict[tuple[int, int, int], float]:
    """The times of a layer, forward and backward of one microbatch, that vTrain's single-node rows are put
    together from, by hidden size, tp and microbatch: a step is affine in its microbatches, and the slope
    affine in the layers."""
    steps: dict[tuple[int, int, int], dict[tuple[int, int], dict[int, dict[int, float]]]] = {}
    for row in rows:
        if row.family == "vtrain_single" and (seconds := measured_of(row).step_s):
            layer = (row["model.hidden"], row["parallel.tp"], row["batch.micro"])
            series = steps.setdefault(layer, {}).setdefault((row["parallel.pp"], row["parallel.dp"]), {})
            series.setdefault(row["model.layers"], {})[row["batch.num_microbatches"]] = seconds
    return {layer: found for layer, cuts in sorted(steps.items()) if (found := _layer_s(cuts)) is not None}


def _layer_s(cuts: Mapping[tuple[int, int], Mapping[int, Mapping[int, float]]]) -> float | None:
    for (pp, _), by_layers in sorted(cuts.items()):
        slopes = {layers: _slope(series) for layers, series in by_layers.items() if len(series) > 1}
        if len(slopes) > 1:
            return _slope(slopes) * pp
    return None


def _slope(series: Mapping[int, float]) -> float:
    low, high = min(series), max(series)
    return (series[high] - series[low]) / (high - low)


HOST_BOUND_HIDDEN = 1024
"""Hidden size at which a layer cut over devices is too small to keep them busy: its time is that of launching its
kernels, which are as many whatever tp and the microbatch."""


def host_bound_layers(rows: Iterable[Row]) -> list[float]:
    """Times of layers that launch equal kernels and wait for nothing else."""
    return [
        seconds for (hidden, tp, _), seconds in layer_seconds(rows).items() if hidden == HOST_BOUND_HIDDEN and tp > 1
    ]


def scatter_of_layers(rows: Iterable[Row]) -> Floor | None:
    """vTrain's single-node rows: how far layers of equal kernels lie from their median, and all of them apart."""
    if len(layers := host_bound_layers(rows)) < 2:
        return None
    middle = statistics.median(layers)
    off = statistics.fmean(abs(layer / middle - 1) for layer in layers)
    return Floor(
        "vTrain single-node", "layers of equal kernels, host-bound", len(layers), off, max(layers) / min(layers) - 1
    )


def repetitions(rows: Iterable[Row], reading: Callable[[Row], float | None], name: str) -> list[Floor]:
    """Configurations that a source publishes more than once, equal in every published field."""
    return [Floor(source, name, *found) for source, found in noise_floors(rows, reading).items()]


def floors(rows: Iterable[Row]) -> list[Floor]:
    """Every floor of step times."""
    rows = [row for row in rows if row["kind"] == "train_step"]
    single = scatter_of_layers(rows)
    again = repetitions(rows, lambda row: measured_of(row).step_s, "step time, repeated")
    return [*again, *across_publications(rows), *across_stages(rows), *([single] if single else [])]


_SERIES = {"vtrain_multi": "vTrain multi-node", "vtrain_single": "vTrain single-node"}


def floor_of(found: Iterable[Floor], source: str, series: str) -> Floor | None:
    """The floor of a series: of its source's own repetitions, or else the widest among those it shares
    with other publications."""
    own = [floor for floor in found if floor.source == _SERIES.get(series, source)]
    shared = [floor for floor in found if series not in _SERIES and source in floor.source]
    return max(own or shared, key=lambda floor: floor.median, default=None)
