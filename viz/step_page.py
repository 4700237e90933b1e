"""The page of a predicted step, with all that is known of it besides its timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.base.findings import Finding
from ..core.commands.commands import service
from .draw import draw
from .page.content import Extra


def extra_of(simulation: Any) -> Extra:
    """What a page says of a `simulator.step.step.Simulation` besides its timeline: what is usable of a device, what
    `verify` finds in the plan by its static rules, and memory by component."""
    return Extra(
        simulation.report["capacity_bytes"],
        tuple(_findings(simulation)),
        tuple(each.components() for each in simulation.memory),
        simulation.sample_components,
    )


def _findings(simulation: Any) -> Sequence[Finding]:
    """Errors and warnings; of a plan of several modules errors alone, as `verify` has them."""
    plan = simulation.plan
    if getattr(plan, "layout", None) is None:
        return list(service("check_plan")(plan))
    return list(service("check")(simulation.run.graph.schedule, plan=plan, warnings=True))


def draw_step(simulation: Any, path: str | Path) -> None:
    """Writes the page of a simulation."""
    draw(simulation.timeline, path, extras=[extra_of(simulation)])
