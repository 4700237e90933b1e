"""Where numbers of a report come from: exact, modelled or measured, each with its source."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, TypedDict

from ...core.machine.cluster import ClusterSpec
from .profile import Profile


class Origin(TypedDict):
    """How far a class of numbers can be trusted, and why."""

    kind: Literal["exact", "modelled", "measured"]
    source: str


EXACT_NUMERICS = (
    "priced as fast ones, whoever makes their products (numerics.triton_products): tiles and sums by trees are left out"
)
"""What is said of the seconds of a plan in exact numerics."""


def report_provenance(cluster: ClusterSpec, profile: Profile, *, exact: bool = False) -> dict[str, Origin]:
    """Class of numbers -> origin, for `provenance` of the reports; `cluster.*` repeats the sources of the
    cluster's own fields. `exact` numerics have an entry of their own."""
    numerics = {"exact_numerics": _origin("modelled", EXACT_NUMERICS)} if exact else {}
    return {**_origins(cluster, profile), **numerics}


@lru_cache(maxsize=16)
def _origins(cluster: ClusterSpec, profile: Profile) -> dict[str, Origin]:
    origins: dict[str, Origin] = {
        "num_parameters": _origin("exact", "core.model.parameters: sum over all tensors, tied ones once"),
        "communication_bytes": _origin(
            "exact", ("core.program, which the backend's recorded operations are tested against")
        ),
        "order_of_actions": _origin("exact", "the lowered schedule, which the backend executes"),
        "model_flops": _origin("exact", "Korthikanti et al. 2022, appendix A, for the plan's own shapes"),
        "compute": _origin(
            "modelled",
            ("simulator.compute: products by tiles and waves, the rest by memory traffic (simulator.cost.traffic)"),
        ),
        "attention": _origin(
            "modelled", ("simulator.compute: one fused causal kernel, or products with all scores in memory")
        ),
        "overlap": _origin(
            "modelled", (f"what the stack {profile.name} runs at the same time (simulator.stack.profiles)")
        ),
        "communication_s": _origin(
            "modelled", ("simulator.network: latency and bandwidth by algorithm and protocol of the library")
        ),
        "optimizer": _origin(
            "modelled", (f"memory traffic of the step, {profile.optimizer_bytes:g} bytes per parameter")
        ),
        "other": _origin("modelled", "what devices wait for their hosts to launch kernels"),
        "bubble": _origin("exact", "longest path of the schedule, given the modelled durations"),
        "memory.weights": _origin("exact", "shapes and number formats"),
        "memory.gradients": _origin("exact", "fp32 accumulation"),
        "memory.optimizer": _origin("exact", "fp32 moments of the optimizer, fp32 weights next to 16-bit ones"),
        "memory.activations": _origin(
            "modelled", ("Korthikanti et al. 2022, table 2, with fused attention and without dropout")
        ),
        "memory.buffers": _origin(
            "modelled", ("messages under way, gathered layers, one layer's working set; no fragmentation")
        ),
        "capacity": _origin(
            "modelled",
            ("simulator.memory.capacity: the device's total less context, libraries, fragmentation and headroom"),
        ),
    }
    for field, source in cluster.sources.items():
        origins[f"cluster.{field}"] = _origin(_kind_of(source), source)
    return origins


def _origin(kind: Literal["exact", "modelled", "measured"], source: str) -> Origin:
    return {"kind": kind, "source": source}


def _kind_of(source: str) -> Literal["exact", "modelled", "measured"]:
    """Sources of cluster fields open with how they were obtained; data sheets and counts are exact."""
    if source.startswith(("measured", "reported")):
        return "measured"
    return "modelled" if source.startswith(("estimate", "nominal", "modelled", "fitted", "derived")) else "exact"
