"""Random numbers that follow from where a rank is, in place of which element they belong to."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...backend.gradients import parameter
from ...backend.model import block, transformer
from ...backend.model.written_attention import WrittenKernel
from ...backend.tensor_parallel import LayerContext, dropout, recompute
from ...core.plan.runtime import Recompute
from ..ledger.ledger import ACTIVATION, RECOMPUTED, WEIGHT
from .mutant import Expected, Mutant
from .patches import Function, Patches
from .plans import tiny

if TYPE_CHECKING:
    from torch import Tensor

    from ...backend.base.microbatch import Microbatch


def draws_from_the_first_element(patches: Patches) -> None:
    """Every rank draws its part of a tensor as if it were the first."""

    def normal(original: Function) -> Function:
        def drawn(seed: int, name: str, shape: Any, slices: Any, std: float) -> object:
            return original(seed, name, shape, tuple(slice(0, each.stop - each.start) for each in slices), std)

        return drawn

    patches.replace(parameter, "normal", normal)


def counts_samples_of_its_own(patches: Patches) -> None:
    """Masks go by the sample among those of this data-parallel rank."""

    def hidden_mask(original: Function) -> Function:
        def mask(x_BSH: Tensor, context: LayerContext, operation: str, microbatch: Microbatch) -> object:
            here = context.plan.layout.coordinates(context.tp.ranks[context.tp.rank])
            first, _ = context.plan.samples_of(here["dp"])
            own = replace(microbatch, first_sample=microbatch.first_sample - first)
            return original(x_BSH, context, operation, own)

        return mask

    patches.replace(dropout, "_hidden_mask", hidden_mask)


def counts_tokens_of_its_own(patches: Patches) -> None:
    """Masks go by the token among those that this rank holds."""
    patches.replace(
        LayerContext, "own_places", lambda original: lambda context: context.places()[: len(original(context))]
    )


def drops_nothing_after_validation(patches: Patches) -> None:
    """A held-out pass switches dropout off in the module itself."""

    def hidden_dropout(original: Function) -> Function:
        def dropped(context: Any, operation: str, x_BSH: object) -> object:
            context.is_switched_off = getattr(context, "is_switched_off", False) or context.microbatch.step is None
            return x_BSH if context.is_switched_off else original(context, operation, x_BSH)

        return dropped

    patches.replace(block, "hidden_dropout", hidden_dropout)
    patches.replace(transformer, "hidden_dropout", hidden_dropout)


def counts_layers_of_its_stage(patches: Patches) -> None:
    """Attention gets the number of its layer in the stage."""

    def dropped(original: Function) -> Function:
        def mask(kernel: Any, *where: Any) -> Any:
            _, layer, rest = kernel.operation.split(".", 2)
            stage = next(each for each in kernel.context.plan.stages if int(layer) in each.layers)
            return original(replace(kernel, operation=f"layers.{int(layer) - stage.layers[0]}.{rest}"), *where)

        return mask

    patches.replace(WrittenKernel, "_dropped", dropped)


def counts_heads_of_its_own(patches: Patches) -> None:
    """Masks of attention go by the head among those of this rank."""

    def dropped(original: Function) -> Function:
        def mask(kernel: Any, sample: int, head: int, *where: Any) -> Tensor:
            tp, model = kernel.context.tp, kernel.context.model
            first, _ = kernel.context.plan.leaf_sizes.heads.owned_items(tp.size, tp.rank)
            return original(kernel, sample, head - first * model.query_heads_per_group, *where)

        return mask

    patches.replace(WrittenKernel, "_dropped", dropped)


def draws_again(patches: Patches) -> None:
    """A layer that runs again for its backward goes on with the random numbers behind those of its forward."""
    inside = threading.local()

    def backward(original: Function) -> Function:
        def again(ctx: recompute._Recomputed, *dy: object) -> object:
            inside.again = True
            try:
                return original(ctx, *dy)
            finally:
                inside.again = False

        return again

    def hidden_mask(original: Function) -> Function:
        def mask(x_BSH: Tensor, context: LayerContext, operation: str, microbatch: Microbatch) -> object:
            own = f"{operation}/again" if getattr(inside, "again", False) else operation
            return original(x_BSH, context, own, microbatch)

        return mask

    patches.replace(recompute._Recomputed, "backward", backward)
    patches.replace(dropout, "_hidden_mask", hidden_mask)


def _dropout(**degrees: Any) -> Any:
    return tiny(model={"hidden_dropout": 0.1, "attention_dropout": 0.1}, **degrees)


MUTANTS = (
    Mutant(
        "RN02",
        "the initial draw of a shard begins at the shard's first element",
        "pytorch/pytorch#168058",
        plan=lambda: tiny(tp=3, dp=2, sequence_parallel=True),
        breaks=draws_from_the_first_element,
        expected=Expected(WEIGHT, "embedding.tokens.weight", ("permuted",), ("STEP",), ranks=(1, 2, 4, 5), step=0),
    ),
    Mutant(
        "RN03",
        "all data-parallel ranks drop the same elements",
        "volcengine/veScale#52",
        plan=lambda: _dropout(tp=3, dp=2, sequence_parallel=True),
        breaks=counts_samples_of_its_own,
        expected=Expected(ACTIVATION, "embedding.output", ("other values",), ("F",), ranks=(3, 4, 5)),
    ),
    Mutant(
        "RN03-b",
        "all tensor-parallel ranks drop the same probabilities of their heads",
        "volcengine/veScale#52",
        plan=lambda: _dropout(tp=3),
        breaks=counts_heads_of_its_own,
        expected=Expected(ACTIVATION, "layers.0.attention", ("other values",), ("F",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "RN04",
        "ranks that cut sequences drop the same elements of their parts",
        "PaddlePaddle/PaddleFleetX#1005",
        plan=lambda: _dropout(tp=3, dp=2, sequence_parallel=True),
        breaks=counts_tokens_of_its_own,
        expected=Expected(ACTIVATION, "embedding.output", ("other values",), ("F",), ranks=(1, 2)),
    ),
    Mutant(
        "RN05",
        "the first held-out pass switches dropout off for good",
        "NVIDIA/Megatron-LM@7cc8d839e4",
        plan=lambda: _dropout(tp=3),
        breaks=drops_nothing_after_validation,
        expected=Expected(ACTIVATION, "embedding.output", ("other values",), ("F",), ranks=(0, 1, 2), step=2),
    ),
    Mutant(
        "RN05-b",
        "recomputation drops other elements than the forward did",
        "NVIDIA/Megatron-LM@7cc8d839e4",
        plan=lambda: _dropout(tp=2, sections={"recompute": Recompute("full")}),
        breaks=draws_again,
        expected=Expected(RECOMPUTED, "layers.1.mlp.norm", ("other values",), ("B",), ranks=(0, 1)),
    ),
    Mutant(
        "RN07",
        "what depends on a layer's number counts layers from the first of the stage",
        "NVIDIA/Megatron-LM@0504e973d8",
        plan=lambda: _dropout(tp=2, pp=2),
        breaks=counts_layers_of_its_stage,
        expected=Expected(ACTIVATION, "layers.1.attention", ("other values",), ("F",), ranks=(2, 3)),
    ),
)
