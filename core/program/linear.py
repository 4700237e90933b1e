"""Linear layers: cut by output features, cut by input features, or held whole."""

from __future__ import annotations

from typing import Literal

from ..layout.leaves import Leaves
from ..model.roles import Role
from .tensors import Tensors
from .work import LayerWork, Operations, Product


def column(
    tensors: Tensors,
    prefix: str,
    role: Role,
    leaves: Leaves,
    unit: int,
    *,
    in_features: int | None = None,
    num_shared: int = 0,
) -> LayerWork:
    """Output features cut. The input gradient sums over them, hence over ranks; tokens gathered for the forward are
    gathered again for the weight gradient rather than kept (Korthikanti et al. 2022, section 4.2.2).

    `in_features` is the hidden size unless given; `num_shared` more features of each token are gathered with
    the input and its gradient.
    """
    k = tensors.plan.model.hidden_size if in_features is None else in_features
    layer, m, n = role.named(prefix), tensors.tokens, tensors.owned(leaves, unit)
    return LayerWork(
        layer,
        role,
        forward=(*tensors.gather(layer, k + num_shared), Product(layer, m, n, k)),
        input_gradient=(Product(layer, m, k, n), *tensors.reduce(layer, leaves, k + num_shared)),
        weight_gradient=(*tensors.gather(layer, k), Product(layer, n, k, m)),
    )


def row(tensors: Tensors, prefix: str, role: Role, leaves: Leaves, unit: int) -> LayerWork:
    """Input features cut: the forward sums over them, hence over ranks."""
    layer = role.named(prefix)
    m, n, k = tensors.tokens, tensors.plan.model.hidden_size, tensors.owned(leaves, unit)
    return LayerWork(
        layer,
        role,
        forward=(Product(layer, m, n, k), *tensors.reduce(layer, leaves, n)),
        input_gradient=(*tensors.gather(layer, n), Product(layer, m, k, n)),
        weight_gradient=(Product(layer, k, n, m),),
    )


def whole(
    tensors: Tensors,
    prefix: str,
    role: Role,
    out_features: int,
    in_features: int,
    *,
    dtype: Literal["fp32"] | None = None,
    input_dtype: Literal["fp32"] | None = None,
) -> LayerWork:
    """Nothing cut: every rank multiplies the tokens it holds. `dtype` is given where that is not done in the plan's
    precision, `input_dtype` where the input itself is not in it.

    Under sequence parallelism fast numerics leave the gradient to REDUCE_GRAD; exact ones gather the tokens of both
    factors, and every rank computes the whole of it: the blocks of tokens it is made of are longer than those between
    which sequence parallelism cuts.
    """
    layer, m, n, k = role.named(prefix), tensors.own_tokens, out_features, in_features
    gathered: Operations = ()
    if tensors.plan.numerics.mode == "exact":
        gathered = (*tensors.gather(layer, n, dtype), *tensors.gather(layer, k, input_dtype))
    return LayerWork(
        layer,
        role,
        forward=(Product(layer, m, n, k, dtype=dtype),),
        input_gradient=(Product(layer, m, k, n, dtype=dtype),),
        weight_gradient=(*gathered, Product(layer, n, k, tensors.tokens if gathered else m, dtype=dtype)),
    )
