"""What a user's own block must be so that it can be trained and proved: its parameters are those
that its context made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from ...core.base.errors import PlanError, named
from ...core.layout.stage_parameters import stage_parameters
from ...core.layout.stages import StageLayers
from ...core.model.blocks import layer_prefix
from ...core.plan.plan import Plan

INSTEAD: Sequence[tuple[tuple[type[nn.Module], ...], str]] = (
    ((nn.Linear, nn.Bilinear), "context.column_linear, context.row_linear or context.whole_linear"),
    ((nn.LayerNorm, nn.RMSNorm), "context.norm"),
    ((nn.MultiheadAttention,), "context.attention"),
)
"""What makes the parameters of torch's own layers here."""

ANY_LAYER = "one of the context's layers, whose parameters are the model's, or register_buffer for what nobody trains"

REGISTERED = ("_parameters", "_buffers")
"""Where torch keeps what `named_parameters` and `named_buffers` return."""


def check_block(block: object, layer: int, *, made: Mapping[nn.Module, str], earlier: Mapping[nn.Module, str]) -> None:
    """Raises `PlanError`, with all problems, for what a user's function gave as transformer layer `layer`, where that
    cannot be trained.

    `made` are the layers that its context has made, by name, `earlier` those of the blocks before it. Gradients, cuts,
    saved files and ledgers know the parameters of `made` alone, so the block may have no others, trained or frozen. It
    must hold all of these: a module that is none of its submodules does not hear of `eval()`, and its router not of the
    step's end.
    """
    whose = f"the block {type(block).__name__} of layer {layer}"
    if not isinstance(block, nn.Module):
        hint = "Give a class or a function that makes one of a context and a layer."
        raise PlanError(f"{whose} is no torch.nn.Module. {hint}")
    problems = []
    if foreign := list(_foreign(block)):
        names, instead = [name for name, _ in foreign], list(dict.fromkeys(_instead(owner) for _, owner in foreign))
        problems.append(
            f"{whose} has parameters that its context did not make: {named(names)}. They would be neither trained nor "
            f"saved nor compared. Use {'; '.join(instead)}."
        )
    held = set(block.modules())
    if loose := [name for each, name in made.items() if each not in held]:
        problems.append(
            f"{whose} does not hold all layers that its context made as submodules: {named(loose)}. They would not "
            "hear "
            "of eval(), nor their routers of a step's end. Assign each to an attribute, or keep them in a "
            "torch.nn.ModuleList."
        )
    if shared := [name for each, name in earlier.items() if each in held]:
        problems.append(
            f"{whose} holds layers that an earlier block holds: {named(shared)}. Each is run once a microbatch. "
            "For a parameter that two blocks share, make a layer of its name in each."
        )
    if problems:
        raise PlanError(problems)


def check_names(plan: Plan, stage: StageLayers, used: Iterable[str]) -> None:
    """Raises `PlanError` where the blocks of a stage use parameters that other stages hold: their
    copies would go apart."""
    own = {parameter.name for parameter in stage_parameters(plan.model, stage)}
    if other := [name for name in used if name not in own]:
        layers = ", ".join(map(layer_prefix, stage.layers)) or "no layers"
        raise PlanError(
            f"blocks of stage {stage.stage}, which has {layers}, use parameters of other stages: {named(other)}. "
            "Each stage would train a copy of its own. Name a block's parameters by the layer that it is made for, or "
            "share them inside one stage."
        )


def _foreign(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Tensors of a block that are parameters, or that autograd would give a gradient, by their
    path, with their module."""
    for path, module in block.named_modules():
        prefix = f"{path}." if path else ""
        for name, _ in module.named_parameters(recurse=False):
            yield f"{prefix}{name}", module
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.requires_grad:
                yield f"{prefix}{name}", module
        for name, value in vars(module).items():
            if name not in REGISTERED and any(each.requires_grad for each in _tensors(value)):
                yield f"{prefix}{name}", module


def _tensors(value: object) -> Iterator[Tensor]:
    """A tensor, or those in a list, a tuple or a dict, which torch does not register."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        yield from (each for each in value if isinstance(each, Tensor))
    elif isinstance(value, Tensor):
        yield value


def _instead(owner: nn.Module) -> str:
    for kinds, words in INSTEAD:
        if isinstance(owner, kinds):
            return f"{words} instead of {type(owner).__name__}"
    return ANY_LAYER
