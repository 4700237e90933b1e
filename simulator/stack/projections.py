"""Products of linear layers that a stack runs one by one where others put their weights together: queries, keys
and values, gate and up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from ...core.model.model import ModelSpec
from ...core.model.operators import Kind, Operator
from ...core.program import Collective, Op, Operations, Product, Role

NOT_REPEATED = (Role.CORE, Role.DOWN, Role.EXPERTS_DOWN, Role.DISPATCH, Role.COMBINE)
"""What selective recomputation by operations leaves out: the core has a switch of its own, and no gradient needs what
the others make."""

SUM_OPERANDS_BYTES = 2
"""A gradient of 16 bits that is read or written."""


def widths(model: ModelSpec, role: Role, width: int) -> tuple[int, ...]:
    """The output features of each product of a layer that has `width` of them together on a rank."""
    if role is Role.QKV:
        unit = width // (model.query_heads_per_group + 2)
        return (width - 2 * unit, unit, unit)
    if role in (Role.UP, Role.SHARED_UP) and model.gated:
        return (width // 2, width - width // 2)
    return (width,)


def separate(
    model: ModelSpec, role: Role, product: Product, of: Literal["forward", "input", "weight"]
) -> tuple[Product, ...]:
    """A product as the stack runs it: forward and weight gradient each with a part of the output features, and as many
    input gradients that are added up."""
    match of:
        case "forward":
            return tuple(replace(product, n=width) for width in widths(model, role, product.n))
        case "input":
            return tuple(replace(product, k=width) for width in widths(model, role, product.k))
        case "weight":
            return tuple(replace(product, m=width) for width in widths(model, role, product.m))


def sum_bytes(product: Product, parts: int, *, compiled: bool, reduced: bool) -> float:
    """Bytes that adding up the input gradients of so many products moves. Compiled it is part of the kernel that
    follows, unless ranks reduce the sum before; otherwise autograd adds one at a time."""
    passes = 3 * (parts - 1) if not compiled else parts + 1 if reduced else parts - 1
    return SUM_OPERANDS_BYTES * passes * product.m * product.n if parts > 1 else 0.0


def second_products(model: ModelSpec, works: tuple[Op, ...]) -> tuple[tuple[Role, Operations], ...]:
    """Role -> what selective recomputation by operations repeats of it: every second product in the order of the
    forward, without the last layer's, whose result no gradient needs (torchtitan,
    distributed/activation_checkpoint.py: `_save_list`, and every second `aten.mm` is not saved), and the gathers of
    tokens, which are not saved; sums over ranks are."""
    found, count = [], 0
    for work in works:
        again: list[Collective | Product] = [
            op for op in work.forward if isinstance(op, Collective) and op.op == "all_gather"
        ]
        for product in (op for op in work.forward if isinstance(op, Product)):
            if work.role is Role.CORE or product.dtype is not None:
                continue
            for part in separate(model, work.role, product, "forward"):
                count += 1
                if count % 2 == 0:
                    again.append(part)
        if again and work.role not in NOT_REPEATED:
            found.append((work.role, tuple(again)))
    return tuple(found)


def second_weights(model: ModelSpec, operators: Iterable[Operator]) -> int:
    """Matrix elements that a token meets in what `second_products` repeats of a layer."""
    total = count = 0
    for operator in operators:
        if operator.kind is not Kind.LINEAR or operator.fp32:
            continue
        for width in widths(model, operator.role, operator.makes.size):
            count += 1
            if count % 2 == 0 and operator.role not in NOT_REPEATED:
                total += operator.takes.size * width * (model.experts_per_token if operator.experts else 1)
    return total
