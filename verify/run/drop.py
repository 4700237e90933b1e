"""Deliberate faults, so that a proof can show that it would have seen them.

A fault lives in the arithmetic of one rank: the rank still takes part in every collective, as the real bugs do, and
then uses something else than the result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ...core.base.errors import PlanError, did_you_mean
from ...core.base.reduction import cut
from ...core.layout.stage_parameters import stage_usages
from ...core.model.parameters import Parameter
from ...core.plan.plan import Plan
from ...core.program import num_copies

if TYPE_CHECKING:
    from torch import Tensor

DROP_REDUCTION = "drop-reduction"
FORM = f"{DROP_REDUCTION}:RANK:TENSOR, such as {DROP_REDUCTION}:1:layers.0.mlp.down"


@dataclass(frozen=True)
class DropReduction:
    """Rank `global_rank` keeps its own partial sum of `tensor` instead of the sum over its group.

    A linear layer (`layers.0.mlp.down`) means its tensor-parallel reduction: of the output where it is row-parallel, of
    the input gradient where it is column-parallel. A parameter (`layers.0.mlp.down.weight`) means its gradient over
    data parallelism (of experts that of their own).
    """

    global_rank: int
    tensor: str

    def __str__(self) -> str:
        return f"{DROP_REDUCTION}:{self.global_rank}:{self.tensor}"

    def check(self, plan: Plan) -> None:
        """Raises `PlanError` when the rank does not exist, does not hold the tensor, or has
        nobody to reduce it with."""
        layout = plan.layout
        if not 0 <= self.global_rank < layout.world_size:
            raise PlanError(f"{self}: rank {self.global_rank} is outside the run of {layout.world_size} ranks.")
        everywhere = {name for stage in range(layout.num_stages) for name in _reductions(plan, (stage,))}
        if self.tensor not in everywhere:
            raise PlanError(f"{self}: no reduction is called {self.tensor!r}{did_you_mean(self.tensor, everywhere)}")
        pp_rank = layout.coordinates(self.global_rank)["pp"]
        axes = _reductions(plan, plan.placement.stages_of(pp_rank))
        if self.tensor not in axes:
            raise PlanError(
                f"{self}: rank {self.global_rank} does not hold {self.tensor} (it is pipeline rank "
                f"{pp_rank} of {layout.pp})."
            )
        axis, size = axes[self.tensor]
        if axis == "dp" and layout.cp > 1:
            layer = next(name for name, (other, _) in axes.items() if other == "tp")
            raise PlanError(
                f"{self}: with cp={layout.cp} all gradients of a stage are finished in one exchange, of which no "
                "rank can leave out one. "
                f"Choose a layer, such as {layer}, or cp=1."
            )
        if size == 1:
            raise PlanError(
                f"{self}: {self.tensor} is reduced over {axis}, but {axis}=1. Choose a plan with {axis} of at least 2."
            )


def parse_fault(text: str) -> DropReduction:
    """The fault that `--inject` names. Raises `PlanError` for anything else."""
    kind, _, rest = text.partition(":")
    rank, _, tensor = rest.partition(":")
    if kind != DROP_REDUCTION:
        raise PlanError(
            f"--inject {text!r}: unknown fault {kind!r}{did_you_mean(kind, [DROP_REDUCTION])} Write {FORM}."
        )
    if not tensor:
        raise PlanError(f"--inject {text!r} does not say where. Write {FORM}.")
    if not rank.isdecimal():
        raise PlanError(f"--inject {text!r}: rank {rank!r} is no number. Write {FORM}.")
    return DropReduction(int(rank), tensor)


def drop_reduction(numerics: Any, fault: DropReduction, current_layer: Callable[[], str]) -> Any:
    """A copy of a rank's `backend.numerics.Numerics` that has the fault. `current_layer` says for
    which layer it is called."""
    faulty = copy.copy(numerics)

    def finish_contract(partial: Any, leaves: Any, group: Any, tokens: Any, dtype: Any) -> Tensor:
        alone = partial.sum(0).to(dtype)[:, slice(None) if tokens is None else slice(*tokens.own)]
        total = numerics.finish_contract(partial, leaves, group, tokens, dtype)
        return alone if current_layer() == fault.tensor else total

    def reduce_gradients(
        gradients: Mapping[str, Any], group: object, samples_of: Callable[[int], tuple[int, int]]
    ) -> dict[str, object]:
        own = {
            name: sum(held.clone() for held in gradients[name].held)
            for name in gradients
            if name.partition("@")[0] == fault.tensor
        }
        return {**numerics.reduce_gradients(gradients, group, samples_of), **own}

    faulty.finish_contract = finish_contract

    def reduce_experts(gradients: Mapping[str, Any], group: Any, nodes: Any) -> dict[str, object]:
        own = {name: sum(held.clone() for held in gradients[name].held) for name in gradients if name == fault.tensor}
        return {**numerics.reduce_experts(gradients, group, nodes), **own}

    def with_own_part(gradients: Mapping[str, Any], group: Any, reduce: Callable[[], Any]) -> Any:
        """A member's part of all gradients that `reduce` gives, in which those of the faulty one are its own."""
        ends = list(accumulate((each.held[0].numel() for each in gradients.values()), initial=0))
        (first, last), own = cut(ends[-1], group.size, group.rank), []
        for (name, each), lo, hi in zip(gradients.items(), ends, ends[1:], strict=False):
            start, stop = max(lo, first), min(hi, last)
            if name.partition("@")[0] == fault.tensor and start < stop:
                own.append((start, stop, sum(held.clone().reshape(-1) for held in each.held)[start - lo : stop - lo]))
        part = reduce()
        for start, stop, values in own:
            part[start - first : stop - first] = values
        return part

    def reduce_gradients_part(
        gradients: Mapping[str, Any], copies: Any, samples_of: Callable[[int], tuple[int, int]]
    ) -> object:
        return with_own_part(
            gradients, copies.shard, lambda: numerics.reduce_gradients_part(gradients, copies, samples_of)
        )

    def reduce_experts_part(gradients: Mapping[str, Any], copies: Any, nodes: Any) -> object:
        return with_own_part(gradients, copies.shard, lambda: numerics.reduce_experts_part(gradients, copies, nodes))

    faulty.reduce_gradients = reduce_gradients
    faulty.reduce_experts = reduce_experts
    faulty.reduce_gradients_part = reduce_gradients_part
    faulty.reduce_experts_part = reduce_experts_part
    return faulty


def _reductions(plan: Plan, stages: tuple[int, ...]) -> dict[str, tuple[str, int]]:
    """Every reduction of some stages by name, with its axis and over how many ranks it goes."""
    found = {}
    for stage in stages:
        copies = num_copies(plan, stage)
        for usage in stage_usages(plan.model, plan.stages[stage]):
            found[usage.parameter.name] = ("edp", copies.expert) if usage.parameter.expert else ("dp", copies.dense)
            if _is_linear(usage.parameter):
                found[usage.parameter.name.removesuffix(".weight")] = "tp", plan.layout.tp
    return found


def _is_linear(parameter: Parameter) -> bool:
    return (
        len(parameter.shape) == 2
        and parameter.cut is not None
        and not parameter.expert
        and not parameter.name.startswith("embedding.")
    )
