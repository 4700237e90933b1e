"""Measures what exact numerics assume of the library on this machine, with a plan's own shapes.

The canonical order fixes every sum over ranks, leaves, tokens and samples. What is left to the library must not change
its bits when more of the same is computed with it: a tile product inside of larger tensors, an attention head next to
others, a norm's row among others, an elementwise function on a longer tensor, the optimizer's update of a longer
tensor. Each assumption is a row of `PROBES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.base.findings import Finding
from ...core.model.blocks import model_blocks
from ...core.model.operators import Kind
from ...core.model.parameters import Parameter
from ...core.plan.plan import Plan
from ..optimizers.held import Held
from ..optimizers.sharded import ShardedOptimizer
from .exact import VECTOR_ELEMENTS, ExactNumerics
from .kernel_probe import differences
from .kernel_products import kernel_products
from .tile_probe import TILES, tile_differences, tile_sizes

NormFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Probe:
    """`differing(plan, device)` counts the elements that changed though they should not."""

    name: str
    assumption: str
    hint: str
    differing: Callable[[Plan, torch.device], int]


def probe(plan: Plan, device: torch.device | str = "cpu") -> list[Finding]:
    """One error per assumption that does not hold here; none on the machines and shapes we have measured."""
    device = torch.device(device)
    model, batch = plan.model, plan.batch
    where = f"{device}, sequence {batch.sequence}, hidden {model.hidden_size}, head dim {model.head_dim}"
    findings = []
    for entry in PROBES:
        if count := entry.differing(plan, device):
            what = f"{entry.assumption} does not hold: {count} elements differ."
            findings.append(Finding(entry.name, "error", where, what, entry.hint, key="numerics.mode"))
    return findings


def _random(seed: int, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _dtype(plan: Plan) -> torch.dtype:
    """The format of hidden states, in which attention and elementwise functions run."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(plan.precision.dtype, torch.float32)


def _count(a: Tensor, b: Tensor) -> int:
    return int((a != b).sum())


def _products(plan: Plan, device: torch.device) -> int:
    """The three kinds of tiles of every shape that the model's matrices have."""
    return sum(tile_differences(form, sizes, device) for form in TILES for sizes in tile_sizes(plan))


def _kernel_products(plan: Plan, device: torch.device) -> int:
    """Products by our kernels, of those forms that they make."""
    if not plan.numerics.kernel_forms:
        return 0
    products = kernel_products(device, plan.leaf_sizes.gradient_token_block)
    return sum(differences(products, form, plan, _dtype(plan), device) for form in plan.numerics.kernel_forms)


def _attention(plan: Plan, device: torch.device) -> int:
    """Forward and backward of 2 samples x 3 heads against each (sample, head) alone: one causal call, or the first and
    the last block of queries, in fp32, against the keys up to their ends."""
    model, sequence = plan.model, plan.batch.sequence
    size = min(plan.leaf_sizes.gradient_token_block, sequence)
    dtype = _dtype(plan) if size == sequence else torch.float32
    width = max(model.head_dim, model.value_head_dim)  # zeros fill up whichever is narrower
    q, k, v, gradient = (_random(seed, device, 2, 3, sequence, width).to(dtype) for seed in range(4))
    found = 0
    for start in {0, (sequence - 1) // size * size}:
        end = min(start + size, sequence)
        inputs = q[:, :, start:end].contiguous(), k, v, gradient[:, :, start:end].contiguous()
        whole = _attention_and_gradients(inputs, end)
        for sample, head in ((sample, head) for sample in range(2) for head in range(3)):
            one = _attention_and_gradients([x[sample : sample + 1, head : head + 1].contiguous() for x in inputs], end)
            found += sum(_count(a, b[sample : sample + 1, head : head + 1]) for a, b in zip(one, whole, strict=True))
    return found


def _attention_and_gradients(inputs: Sequence[Tensor], end: int) -> list[Tensor]:
    """Of queries of which the last is token `end` - 1; `inputs` are queries, keys, values and the output's gradient."""
    q, k, v, gradient = inputs
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    if q.shape[2] == k.shape[2]:
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        places = torch.arange(end, device=q.device)
        mask = torch.zeros(q.shape[2], end, device=q.device).masked_fill_(
            places > places[end - q.shape[2] :, None], -torch.inf
        )
        output = F.scaled_dot_product_attention(q, k[:, :, :end], v[:, :, :end], mask)
    return [output.detach(), *torch.autograd.grad(output, [q, k, v], gradient)]


def _norm_rows(plan: Plan, device: torch.device) -> int:
    """Rows of every width that the model norms, of those that a rank has whole."""
    operators = (operator for block in model_blocks(plan.model) for operator in block.operators)
    widths = {operator.makes.size for operator in operators if operator.kind is Kind.NORM and not operator.axis}
    return sum(_norm_rows_of(plan, device, width) for width in sorted(widths))


def _norm_rows_of(plan: Plan, device: torch.device, hidden: int) -> int:
    """Rows of both norms' forwards and input gradients: one sample against three."""
    x, dy = _random(0, device, 3, plan.batch.sequence, hidden), _random(1, device, 3, plan.batch.sequence, hidden)
    weight, bias = _random(2, device, hidden), _random(3, device, hidden)

    def layer_norm(x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        y, mean, rstd = torch.native_layer_norm(x, [hidden], weight, bias, plan.model.norm_eps)
        return y, torch.ops.aten.native_layer_norm_backward(
            dy, x, [hidden], mean, rstd, weight, bias, [True, False, False]
        )[0]

    def row_means(x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        return x.square().mean(-1, keepdim=True), (x * dy).mean(-1, keepdim=True)

    return sum(
        _count(alone, gathered[:1])
        for norm in (layer_norm, row_means)
        for alone, gathered in zip(norm(x[:1].clone(), dy[:1].clone()), norm(x, dy), strict=True)
    )


def _elementwise(plan: Plan, device: torch.device) -> int:
    """Activations, exponentials and roots with their gradients, through `ExactNumerics.elementwise`, on
    slices of odd lengths."""
    numerics = ExactNumerics(plan.leaf_sizes, device)
    x, dy = (_random(seed, device, 40 * VECTOR_ELEMENTS).to(_dtype(plan)) for seed in (0, 1))

    def run(function: NormFunction, x: Tensor, dy: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        y = numerics.elementwise(function, x)
        return [y.detach(), *torch.autograd.grad(y, x, dy)]

    functions: list[NormFunction] = [
        F.silu,
        F.gelu,
        lambda x: F.gelu(x, approximate="tanh"),
        torch.exp,
        lambda x: (x * x + 1).log(),
        lambda x: torch.rsqrt(x * x + 1),
    ]
    return sum(
        _count(part, whole[lo:hi])
        for function in functions
        for lo, hi in ((0, 1), (3, 20), (64, 111), (5, 39 * VECTOR_ELEMENTS))
        for part, whole in zip(run(function, x[lo:hi], dy[lo:hi].clone()), run(function, x, dy), strict=True)
    )


def _optimizer(plan: Plan, device: torch.device) -> int:
    """Two updates of slices of a tensor against those of the whole, and of a matrix stored column by column."""
    weight, gradients = _random(0, device, 37, 129), [_random(seed, device, 37, 129) for seed in (1, 2)]

    def updated(cut: Callable[[Tensor], Tensor]) -> Tensor:
        held = Held(Parameter("weight", (37, 129)), (slice(0, 37), slice(0, 129)), cut(weight.clone()), True)
        optimizer = ShardedOptimizer([held], plan.optimizer.elementwise, 1e-2)
        for gradient in gradients:
            optimizer.step([cut(gradient.clone())], torch.tensor(0.7, dtype=torch.float64))
        return held.tensor

    whole = updated(lambda x: x)
    cuts: list[Callable[[Tensor], Tensor]] = [
        lambda x: x[5:16],
        lambda x: x[:, :7].t().contiguous().t(),
        lambda x: x[-1:],
    ]
    return sum(_count(updated(cut), cut(whole)) for cut in cuts)


_SWITCH = "Start torch with MKL_CBWR=AVX512,STRICT (or AVX2,STRICT) in the environment, as shardproof's launcher does."
_REPORT = "Please report the machine and the torch version; exact mode cannot promise its bits here."

PROBES = (
    Probe("product-alignment", "a tile product does not depend on addresses and strides", _SWITCH, _products),
    Probe(
        "kernel-products",
        "a product by our kernels does not depend on what is multiplied with it",
        'Use numerics.triton_products=["none"]. And please report the device and the version of Triton.',
        _kernel_products,
    ),
    Probe(
        "attention-slices",
        ("attention of one (sample, head) does not depend on the others next to it"),
        _REPORT,
        _attention,
    ),
    Probe("norm-rows", "a row of a norm does not depend on the number of rows", _REPORT, _norm_rows),
    Probe(
        "elementwise-length",
        ("an elementwise function does not depend on the length of its tensor"),
        _REPORT,
        _elementwise,
    ),
    Probe("optimizer-slices", "an elementwise update does not depend on the cut of its tensor", _REPORT, _optimizer),
)
"""Every assumption, with what to do when it fails."""
