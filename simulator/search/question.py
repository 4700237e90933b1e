"""What is asked of a search: the objective, how many answers, limits, and which part of the space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ...core.base.errors import PlanError
from ...core.machine.cluster import ClusterSpec

Objective = Literal["time", "memory", "money", "energy"]
OBJECTIVES: tuple[Objective, ...] = ("time", "memory", "money", "energy")

NEAR = 0.005
"""Layouts whose steps differ by no more than this share count as equally fast: predictions are not better than that."""

SLOWEST_OF_FRONT = 1.25
"""Of a front's layouts none takes more than this many times the fastest step."""

SECONDS_AN_HOUR = 3600.0


class Progress(NamedTuple):
    """How far a search is: plans left, those decided, the least that any of those left can take, and the best step
    found (None before the first)."""

    left: int
    decided: int
    bound_s: float
    best_s: float | None


@dataclass(frozen=True)
class Question:
    """`top` answers by an objective, or with `pareto` the front of time, memory and simplicity.

    `most_bytes` is what the worst rank may hold at most, besides what its device has. `part` is (number, of how many):
    degrees are dealt out to parts in turn, so that the parts together decide the whole space. `watch` is given how far
    the search is.
    """

    objective: Objective = "time"
    pareto: bool = False
    top: int = 10
    most_bytes: int | None = None
    part: tuple[int, int] = (1, 1)
    watch: Callable[[Progress], None] | None = None


def check_objective(objective: Objective, cluster: ClusterSpec) -> None:
    """Raises `PlanError` where the cluster does not have what an objective is reckoned with."""
    needed = {"money": "device_price_per_hour", "energy": "device_watts"}.get(objective)
    if needed is not None and not getattr(cluster, needed):
        raise PlanError(
            f"--objective {objective} is reckoned with cluster.{needed}, which is not given. Add it to [cluster], or "
            f"--set cluster.{needed}=NUMBER."
        )


def costs(cluster: ClusterSpec, step_s: float) -> dict[str, Any]:
    """What a step costs in money and in joules, as far as the cluster says what devices do. All devices are paid for
    and powered all the time, so that with a number of devices the fastest step is the cheapest."""
    found = {}
    if cluster.device_price_per_hour:
        found["step_price"] = step_s * cluster.num_devices * cluster.device_price_per_hour / SECONDS_AN_HOUR
    if cluster.device_watts:
        found["step_energy_j"] = step_s * cluster.num_devices * cluster.device_watts
    return found
