"""Constant batches: Megatron's counts, and an error that names batches that divide."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.paths import DATA
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.microbatches import constant_microbatches

FACTS = json.loads((DATA / "layout_facts.json").read_text())["facts"]


@pytest.mark.parametrize(
    "fact", [fact for fact in FACTS if fact["area"] == "microbatches_constant"], ids=lambda fact: str(fact["input"])
)
def test_megatron_constant_microbatches(fact):
    numbers = fact["input"]
    arguments = (numbers["global_batch"], numbers["micro_batch"], numbers["dp"])
    if fact["expected"] == "AssertionError":
        with pytest.raises(PlanError):
            constant_microbatches(*arguments, decrease_if_needed=numbers["decrease_if_needed"])
    else:
        result = constant_microbatches(*arguments, decrease_if_needed=numbers["decrease_if_needed"])
        assert result.num_microbatches == fact["expected"]["num_microbatches"]
        assert result.running_global == fact["expected"]["running_global"]


@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 8))
def test_the_running_batch_is_the_largest_multiple_that_fits(global_size, micro_size, dp):
    if global_size >= micro_size * dp:
        result = constant_microbatches(global_size, micro_size, dp, decrease_if_needed=True)
        assert (
            result.running_global
            == result.num_microbatches * micro_size * dp
            <= global_size
            < result.running_global + micro_size * dp
        )


def test_a_batch_that_does_not_divide_names_the_nearest_two_that_do():
    with pytest.raises(PlanError, match=r"global=33 is no multiple of micro\*dp=8\*2=16. Use global = 32 or 48"):
        constant_microbatches(33, 8, 2)


def test_a_batch_below_one_microbatch_names_the_smallest_that_works():
    with pytest.raises(PlanError, match="Use global = 16"):
        constant_microbatches(8, 8, 2)
