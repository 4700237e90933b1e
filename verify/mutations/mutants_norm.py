"""Gradient norms that count too much or too little, and clipping by them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ...backend.optimizers import held
from ...backend.ranks import held_parts, training_rank
from ...backend.ranks.totals import Totals
from ...backend.transport.mesh import Mesh
from ...core.model.parameters import Parameter
from ...core.plan.plan import Plan
from ..ledger.ledger import OPTIMIZER, SCALAR
from .mutant import Expected, Mutant
from .patches import Function, Patches
from .plans import EXPERTS, tiny

MOMENT = "embedding.tokens.weight.exp_avg"
"""Gradients and norm are right, the update is wrong: what the optimizer makes of the first
parameter is the first to differ."""


def norm_is(*kinds: str, step: int = 1, ranks: tuple[int, ...]) -> Expected:
    """Gradients are right and their norm is wrong."""
    return Expected(SCALAR, "grad_norm", kinds, ("STEP",), ranks=ranks, step=step)


def leaves_out(patches: Patches, *, left_out: Callable[[Parameter], bool]) -> None:
    """Parameters that are cut count as if every tensor-parallel rank had them whole: what ranks but the
    first have does not count."""

    def counts(original: Function) -> Function:
        def counted(plan: Plan, mesh: Mesh, stage: int, parameter: Parameter) -> bool:
            own = mesh.etp.rank if parameter.expert else mesh.coordinates["tp"]
            return original(plan, mesh, stage, parameter) and not (own > 0 and left_out(parameter))

        return counted

    patches.replace(held_parts, "_counts", counts)


def everything(parameter: Parameter) -> bool:
    """All that ranks have."""
    return True


def of_experts(parameter: Parameter) -> bool:
    """What experts have."""
    return parameter.expert


def biases(parameter: Parameter) -> bool:
    """Vectors that are cut by heads."""
    return parameter.name.endswith(".bias")


def counts_copies(patches: Patches) -> None:
    """What every tensor-parallel rank has whole counts on each of them."""

    def counts(original: Function) -> Function:
        return lambda plan, mesh, stage, parameter: parameter.cut is None or original(plan, mesh, stage, parameter)

    patches.replace(held_parts, "_counts", counts)


def keeps_the_norm(patches: Patches) -> None:
    """The norm is computed once and then taken from a cache that nobody clears."""

    def norm(original: Function) -> Function:
        def computed(self: Any, *given: Any) -> float:
            if not hasattr(self, "cached_norm"):
                self.cached_norm = original(self, *given)
            return self.cached_norm

        return computed

    patches.replace(Totals, "norm", norm)


def clips_upwards(patches: Patches) -> None:
    """The larger of 1 and the coefficient is taken."""

    def coefficient(original: Function) -> Function:
        return lambda norm, max_norm: (max_norm / (norm + held.CLIP_EPS)).clamp(min=1.0)

    patches.replace(training_rank, "clip_coefficient", coefficient)


def adds_epsilon_on_every_rank(patches: Patches, *, num_ranks: int) -> None:
    """Each of the ranks that hold a part of the norm adds the epsilon to its own before they are added."""

    def coefficient(original: Function) -> Function:
        return lambda norm, max_norm: original(norm + (num_ranks - 1) * held.CLIP_EPS, max_norm)

    patches.replace(training_rank, "clip_coefficient", coefficient)


def takes_narrow_norms(patches: Patches) -> None:
    """Gradients are rounded before they are squared."""
    patches.replace(
        Totals,
        "norm",
        lambda original: (
            lambda self, held, gradients: original(self, held, [each.bfloat16().float() for each in gradients])
        ),
    )


MUTANTS = (
    Mutant(
        "GN01",
        "experts' weights that tensor-parallel ranks share do not count in the norm but on the first",
        "NVIDIA/Megatron-LM#5916; also #6470, #6099, #3024",
        plan=lambda: tiny(tp=2, ep=2, etp=2, dp=2, samples=4, model=EXPERTS),
        breaks=partial(leaves_out, left_out=of_experts),
        expected=norm_is("missing", ranks=(0, 1, 2, 3)),
    ),
    Mutant(
        "GN02",
        "vectors that are cut by heads do not count in the norm but on the first rank",
        "NVIDIA/Megatron-LM#7452 finding 8",
        plan=lambda: tiny(tp=3, samples=2, model={"qkv_bias": True}),
        breaks=partial(leaves_out, left_out=biases),
        expected=norm_is("missing", ranks=(0, 1, 2)),
    ),
    Mutant(
        "GN05",
        "the norm counts what the first tensor-parallel rank has and nothing else",
        "deepspeedai/DeepSpeed#5411",
        plan=lambda: tiny(tp=3, samples=2),
        breaks=partial(leaves_out, left_out=everything),
        expected=norm_is("missing", ranks=(0, 1, 2)),
    ),
    Mutant(
        "GN06",
        "clipping takes the larger of 1 and the coefficient, so that small gradients grow",
        "deepspeedai/DeepSpeed#5150",
        plan=lambda: tiny(tp=2, samples=2, clip=10.0),
        breaks=clips_upwards,
        expected=Expected(OPTIMIZER, MOMENT, ("scaled",), ("STEP",)),
    ),
    Mutant(
        "GN07",
        "the norm of an earlier step is used",
        "hpcaitech/ColossalAI#5002",
        plan=lambda: tiny(dp=2, samples=4),
        breaks=keeps_the_norm,
        expected=norm_is("stale", step=2, ranks=(0, 1)),
    ),
    Mutant(
        "GN08",
        "every rank adds the epsilon of clipping to its part of the norm",
        "pytorch/pytorch#149768",
        plan=lambda: tiny(tp=3, samples=2),
        breaks=partial(adds_epsilon_on_every_rank, num_ranks=3),
        expected=Expected(OPTIMIZER, MOMENT, ("scaled", "order only"), ("STEP",)),
    ),
    Mutant(
        "GN10",
        "what tensor-parallel ranks have copies of counts on every one of them in the norm",
        "NVIDIA/Megatron-LM@efd25df904, @9992794fcb",
        plan=lambda: tiny(tp=2, samples=2),
        breaks=counts_copies,
        expected=norm_is("doubled", ranks=(0, 1)),
    ),
    Mutant(
        "XX97",
        "the norm is that of gradients rounded to bf16",
        "ours: a precision that is lost on the way to the norm",
        plan=lambda: tiny(dp=2),
        breaks=takes_narrow_norms,
        expected=norm_is("order only", ranks=(0, 1)),
        steps=1,
    ),
)
