"""A gradient next to that of formulas, part by part: what backward computes apart from each other may be wrong alone,
and so it is held alone. numpy only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.plan.plan import Plan
from .adamw import UNIT

OFF = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 0.1}
"""The share of its norm that a gradient may be apart from that of formulas."""

ROUNDINGS = {"fp32": 4000.0, "fp16": 8.0, "bf16": 16.0}
"""So many times as far as rounding moves the gradient of formulas may a gradient be apart from it, if that is more. It
is where little but rounding is left of it, as of that of keys' biases without rotary positions, which move all scores
of a query by as much; in fp32 the exponentials of the library, right to 20 bits, are rounded more than here. Right runs
of the matrix's models use at most 0.01 of what both allow in fp32, 0.18 in fp16 and, in bf16, 0.63: latent attention's
rotary keys with five heads, whose gradient is nearly zero (2026-11-27; 0.26 of half as much before)."""


@dataclass(frozen=True)
class Measured:
    """A part (in words, "" all of it) of a parameter's gradient, along that of formulas: `found`, the norm of the
    latter, is how fast the loss changes on that way; `said` is how fast the gradient says it does; `apart` is the norm
    of their difference, and `rounding` how far rounding moves the gradient of formulas."""

    name: str
    part: str
    said: float
    found: float
    apart: float
    rounding: float

    @property
    def words(self) -> str:
        """The parameter and the part."""
        return f"{self.name}{' of ' * bool(self.part)}{self.part}"

    def allowed(self, plan: Plan, usual: float) -> float:
        """How far the two may be apart, where gradients are of a `usual` size."""
        rounded_once = 2.0**-8 if plan.precision.gradient_dtype == "bf16" else 0.0
        return max(
            (OFF[plan.precision.dtype] + rounded_once) * self.found,
            ROUNDINGS[plan.precision.dtype] * self.rounding,
            UNIT * usual,
        )


def whole(parts: Sequence[Measured]) -> Measured:
    """A parameter from all of its parts."""
    found, apart, rounding = (
        math.hypot(*(getattr(each, name) for each in parts)) for name in ("found", "apart", "rounding")
    )
    said = math.fsum(each.said * each.found for each in parts) / found if found else 0.0
    return Measured(parts[0].name, "", said, found, apart, rounding)


def usual_size(measured: Sequence[Measured]) -> float:
    """The root mean square of the parts' norms."""
    return math.sqrt(math.fsum(each.found**2 for each in measured) / len(measured)) if measured else 0.0


def measure(plan: Plan, name: str, gradient: np.ndarray, right: np.ndarray, rounded: np.ndarray) -> Iterator[Measured]:
    """The parts of a parameter's gradient next to those of formulas, of which `rounded` is what rounding left."""
    for words, index in parts_of(plan, name, right.shape):
        own, of_formulas = gradient[index], right[index]
        norm = float(np.linalg.norm(of_formulas))
        said = float((own * of_formulas).sum()) / norm if norm else 0.0
        apart, rounding = (float(np.linalg.norm(each - of_formulas)) for each in (own, rounded[index]))
        yield Measured(name, words, said, norm, apart, rounding)


def parts_of(plan: Plan, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """The parts of a parameter, in words and as an index: experts, and in them and elsewhere what is fused by rows."""
    if ".experts." not in name:
        yield from _fused(plan, name, shape[0]).items()
        return
    for expert in range(shape[0]):
        for words, rows in _fused(plan, name, shape[1]).items():
            yield f"{words}{' of ' * bool(words)}expert {expert}", (expert, rows)


def _fused(plan: Plan, name: str, num_rows: int) -> dict[str, Any]:
    """Rows of a linear layer by what they compute (`core.model.parameters`)."""
    model, rows = plan.model, np.arange(num_rows)

    def along(unit: int, **ends: int) -> dict[str, Any]:
        """Rows whose place in units of so many is below the end of a part, and not below the one before it."""
        found, first = {}, 0
        for words, end in ends.items():
            found[words], first = np.flatnonzero((rows % unit >= first) & (rows % unit < end)), end
        return found

    match name.split(".")[-2]:
        case "qkv":
            size, queries = model.head_dim, model.query_heads_per_group
            return along(
                (queries + 2) * size, queries=queries * size, keys=(queries + 1) * size, values=(queries + 2) * size
            )
        case "kv_up":
            plain = model.qk_nope_head_dim
            return along(plain + model.v_head_dim, keys=plain, values=plain + model.v_head_dim)
        case "q" | "q_up":
            return along(model.head_dim, plain=model.qk_nope_head_dim, rotary=model.head_dim)
        case "kv_down":
            return along(num_rows, latent=model.kv_lora_rank, rotary=num_rows)
        case "up" if model.gated:
            return along(2, gates=1, units=2)
        case _:
            return {"": slice(None)}
