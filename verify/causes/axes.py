"""Which axis a wrong multiple of a tensor comes from, where several have its degree: found by what ranks bring to the
tensor, by the ranks that hold it wrongly, and by the other gradients that are wrong."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable

from ...core.layout.layout import Layout
from ...core.model.parameters import TOKEN_TABLE, parameters
from ...core.plan.plan import AnyPlan, Plan
from ..ledger.compare import own_key
from ..ledger.ledger import ACTIVATION_GRADIENT, GATHERED, GRADIENT, OPTIMIZER, SCALAR, WEIGHT, Key
from ..ledger.relations import AXES, degree_of

OF_EXPERTS = frozenset({"ep", "etp"})


def likely_axes(
    plan: Plan, key: Key, wrong: Collection[int], holders: Collection[int], gradients: Collection[str]
) -> tuple[str, ...]:
    """The axes over which a tensor may have been averaged or added once too often. `key` has the name in its own model.

    `wrong` are the ranks that hold it wrongly, of `holders`; `gradients` are all parameters whose gradients are
    wrong in the same step. More than one of equal degree are left only where nothing of this distinguishes them;
    all axes where none fits.
    """
    cut = [axis for axis in AXES if degree_of(plan.layout, axis) > 1]
    found = [axis for axis in cut if axis in axes_of(plan, key)]
    found = _of_whole_groups(plan.layout, found, set(wrong), set(holders)) or found
    if key.phase == GRADIENT:  # who divides over an axis does so for every tensor that has a sum over it
        found = [axis for axis in found if frozenset(gradients) == _with_sums_over(plan, axis)] or found
    return tuple(found or AXES)


def wrong_gradients(plan: AnyPlan, step: int, differing: Iterable[Key]) -> frozenset[str]:
    """The parameters whose gradients differ in a step, by their names in their own models."""
    return frozenset(own_key(plan, each).tensor for each in differing if (each.step, each.phase) == (step, GRADIENT))


def axes_of(plan: Plan, key: Key) -> frozenset[str]:
    """The axes over which ranks bring parts of a tensor, or have copies of it that are averaged."""
    if key.phase == SCALAR:
        return frozenset(AXES) - (frozenset() if key.tensor == "grad_norm" else OF_EXPERTS)
    if key.phase in (GRADIENT, OPTIMIZER, WEIGHT, GATHERED):
        return _of_parameter(plan, key.tensor.rpartition(".")[0] if key.phase == OPTIMIZER else key.tensor)
    return _of_activation(plan, key)


def _of_parameter(plan: Plan, name: str) -> frozenset[str]:
    """Of a gradient: samples over dp, tokens over cp; over tp only what it does not cut, and two
    ends of a table over pp."""
    parameter = next((each for each in parameters(plan.model) if each.name == name), None)
    if parameter is None:  # biases of experts, by the counts of all tokens
        return frozenset(("dp", "cp", "tp"))
    if parameter.expert:
        layout = plan.layout
        of_tokens = {"tp"} if layout.expert_tp < layout.tp else set()
        return frozenset({"dp", "cp", "ep"} | of_tokens | ({"etp"} if parameter.cut is None else set()))
    two_ends = plan.model.shares_table and name == TOKEN_TABLE
    return frozenset({"dp", "cp"} | ({"tp"} if parameter.cut is None else set()) | ({"pp"} if two_ends else set()))


def _of_activation(plan: Plan, key: Key) -> frozenset[str]:
    """Of what a layer gives forward, features over tp and experts over ep and etp; the gradients of losses are
    means over all tokens."""
    words = key.tensor.split(".")
    part = ".".join(words[2:]) if words[0] == "layers" else key.tensor
    if (
        part.startswith("mlp")
        and part != "mlp.router"
        and words[0] == "layers"
        and plan.model.layer_is_moe(int(words[1]))
    ):
        shared = {"tp"} if plan.model.num_shared_experts else set()
        return OF_EXPERTS | frozenset(shared)
    own = {"tp", "cp"} if part.startswith("attention") else {"tp"}
    if key.phase == ACTIVATION_GRADIENT and (part.endswith(("losses", "router", "output"))):
        own |= {"dp", "cp", "pp"}
    return frozenset(own)


def _of_whole_groups(layout: Layout, axes: Iterable[str], wrong: set[int], holders: set[int]) -> list[str]:
    """The axes all of whose groups are wrong or right in whole, where some ranks are right: a sum over a
    group is one value for it."""
    if wrong == holders:
        return []
    found = []
    for axis in axes:
        groups = layout.expert_groups("tp" if axis == "etp" else axis) if axis in OF_EXPERTS else layout.groups(axis)
        members = [holders.intersection(group) for group in groups]
        if all(group <= wrong or not group & wrong for group in members):
            found.append(axis)
    return found


@functools.lru_cache(maxsize=64)
def _with_sums_over(plan: Plan, axis: str) -> frozenset[str]:
    return frozenset(each.name for each in parameters(plan.model) if axis in _of_parameter(plan, each.name))
