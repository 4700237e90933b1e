"""Rules about what the stages hold: the layers of the model, each once, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from ....core.schedule.action import Kind
from ..facts import Facts, LayerHoldings
from .blocking import NONE
from .rule import Rule, Violation
from .view import View


def missing_layer(view: View) -> Iterator[Violation]:
    """Layers of the model that no stage holds."""
    layers = _layers(view)
    held = {layer for stage in layers.stages for layer in stage}
    for position, layer in enumerate(layers.model):
        if layer not in held:
            before = set(layers.model[:position])
            nearest = max((stage for stage, content in enumerate(layers.stages) if before & set(content)), default=0)
            yield _at_stage(view, nearest, f"no stage holds {layer}.")


def repeated_layer(view: View) -> Iterator[Violation]:
    """Layers held twice."""
    layers, seen = _layers(view), dict[str, int]()
    for stage, content in enumerate(layers.stages):
        for layer, count in Counter(content).items():
            if count > 1 or layer in seen:
                yield _at_stage(
                    view, stage, (f"stage {stage} holds {layer}, which stage {seen.get(layer, stage)} holds already.")
                )
            seen.setdefault(layer, stage)


def unknown_layer(view: View) -> Iterator[Violation]:
    """Layers that the model does not have."""
    layers = _layers(view)
    for stage, content in enumerate(layers.stages):
        for layer in sorted(set(content) - set(layers.model)):
            yield _at_stage(view, stage, f"stage {stage} holds {layer}, which the model does not have.")


def layer_order(view: View) -> Iterator[Violation]:
    """Layers that come after a later one."""
    layers = _layers(view)
    place = {layer: position for position, layer in enumerate(layers.model)}
    latest, last = -1, ""
    for stage, content in enumerate(layers.stages):
        for layer in content:
            position = place.get(layer, latest)
            if position < latest:
                yield _at_stage(
                    view, stage, (f"stage {stage} runs {layer} after {last}; the model has them the other way round.")
                )
            elif position > latest:
                latest, last = position, layer


def _layers(view: View) -> LayerHoldings:
    assert view.facts.layers is not None, "the rule needs layers"
    return view.facts.layers


def _at_stage(view: View, stage: int, what: str) -> Violation:
    """A violation at the first forward of a stage."""
    forwards = view.first(Kind.F)[stage]
    forwards = forwards[forwards != NONE]
    index = int(np.min(forwards)) if len(forwards) else None
    return Violation(index, int(view.owner_table[stage, 0]), what)


_PIPELINE = "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0STEP\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1STEP\n"
_MODEL = ("embedding", "layers.0", "layers.1", "head")


def _holding(*stages: tuple[str, ...]) -> Facts:
    return Facts(layers=LayerHoldings(_MODEL, stages))


LAYER_RULES = (
    Rule(
        "missing-layer",
        "Every layer of the model is on some stage.",
        "Give the layer to the stage between its neighbours.",
        _PIPELINE,
        missing_layer,
        "layers",
        _holding(("embedding", "layers.0"), ("head",)),
        key="layout.stages",
    ),
    Rule(
        "repeated-layer",
        "No layer of the model is on two stages, or twice on one.",
        "Remove it from one of the two.",
        _PIPELINE,
        repeated_layer,
        "layers",
        _holding(("embedding", "layers.0", "layers.1"), ("layers.1", "head")),
        key="layout.stages",
    ),
    Rule(
        "unknown-layer",
        "Stages hold layers of this model only.",
        "Look for a mistyped number, or a stage cut made for another model.",
        _PIPELINE,
        unknown_layer,
        "layers",
        _holding(("embedding", "layers.0"), ("layers.1", "layers.2", "head")),
        key="layout.stages",
    ),
    Rule(
        "layer-order",
        "Along the stages, layers come in the order of the model.",
        "Put them in order: the same layers in another order are another model.",
        _PIPELINE,
        layer_order,
        "layers",
        _holding(("embedding", "layers.1"), ("layers.0", "head")),
        key="layout.stages",
    ),
)
