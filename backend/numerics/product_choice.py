"""Who makes which product of exact numerics, the library or our kernels: `choose`, once, at the start of a run.

Bits decide, and no clock: whoever starts the run again on such a device chooses the same. A form stays the library's
where one product of several tiles has the bits of each of them, in the plan's shapes. Where it has not, the library
would make every tile by itself; where operands are narrower than fp32, it would widen them. Such forms go to our
kernels, if these keep their promise on the device. All ranks of a run choose together: a form that one of them cannot
leave to the library goes to kernels on all, if all can run them.

What is chosen becomes a part of the plan (`numerics.triton_products`), and so of what ledgers and checkpoints record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ...core.layout.products import PRODUCT_FORMS, ProductChoice, ProductChoices
from ...core.plan.plan import AnyPlan, Plan
from ..base.determinism import make_exact
from ..transport.base import Group
from ..transport.gather_values import gather_values
from .kernel_probe import differences
from .kernel_products import kernel_products, why_no_kernels
from .products import LibraryProducts, Products
from .tile_probe import Sizes, cut_tiles, tile_differences, tiles_join, whole_tiles

KEY = "numerics.triton_products"
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def products_of(plan: Plan, device: torch.device) -> Mapping[str, Products]:
    """Who makes each form, as the plan says. Raises `PlanError` for kernels that cannot run on the device."""
    library, by_kernels = LibraryProducts(), plan.numerics.kernel_forms
    kernels = kernel_products(device, plan.leaf_sizes.gradient_token_block) if by_kernels else library
    return {form: kernels if form in by_kernels else library for form in PRODUCT_FORMS}


def choose(plan: AnyPlan, device: torch.device, world: Group | None = None) -> tuple[AnyPlan, ProductChoices]:
    """The plan with its products chosen, and each choice with its reason; the same on all members of `world`, which
    call it together. A plan in fast numerics has no choice. Raises `PlanError` where the plan says kernels, and the
    device cannot run them."""
    forms = [form for form in PRODUCT_FORMS if any(_has(part, form) for part in plan.parts)]
    if plan.numerics.mode == "fast":
        return plan, {}
    if plan.numerics.triton_products is not None:
        given = plan.numerics.kernel_forms
        if given:
            kernel_products(device, plan.parts[0].leaf_sizes.gradient_token_block)
        return plan, {form: ProductChoice(form in given, f"{KEY} says so") for form in forms}
    if device.type != "cuda":
        return plan, {form: ProductChoice(False, "ranks compute on processors") for form in forms}
    make_exact(device)
    own = {form: _against(plan, form, device) for form in forms}
    choices = agreed([own] if world is None else gather_values(world, own, device))
    chosen = tuple(form for form, choice in choices.items() if choice.kernels)
    numerics = replace(plan.numerics, triton_products=chosen or None)
    return replace(plan, numerics=numerics), choices


Against = Sequence[str]
"""What a rank has against the library, and against kernels, in words; empty where nothing."""


def agreed(of_ranks: Sequence[Mapping[str, Against]]) -> ProductChoices:
    """What follows from what all ranks have measured."""
    found = {}
    for form in of_ranks[0]:
        against_library, against_kernels = (
            next((each[form][side] for each in of_ranks if each[form][side]), "") for side in (0, 1)
        )
        if not against_library:
            found[form] = ProductChoice(False, "several tiles in one product have the bits of each")
        elif against_kernels:
            found[form] = ProductChoice(False, f"{against_kernels}; and yet {against_library}")
        else:
            found[form] = ProductChoice(True, against_library)
    return found


def _has(plan: Plan, form: str) -> bool:
    if form == "experts":
        return plan.model.is_moe
    if form == "heads":
        return plan.model.attention_dropout > 0
    return form != "multiply" or bool(whole_tiles(plan))


def _against(plan: AnyPlan, form: str, device: torch.device) -> tuple[str, str]:
    """`Against` on this device; kernels are asked only where the library is not taken."""
    against_library = next(filter(None, (_against_library(part, form, device) for part in plan.parts)), "")
    if not against_library:
        return "", ""
    return against_library, next(filter(None, (_against_kernels(part, form, device) for part in plan.parts)), "")


def _against_library(plan: Plan, form: str, device: torch.device) -> str:
    if form in ("experts", "heads"):
        each = "expert's rows of a block of tokens" if form == "experts" else "head"
        return f"the library would make a product for each {each}"
    if plan.precision.dtype in NARROW:
        return f"the library would widen {plan.precision.dtype} operands to fp32"
    for like, sizes in sorted(_tiles(plan, form)):
        if tile_differences(like, sizes, device):
            return f"the bits of a tile {sizes} depend on where it lies"
        if not tiles_join(like, sizes, device):
            return f"the library would make each tile by itself: two of {sizes} in one product have other bits"
    return ""


def _tiles(plan: Plan, form: str) -> Iterator[tuple[str, Sizes]]:
    """The tiles of a form, each with the form whose operands lie as its do."""
    for sizes in whole_tiles(plan):
        if form == "multiply":
            yield "project", sizes
            yield "contract", sizes
        elif form == "weight_gradient":
            yield form, sizes
    if form != "multiply":
        yield from ((form, sizes) for sizes in cut_tiles(plan))


def _against_kernels(plan: Plan, form: str, device: torch.device) -> str:
    if why := why_no_kernels(device):
        return why
    dtype = NARROW.get(plan.precision.dtype, torch.float32)
    try:
        products = kernel_products(device, plan.leaf_sizes.gradient_token_block)
        found = differences(products, form, plan, dtype, device)
    except Exception as error:  # whatever a compiler or a driver raises
        return f"our kernel does not run here ({' '.join(str(error).split())[:200]})"
    return f"{found} elements of products by our kernel change with what is next to them" if found else ""
