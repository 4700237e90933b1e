"""Published measurements of single collectives predicted again: NCCL by size, one node and several."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....core.machine.cluster import ClusterSpec
from ....core.machine.cluster_presets import cluster_preset
from ....core.program import Collective
from ....simulator.network.nccl import LINK_RING_S, NETWORK_RING_S
from ....simulator.network.network import best_algorithm
from ....simulator.network.topology import Spread
from ..row import Row, RowError

PRESETS = (
    ("A100", "dgx-a100-80g"),
    ("H100", "dgx-h100"),
    ("H200", "dgx-h200"),
    ("H800", "h800-pod"),
    ("B200", "dgx-b200"),
)
"""Word in the name of a device -> the preset that describes its network."""

PEAK_BYTES = 2**33
"""Size at which a bandwidth published without one is taken to have been reached: large ones end a run of nccl-tests."""

SIZES = ((2**20, "below 1 MiB"), (2**25, "to 32 MiB"), (float("inf"), "from 32 MiB"))
"""Upper ends of the ranges of a table. Small ones are launches and hops, large ones bandwidth."""

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class CollectivePrediction:
    """One collective's time predicted next to the measured one. `refused` says why there is no prediction."""

    row: Row
    algorithm: str = ""
    predicted_s: float | None = None
    measured_s: float | None = None
    refused: str = ""

    @property
    def error(self) -> float | None:
        """Relative error of the time; positive is too slow."""
        return self.predicted_s / self.measured_s - 1 if self.predicted_s and self.measured_s else None

    @property
    def num_bytes(self) -> int:
        """Payload of the row."""
        return int(self.row["measured.bytes"] or PEAK_BYTES)


def predict_collective(row: Row) -> CollectivePrediction:
    """The time of a published collective."""
    try:
        if row["measured.op"] == "p2p":
            return _hop(row)
        operation, spread = _operation(row)
        choice = best_algorithm(cluster_of(row), spread, operation)
        algorithm = f"{choice.algorithm}/{choice.protocol}"
        return CollectivePrediction(row, algorithm, choice.seconds, _measured_s(row, operation))
    except RowError as error:
        return CollectivePrediction(row, refused=str(error))


def cluster_of(row: Row) -> ClusterSpec:
    """The machine of a row; rows that name the ring ran without sums in the switch."""
    gpu = str(row["hardware.gpu"])
    preset = next((preset for word, preset in PRESETS if word in gpu), None)
    if preset is None:
        raise RowError(f"no preset describes a {gpu}")
    cluster = cluster_preset(preset, row.need("hardware.count"))
    return replace(cluster, nvls_efficiency=0.0) if "ring" in str(row["measured.algorithm"]) else cluster


def _operation(row: Row) -> tuple[Collective, Spread]:
    op, algorithm = str(row["measured.op"]), row["measured.algorithm"]
    if op not in OPERATIONS:
        raise RowError(f"{op} is no collective of a known group")
    if algorithm is not None and not str(algorithm).startswith("NCCL"):
        raise RowError(f"{algorithm}: a kernel of inference engines, which no training stack modelled here runs")
    if row["measured.time_us"] is None and row["measured.busbw_gbs"] is None:
        raise RowError("neither a time nor a bandwidth of one collective is published")
    size, nodes = int(row.need("hardware.count")), int(row.need("measured.nodes"))
    if size < 2:
        raise RowError("one device has no collectives")
    payload = int(row["measured.bytes"] or PEAK_BYTES)
    sent = payload * (size - 1) * (2 if op == "all_reduce" else 1) // size
    return Collective("", op, "dp", size, sent), Spread(nodes, size // nodes)  # type: ignore[arg-type]


def _measured_s(row: Row, operation: Collective) -> float:
    microseconds, bus = row["measured.time_us"], row["measured.busbw_gbs"]
    return float(microseconds) * 1e-6 if microseconds is not None else operation.sent_bytes / (float(bus) * 1e9)


def _hop(row: Row) -> CollectivePrediction:
    """One small message without a library around it: the hop of the cheapest protocol over the network, of the dearest
    over links (a message through NVLink waits for its flag)."""
    cluster, wire = cluster_of(row), str(row["measured.algorithm"])
    if wire == "NVLink":
        hop_s = LINK_RING_S["Simple"]
    elif wire == "InfiniBand":
        hop_s = NETWORK_RING_S["LL"]
    else:
        raise RowError(f"{wire} is not the network of {cluster.name}")
    return CollectivePrediction(row, "one hop", hop_s, float(row.need("measured.same_leaf_us")) * 1e-6)
