"""Rules of optimizers and of what they keep."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.errors import did_you_mean, named
from ...model.model import ModelSpec
from ...model.parameters import parameters
from ..module import Module
from ..optimizer import Optimizer
from ..runtime import Offload


def offloaded_moments_exist(offload: Offload, optimizer: Optimizer) -> Iterator[str]:
    """An optimizer whose moments go to host memory keeps some."""
    if offload.optimizer and optimizer.name == "muon":
        yield (
            f"optimizer={offload.optimizer:g} keeps moments in host memory, and those of Muon stay on the device. "
            "Leave offload.optimizer out, or use adamw or sgd."
        )
    if offload.optimizer and not optimizer.keeps_moments:
        yield (
            f"optimizer={offload.optimizer:g} keeps moments in host memory, but SGD with momentum=0 has none. Leave "
            "offload.optimizer out."
        )


def groups_have_parameters(optimizer: Optimizer, model: ModelSpec) -> Iterator[str]:
    """Every group is the first that matches some parameter, and something is left to train."""
    if not optimizer.groups:
        return
    names = [each.name for each in parameters(model)]
    left = names
    for group in optimizer.groups:
        if not any(map(group.has, names)):
            near = did_you_mean(group.match, names)
            yield (
                f"groups has match={group.match!r}, which matches the whole name of no parameter{near} Names are such "
                f"as {named(_kinds(names))}."
            )
        elif not any(map(group.has, left)):
            yield (
                f"groups has match={group.match!r}, and groups before it match all of its parameters: the first that "
                "matches has them. Put it before those, or leave it out."
            )
        left = [name for name in left if not group.has(name)]
    if all(optimizer.update_of(each).is_frozen for each in parameters(model)):
        yield "groups freeze all parameters, so nothing is trained. Leave some out."


def groups_are_of_one_model(modules: tuple[Module, ...], optimizer: Optimizer) -> Iterator[str]:
    """Names of parameters are those of one model."""
    if optimizer.groups and len(modules) > 1:
        yield "groups choose parameters of one model by their names, and here are several. Leave optimizer.groups out."


def _kinds(names: list[str]) -> list[str]:
    """The names of the first layer, and those that no layer has."""
    return [name for name in names if not name.startswith("layers.") or name.startswith("layers.0.")]
