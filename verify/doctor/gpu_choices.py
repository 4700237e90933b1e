"""Who makes the products of exact numerics on a GPU, form by form, as training chooses at its start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...backend.numerics.product_choice import choose
from ...core.layout.products import ProductChoices
from ...core.plan.plan import Plan
from ...core.plan.sections import Precision
from .checks import Result, Table
from .machine import Machine
from .training import PLAN

SMALL_MODELS = {"tiny-gpt": "32"}
MODELS = {"llama3.2-1b": "2048", "tiny-moe": "64"}
"""Presets, each with a sequence."""


def plans(machine: Machine) -> Iterator[Plan]:
    """In exact numerics, each in fp32 and in bf16."""
    for model, sequence in (SMALL_MODELS if machine.is_small else MODELS).items():
        text = PLAN.replace("tiny-gpt", model).replace("sequence = 32", f"sequence = {sequence}")
        for dtype in ("fp32", "bf16"):
            yield replace(Plan.from_toml(text), precision=Precision(dtype))


def choices(machine: Machine) -> Result:
    """A line for each form of a model in a format, and the same again: a run that starts anew has to choose the same.
    The figure is how many go to our kernels."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows: list[tuple[str | float, ...]] = []
    for plan in plans(machine):
        chosen: ProductChoices = choose(plan, device)[1]
        if (again := choose(plan, device)[1]) != chosen:
            other = [f"{form}: {each} and {again[form]}" for form, each in chosen.items() if again[form] != each]
            return Result("failed", f"{plan.model.name}: chosen otherwise the second time: {'; '.join(other)}"[:400])
        rows += [(plan.model.name, plan.precision.dtype, form, each.by, each.why) for form, each in chosen.items()]
    by_kernels = sum(row[3] == "our kernels" for row in rows)
    table = Table("products of exact training", ("model", "dtype", "form", "made by", "since"), tuple(rows))
    return Result("ok", "", by_kernels, f"of {len(rows)} forms by our kernels", (table,))
