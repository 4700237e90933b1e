"""Who makes products of exact numerics: what follows from what ranks have measured, and what is recorded of it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from helpers.plans import product_plan
from shardproof.backend.dry_run import planned_products
from shardproof.backend.numerics.product_choice import agreed, choose, products_of
from shardproof.backend.numerics.products import LibraryProducts
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.products import PRODUCT_FORMS
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan, recorded_numerics
from shardproof.core.plan.sections import Numerics

CPU = torch.device("cpu")
FREE, NEEDS, CANNOT = ("", ""), ("tiles differ", ""), ("tiles differ", "no Triton")
"""Ranks that have nothing against the library, something, and something against kernels too."""

INTERPRETED = """
import torch
from shardproof.backend.numerics.kernel_probe import differences
from shardproof.backend.numerics.kernel_products import kernel_products
from shardproof.backend.numerics.owned_leaves import OwnedLeaves
from shardproof.backend.numerics.products import LibraryProducts
from shardproof.core.layout.leaves import Leaves
from shardproof.core.layout.products import PRODUCT_FORMS
from shardproof.core.plan.plan import Plan

plan = Plan.from_toml('''{plan}''')
device = torch.device("cpu")
kernels, library = kernel_products(device, plan.leaf_sizes.gradient_token_block), LibraryProducts()
found = {{form: differences(kernels, form, plan, torch.bfloat16, device) for form in PRODUCT_FORMS}}
assert not any(found.values()), found

class OwnLeaves(type(kernels)):  # cuts what a rank has into leaves of 5, whatever the others have
    def contract(self, x, weight, leaves, blocks):
        return self._made.contract(x, weight, 5, [(0, -(-len(weight) // 5))])

assert differences(OwnLeaves(kernels._made, 8), "contract", plan, torch.bfloat16, device)
x, weight, leaves = torch.randn(9, 20), torch.randn(12, 20), OwnedLeaves(Leaves(3, 1), 4, 1, 0)
y = torch.randn(9, 12)
for one, other in zip(*(
    (
        made.project(x, weight, leaves, ((0, 9),)),
        made.contract(y, weight, leaves, ((0, 9),)),
        made.multiply(x, weight.t(), ((0, 9),)),
        made.weight_gradient(y[None], x[None], leaves, ((0, 8), (8, 9)))[0],
    )
    for made in (kernels, library)
)):
    assert torch.allclose(one, other, atol=1e-5)
print("right")
"""


def plan_of(**numerics: object) -> Plan:
    plan = product_plan(model=model_preset("tiny-gpt"), samples=2, sequence=16, dtype="fp32", mode="exact")
    return replace(plan, numerics=Numerics("exact", **numerics))  # type: ignore[arg-type]


def test_a_form_goes_to_kernels_where_one_rank_cannot_leave_it_to_the_library_and_all_can_run_them() -> None:
    forms = {"project": (FREE, FREE), "contract": (FREE, NEEDS), "experts": (NEEDS, CANNOT)}
    choices = agreed([{form: ranks[rank] for form, ranks in forms.items()} for rank in range(2)])
    assert {form: (choice.kernels, choice.why) for form, choice in choices.items()} == {
        "project": (False, "several tiles in one product have the bits of each"),
        "contract": (True, "tiles differ"),
        "experts": (False, "no Triton; and yet tiles differ"),
    }


def test_processors_leave_all_to_the_library_and_a_plan_says_otherwise() -> None:
    plan, choices = choose(plan_of(), CPU)
    assert plan == plan_of() and not any(choice.kernels for choice in choices.values())
    assert {type(each) for each in products_of(plan, CPU).values()} == {LibraryProducts}
    assert choose(plan_of(triton_products=()), torch.device("cuda"))[1]["project"].why.endswith("says so")


def test_kernels_that_cannot_run_here_are_refused_with_what_to_do() -> None:
    pytest.importorskip("triton")
    with pytest.raises(PlanError, match="only where TRITON_INTERPRET=1 is set"):
        choose(plan_of(triton_products=("all",)), CPU)


def test_what_is_chosen_is_recorded_and_differs_from_another_choice() -> None:
    library, kernels = (recorded_numerics(plan_of(triton_products=given)) for given in ((), ("contract", "project")))
    assert list(kernels.differences(library)) == [("triton_products", ["project", "contract"], [])]
    assert "triton_products" not in library.to_json()
    assert recorded_numerics(plan_of(triton_products=("all",))).triton_products == PRODUCT_FORMS
    again = type(kernels).from_json(kernels.to_json())
    assert again == kernels and type(kernels).from_json(library.to_json()) == recorded_numerics(plan_of())
    with pytest.raises(ValueError, match=r"the triton_products of its numerics are \['sum'\]"):
        type(kernels).from_json(library.to_json() | {"triton_products": ["sum"]})


def test_a_dry_run_says_who_makes_products() -> None:
    assert planned_products(plan_of(), on_gpus=False).startswith("products: all by the library")
    assert "measures its GPU at the start" in planned_products(plan_of(), on_gpus=True)
    by_both = planned_products(plan_of(triton_products=("contract",)), on_gpus=True)
    assert by_both.startswith("products: by our kernels contract, the others by the library")
    assert planned_products(replace(plan_of(), numerics=Numerics("fast")), on_gpus=True) == ""


def test_kernels_keep_their_promise_in_every_form_and_compute_what_the_library_does() -> None:
    pytest.importorskip("triton")
    script = INTERPRETED.format(plan=plan_of(gradient_token_block=8).to_toml())
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "right\n", done.stderr
