"""What is asked of the predictions, as a table, and what other tools reach on the same rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..row import Row
from .predictions import Prediction


@dataclass(frozen=True)
class Target:
    """A group of rows and the largest mean absolute error asked for; `peers` is what others reach (see
    `simulator_anchors`)."""

    name: str
    holds: Callable[[Row], bool]
    mape: float
    peers: str
    memory: bool = False

    def errors(self, predictions: list[Prediction]) -> list[float]:
        """Errors of the group's rows."""
        chosen = [one for one in predictions if self.holds(one.row)]
        found = (one.memory_error if self.memory else one.error for one in chosen)
        return [error for error in found if error is not None]


def _family(*names: str) -> Callable[[Row], bool]:
    return lambda row: any(row.family.startswith(name) for name in names)


def _h100(row: Row) -> bool:
    return row.source.startswith(("dgxc-benchmarking", "MLPerf")) and "H100" in str(row["hardware.gpu"])


TARGETS: tuple[Target, ...] = (
    Target("SC21 Table 1", _family("sc21_t1"), 0.06, "Calculon 10.4%, SimuMax 9.7%"),
    Target("Korthikanti Table 5", _family("korthikanti_t5"), 0.03, "Calculon 3.7%, SimuMax 4.6%"),
    Target("vTrain multi-node", _family("vtrain_multi"), 0.09, "SimuMax 11.5%, Calculon 19.7%, vTrain 14.7%"),
    Target("vTrain single-node", _family("vtrain_single"), 0.12, "Calculon 39.0%, vTrain 8.4%"),
    Target("H100: dgxc and MLPerf", _h100, 0.08, "Calculon -25% to -37% on MLPerf"),
    Target("SimuMax B200, time", _family("simumax_"), 0.05, "SimuMax 5.6%"),
    Target("SimuMax B200, allocated memory", _family("simumax_"), 0.006, "SimuMax 0.46%", memory=True),
    Target("Vocabulary Parallelism, peak", _family("vocabpar_"), 0.06, "", memory=True),
    Target("Zero Bubble, peak", _family("zb_t4", "zb_t8"), 0.06, "", memory=True),
)
"""In the order of the issue."""
