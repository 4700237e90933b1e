"""What routers add to the loss, scaled by the wrong number, and their biases."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ...backend.model import multi_token, router
from ...backend.model.router import Router
from ...core.plan.plan import Plan
from ...core.plan.sections import Precision
from ..ledger.ledger import ACTIVATION_GRADIENT, WEIGHT
from .mutant import Expected, Mutant
from .patches import Function, Patches
from .plans import EXPERTS, tiny

LOSSES_ALONE = {**EXPERTS, "experts_per_token": 1}
"""The normalised weight of one expert is 1 whatever its score, so that losses of routers alone train them."""


def scales_router_losses(patches: Patches, *, factor: float) -> None:
    """The gradients of what routers add to the loss are multiplied once more."""

    def forward(original: Function) -> Function:
        return lambda ctx, weights_BSK, losses_BS, share: original(ctx, weights_BSK, losses_BS, share * factor)

    patches.replace(router._WithLosses, "forward", forward)


def leaves_a_scale_unset(patches: Patches, *, owner: Any) -> None:
    """Losses besides the model's are multiplied by 1, which their scale starts with."""

    def forward(original: Function) -> Function:
        if owner is router._WithLosses:
            return lambda ctx, weights_BSK, losses_BS, share: original(ctx, weights_BSK, losses_BS, 1.0)
        return lambda ctx, losses_BS, weight, *others_BS: original(ctx, losses_BS, 1.0, *others_BS)

    patches.replace(owner, "forward", forward)


def keeps_biases_in_bf16(patches: Patches) -> None:
    """The biases by which experts are balanced are cast with the model."""

    def update_bias(original: Function) -> Function:
        def updated(module: Any, rate: Tensor) -> None:
            original(module, rate)
            module.expert_bias.copy_(module.expert_bias.bfloat16())

        return updated

    patches.replace(Router, "update_bias", update_bias)


def _losses(**degrees: Any) -> Plan:
    return tiny(
        model=LOSSES_ALONE, train={"router_aux_loss": 0.01, "router_z_loss": 1e-3}, samples=6, micro=2, **degrees
    )


MUTANTS = (
    Mutant(
        "MX01",
        "every tensor-parallel rank adds the routers' loss of the same tokens",
        "NVIDIA/Megatron-LM@cac8d1a3f0",
        plan=lambda: _losses(tp=2, ep=2, etp=1),
        breaks=partial(scales_router_losses, factor=2),
        expected=Expected(ACTIVATION_GRADIENT, "layers.1.mlp.router", ("doubled",), ("B",), ranks=(0, 1)),
    ),
    Mutant(
        "MX02",
        "the routers' loss is divided by the number of microbatches, besides by that of tokens",
        "NVIDIA/Megatron-LM@87d9d2506a",
        plan=lambda: _losses(tp=2, ep=2, etp=1),
        breaks=partial(scales_router_losses, factor=1 / 3),
        expected=Expected(ACTIVATION_GRADIENT, "layers.1.mlp.router", ("scaled",), ("B",), ranks=(0, 1)),
    ),
    Mutant(
        "MX04",
        "the routers' loss is scaled by a rank's own tokens in place of all",
        "NVIDIA/Megatron-LM#5047",
        plan=lambda: _losses(tp=3, cp=2, sequence_parallel=True),
        breaks=partial(scales_router_losses, factor=1 / 6),
        expected=Expected(ACTIVATION_GRADIENT, "layers.1.mlp.router", ("scaled",), ("B",), ranks=tuple(range(6))),
    ),
    Mutant(
        "MX05",
        "the routers' loss, which is a mean over a sequence, is divided by the samples of a microbatch",
        "NVIDIA/Megatron-LM#5798",
        plan=lambda: _losses(tp=2, ep=2, etp=1),
        breaks=partial(scales_router_losses, factor=1 / 2),
        expected=Expected(ACTIVATION_GRADIENT, "layers.1.mlp.router", ("scaled",), ("B",), ranks=(0, 1)),
    ),
    Mutant(
        "MX06",
        "the scale of the routers' losses is left at 1 where others are scaled for fp16",
        "NVIDIA/Megatron-LM#4070",
        plan=lambda: replace(_losses(tp=2, ep=2, etp=1), precision=Precision("fp16", loss_scale=16.0)),
        breaks=partial(leaves_a_scale_unset, owner=router._WithLosses),
        expected=Expected(ACTIVATION_GRADIENT, "layers.1.mlp.router", ("scaled",), ("B",), ranks=(0, 1)),
    ),
    Mutant(
        "MX06-b",
        "the weight of the losses of multi-token prediction is left at 1",
        "NVIDIA/Megatron-LM#4070",
        plan=lambda: tiny(tp=3, model={"num_mtp_layers": 1}),
        breaks=partial(leaves_a_scale_unset, owner=multi_token._AddsGradients),
        expected=Expected(ACTIVATION_GRADIENT, "mtp.0.losses", ("scaled",), ("B",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "PR06",
        "the biases that balance experts lie in bf16",
        "NVIDIA/Megatron-LM@8dd03a39cc",
        plan=lambda: tiny(model={**EXPERTS, "expert_bias": True}, tp=2, dp=2, ep=2),
        breaks=keeps_biases_in_bf16,
        expected=Expected(WEIGHT, "layers.0.mlp.router.expert_bias", ("order only",), ("STEP",), ranks=(0, 1, 2, 3)),
    ),
)
