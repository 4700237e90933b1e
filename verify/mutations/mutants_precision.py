"""Roundings in the wrong place, a wrong mean, and rows of padding that count."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...backend.model import attention
from ...backend.model.attention_core import AttentionCore
from ...backend.numerics.exact import ExactNumerics
from ...backend.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from ...backend.tensor_parallel.norm import _RmsNorm
from ...backend.tensor_parallel.whole_linear import WholeLinear
from ..ledger.ledger import ACTIVATION, GRADIENT
from .mutant import Expected, Mutant
from .patches import Function, Patches
from .plans import EXPERTS, tiny

if TYPE_CHECKING:
    from torch import Tensor

    from ...backend.numerics.base import Numerics


def reduces_a_narrow_copy(patches: Patches) -> None:
    """What ranks bring to the reduction of gradients are copies in bf16."""

    def reduce_gradients(original: Function) -> Function:
        def reduced(numerics: Numerics, gradients: Any, *over: object) -> object:
            for each in gradients.values():
                for held in each.held:
                    held.copy_(held.bfloat16())
            return original(numerics, gradients, *over)

        return reduced

    patches.replace(ExactNumerics, "reduce_gradients", reduce_gradients)


def does_not_round_rotated(patches: Patches) -> None:
    """Rotated queries and keys go on in fp32 to attention."""
    patches.replace(attention, "rotate", lambda original: lambda x, cos, sin: original(x.float(), cos, sin))

    def forward(original: Function) -> Function:
        return lambda core, q, k, v: original(core, q, k, v.to(q.dtype)).to(v.dtype)

    patches.replace(AttentionCore, "forward", forward)


def rounds_scores(patches: Patches) -> None:
    """What routers compute in fp32 is rounded to bf16, as all other layers' results are."""

    def multiply(original: Function) -> Function:
        def product(layer: Any, x_BSK: Tensor, matrix_KN: Tensor) -> object:
            y_BSN = original(layer, x_BSK, matrix_KN)
            return y_BSN.bfloat16().to(y_BSN.dtype) if layer.fp32 else y_BSN

        return product

    patches.replace(WholeLinear, "multiply", multiply)


def divides_no_mean(patches: Patches) -> None:
    """The mean of squares in a norm is their sum."""

    def forward(original: Function) -> Function:
        def normed(ctx: Any, x_BSH: Any, layer: Any) -> Any:
            ctx.layer, ctx.microbatch = layer, layer.context.microbatch
            rstd = layer.context.numerics.elementwise(
                lambda x: x.rsqrt(), x_BSH.square().sum(-1, keepdim=True) + layer.eps
            )
            ctx.save_for_backward(x_BSH, rstd)
            return (x_BSH * rstd).mul_(layer.weight.operand)

        return normed

    patches.replace(_RmsNorm, "forward", forward)


def counts_padding(patches: Patches) -> None:
    """The rows that fill up the vocabulary take part in the softmax."""

    def init(original: Function) -> Function:
        def made(loss: Any, *given: Any) -> None:
            original(loss, *given)
            loss.trained, loss.held_out = (replace(choice, padding_rows=0) for choice in (loss.trained, loss.held_out))

        return made

    patches.replace(VocabParallelCrossEntropy, "__init__", init)


MUTANTS = (
    Mutant(
        "PR01",
        "gradients are reduced from copies in bf16, not from the sums in fp32",
        "deepspeedai/DeepSpeed#5170",
        plan=lambda: tiny(dp=3, samples=6),
        breaks=reduces_a_narrow_copy,
        expected=Expected(GRADIENT, "head.output.weight", ("order only",), ("REDUCE_GRAD",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "PR03",
        "rotated queries and keys are not rounded to bf16",
        "pytorch/torchtitan#2575",
        plan=lambda: tiny(tp=2, dtype="bf16"),
        breaks=does_not_round_rotated,
        expected=Expected(ACTIVATION, "layers.0.attention", ("order only",), ("F",), ranks=(0, 1)),
    ),
    Mutant(
        "PR03-b",
        "the scores of routers, which should stay in fp32, are rounded to bf16",
        "pytorch/torchtitan#2575",
        plan=lambda: tiny(model=EXPERTS, tp=2, dp=2, ep=2),
        breaks=rounds_scores,
        expected=Expected(ACTIVATION, "layers.0.mlp.router", ("order only",), ("F",), ranks=(0, 1)),
    ),
    Mutant(
        "PR05",
        "a replacement of the mean returns the sum",
        "thinking-machines-lab/batch_invariant_ops#7",
        plan=lambda: tiny(tp=3, model={"hidden_size": 16, "norm_eps": 1e-12}),
        breaks=divides_no_mean,
        expected=Expected(ACTIVATION, "layers.0.attention.norm", ("scaled",), ("F",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "PD01",
        "rows that fill up the vocabulary are not masked out of the softmax",
        "NVIDIA/Megatron-LM megatron/core/tokenizers/utils/build_tokenizer.py",
        plan=lambda: tiny(tp=3, model={"vocab_size": 262, "padding_rows": 3}),
        breaks=counts_padding,
        expected=Expected(ACTIVATION, "head.losses", ("other values",), ("F",), ranks=(0, 1, 2)),
    ),
)
