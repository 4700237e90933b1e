"""Linear operators on one rank: cut by output features, cut by input features, held whole, or of experts."""

from __future__ import annotations

from typing import Literal

from ..model.operators import Operator, Width
from .tensors import Tensors
from .work import Op, Operations, Product


def linear(tensors: Tensors, operator: Operator, layer: str, *, input_dtype: Literal["fp32"] | None = None) -> Op:
    """What a linear operator computes and sends; `input_dtype` is given where its input is not in the precision of its
    product."""
    if operator.experts:
        return _of_experts(tensors, operator, layer)
    if operator.axis is None:
        return _whole(tensors, operator, layer, input_dtype)
    return (_row if operator.cuts_input else _column)(tensors, operator, layer)


def _column(tensors: Tensors, operator: Operator, layer: str) -> Op:
    """Output features cut. The input gradient sums over them, hence over ranks; tokens gathered for the forward are
    gathered again for the weight gradient rather than kept (Korthikanti et al. 2022, section 4.2.2)."""
    assert operator.axis is not None
    m, n, k, carried = tensors.tokens, tensors.held(operator.makes), operator.takes.size, operator.carries
    leaves = tensors.leaves(operator.axis)
    return Op(
        layer,
        operator.role,
        forward=(*tensors.gather(layer, k + carried), Product(layer, m, n, k)),
        input_gradient=(Product(layer, m, k, n), *tensors.reduce(layer, leaves, k + carried)),
        weight_gradient=(*tensors.gather(layer, k), Product(layer, n, k, m)),
    )


def _row(tensors: Tensors, operator: Operator, layer: str) -> Op:
    """Input features cut: the forward sums over them, hence over ranks."""
    assert operator.axis is not None
    m, n, k = tensors.tokens, operator.makes.size, tensors.held(operator.takes)
    return Op(
        layer,
        operator.role,
        forward=(Product(layer, m, n, k), *tensors.reduce(layer, tensors.leaves(operator.axis), n)),
        input_gradient=(*tensors.gather(layer, n), Product(layer, m, k, n)),
        weight_gradient=(Product(layer, k, n, m),),
    )


def _whole(tensors: Tensors, operator: Operator, layer: str, input_dtype: Literal["fp32"] | None) -> Op:
    """Nothing cut: every rank multiplies the tokens it holds.

    Under sequence parallelism fast numerics leave the gradient to REDUCE_GRAD; exact ones gather the tokens of both
    factors, and every rank computes the whole of it: the blocks of tokens it is made of are longer than those between
    which sequence parallelism cuts.
    """
    m, n, k = tensors.own_tokens, operator.makes.size, operator.takes.size
    dtype: Literal["fp32"] | None = "fp32" if operator.fp32 else None
    gathered: Operations = ()
    if tensors.plan.numerics.mode == "exact":
        gathered = (*tensors.gather(layer, n, dtype), *tensors.gather(layer, k, input_dtype))
    return Op(
        layer,
        operator.role,
        forward=(Product(layer, m, n, k, dtype=dtype),),
        input_gradient=(Product(layer, m, k, n, dtype=dtype),),
        weight_gradient=(*gathered, Product(layer, n, k, tensors.tokens if gathered else m, dtype=dtype)),
    )


def _of_experts(tensors: Tensors, operator: Operator, layer: str) -> Op:
    """One product per local expert, in one kernel, every expert with an equal share of the tokens. Weight gradients
    have the cut features first."""
    model, layout = tensors.plan.model, tensors.plan.layout
    count = model.num_experts // layout.ep
    m = -(-tensors.tokens * model.experts_per_token * layout.expert_tp // (tensors.tp * count))

    def held(width: Width) -> int:
        return tensors.held(width, layout.expert_tp)

    def product(m: int, n: int, k: int) -> Operations:
        return (Product(layer, m, n, k, count, grouped=True),)

    n, k = held(operator.makes), held(operator.takes)
    rows, columns = (k, n) if operator.cuts_input else (n, k)
    return Op(layer, operator.role, product(m, n, k), product(m, k, n), product(rows, columns, m))
