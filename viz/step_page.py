"""The page of a predicted step, with all that is known of it besides its timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..core.commands.commands import service
from .draw import draw
from .page.content import Extra


def extra_of(simulation: Any) -> Extra:
    """What a page says of a `simulator.step.step.Simulation` besides its timeline: what is usable of a device, the
    findings of the static rules, and memory by component."""
    return Extra(
        simulation.report["capacity_bytes"],
        tuple(service("check")(simulation.run.graph.schedule)),
        tuple(each.components() for each in simulation.memory),
        simulation.sample_components,
    )


def draw_step(simulation: Any, path: str | Path) -> None:
    """Writes the page of a simulation."""
    draw(simulation.timeline, path, extras=[extra_of(simulation)])
