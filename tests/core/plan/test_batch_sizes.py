"""Batches that change: Megatron's facts, a walk that counts as it goes, and what a plan may not say."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.paths import DATA
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.layout import Layout
from shardproof.core.layout.microbatches import constant_microbatches
from shardproof.core.plan.batch_sizes import batch_after, batch_at, counted, samples_before, sizes_of
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch

FACTS = json.loads((DATA / "rate_facts.json").read_text())["facts"]


def fact(area):
    return next((each["input"], each["expected"]) for each in FACTS if each["area"] == area)


def test_megatron_step_schedule():
    given, expected = fact("microbatches_step_schedule")
    batch = Batch(6144, given["micro_batch"], 2048, schedule=given["schedule"])
    for consumed, of_consumed in zip(given["consumed_samples"], expected, strict=True):
        size = batch_after(batch, consumed)
        assert size == of_consumed["global_batch"]
        assert size // (given["micro_batch"] * given["dp"]) == of_consumed["num_microbatches"]


def test_a_batch_below_a_microbatch_for_every_rank_is_refused():
    given, _ = fact("microbatches_step_schedule")
    with pytest.raises(PlanError, match=r"batch 256 of schedule=.*: fewer microbatches of micro=1 than dp=512 ranks"):
        plan(6144, dp=given["dp"], sequence=64, schedule=given["schedule"])


def test_megatron_numbers_with_a_suffix():
    given, expected = fact("microbatches_step_parse")
    assert [counted(text) for text in given["values"]] == expected


def test_a_number_with_a_suffix_is_megatrons_product_of_floats():
    """`int(float("4.1") * 1_000_000)`, as its `_parse_numeric_value` has it, of batches too."""
    assert [counted(text) for text in ("4.1M", "2.01k", "8.7T")] == [4099999, 2009, 8699999999999]
    batch = Batch(1200, 1, 16, schedule="0:0.6K 2.01K:1.2k")
    assert [batch_after(batch, consumed) for consumed in (2008, 2009)] == [600, 1200]


def test_megatron_batches_of_held_out_data():
    given, expected = fact("eval_batch_size")
    for size, verdict in zip(given["eval_global_batch"], expected, strict=True):
        if verdict == "ok":
            constant_microbatches(size, given["micro_batch"], given["dp"])
        else:
            with pytest.raises(PlanError):
                constant_microbatches(size, given["micro_batch"], given["dp"])


def test_thresholds_in_tokens_are_floored_to_samples():
    batch = Batch(4, 1, 1024, schedule="0:1, 5K:2 0.01M:4", schedule_unit="tokens")
    assert [batch_after(batch, consumed) for consumed in (0, 3, 4, 8, 9)] == [1, 1, 2, 2, 4]


def megatron_rampup(consumed, *, start, increment, samples, target):
    """Megatron-LM's `RampupBatchsizeNumMicroBatchesCalculator.update` before it was removed, from its description."""
    number = (target - start) // increment
    if consumed > samples or not number:
        return target
    return min(target, start + int(consumed / (samples / number)) * increment) if samples else target


@given(
    st.integers(1, 64), st.integers(1, 64), st.integers(0, 40), st.integers(0, 10**7), st.lists(st.integers(0, 10**7))
)
def test_the_ramp_is_megatrons(start, increment, number, samples, consumed):
    batch = Batch(start + increment * number, 1, 16, rampup=(start, increment, samples))
    for each in {0, samples, samples + 1, *consumed}:
        own = {"start": start, "increment": increment, "samples": samples, "target": batch.global_size}
        assert batch_after(batch, each) == megatron_rampup(each, **own)


def test_a_ramp_is_rounded_as_megatrons():
    """61,383 is 119/748 of 385,836, and divided by a 748th of it in floats it is below 119."""
    batch = Batch(749, 1, 16, rampup=(1, 1, 385836))
    assert [batch_after(batch, consumed) for consumed in (61383, 61384)] == [119, 120]


@st.composite
def batches(draw):
    if draw(st.booleans()):
        start, increment, number = (draw(st.integers(least, 12)) for least in (1, 1, 0))
        return Batch(start + increment * number, 1, 16, rampup=(start, increment, draw(st.integers(0, 300))))
    thresholds = sorted(draw(st.sets(st.integers(1, 300), max_size=6)))
    sizes = [draw(st.integers(1, 40)) for _ in range(len(thresholds) + 1)]
    pairs = " ".join(f"{threshold}:{size}" for threshold, size in zip([0, *thresholds], sizes, strict=True))
    return Batch(sizes[-1], 1, 16, schedule=pairs)


@given(batches())
def test_a_step_begins_where_the_one_before_it_ended(batch):
    consumed = 0
    for step in range(60):
        assert samples_before(batch, step) == consumed
        assert batch_at(batch, step) == batch_after(batch, consumed)
        assert batch_at(batch, step) in sizes_of(batch)
        consumed += batch_at(batch, step)


def test_steps_far_away_cost_nothing():
    batch = Batch(1536, 1, 2048, rampup=(32, 32, 5_000_000))
    assert batch_at(batch, 10**9) == 1536
    assert samples_before(batch, 10**9) == samples_before(batch, 10**9 - 1) + 1536


def plan(size, *, dp=1, sequence=64, micro=1, **batch):
    base = Plan.from_toml(
        f'[model]\npreset = "gpt2-xl"\n[cluster]\npreset = "dgx-h100"\nnum_devices = {dp}\n'
        f"[batch]\nglobal = {8 * dp}\nsequence = {sequence}\n"
    )
    return replace(base, batch=Batch(size, micro, sequence, **batch))


@pytest.mark.parametrize(
    "size, own, sentence",
    [
        (16, {"rampup": (4, 5, 100)}, r"does not reach global=16 from 4 in increments of 5. Use global = 14 or 19"),
        (16, {"rampup": (32, 4, 100)}, r"begins with 32 sequences, more than global=16"),
        (16, {"rampup": (4, 4)}, r"rampup=\[4, 4\] has 2 numbers. Give three"),
        (16, {"rampup": (4, 0, 100)}, r"Use rampup = \[4, 1, 100\]"),
        (2**20, {"rampup": (1, 1, 100)}, r"1,048,576 different batches"),
        (16, {"schedule": "0:8 100:32"}, r"ends with 32 sequences, but global=16. Set batch.global = 32"),
        (16, {"schedule": "10:8 100:16"}, r"does not say what the first step has. Begin it with 0:8"),
        (16, {"schedule": "0:8 100"}, r"'100' is no pair of a threshold and a batch"),
        (16, {"schedule": "0:8 1x:16"}, r"'1x' is no number of samples or tokens"),
        (16, {"schedule": "0:8 64:12 65:16", "schedule_unit": "tokens"}, r"two batches from sample 1 on"),
        (16, {"schedule": "0:0 100:16"}, r"has a batch of 0 sequences"),
        (16, {"schedule": "0:8 9:16", "rampup": (8, 8, 9)}, r"both say how batches grow"),
        (16, {"schedule_unit": "tokens"}, r"about schedule, which is not given"),
    ],
)
def test_batches_that_cannot_be_are_refused_with_what_to_do(size, own, sentence):
    with pytest.raises(PlanError, match=sentence):
        plan(size, **own)


def test_every_size_must_suit_the_layout_and_all_that_do_not_are_named():
    with pytest.raises(PlanError) as refused:
        plan(24, dp=4, micro=2, rampup=(3, 3, 100))
    assert "batches 3, 9, 15, 21 of rampup=[3, 3, 100]: no multiple of micro=2" in str(refused.value)
    assert "batch 6 of rampup=[3, 3, 100]: fewer microbatches of micro=2 than dp=4 ranks" in str(refused.value)


def test_every_size_must_have_its_schedule():
    base = plan(16, dp=2)
    with pytest.raises(PlanError, match=r"batches 5, 7 of schedule='0:5 9:7 20:16': schedule DualPipe gives each"):
        replace(
            base,
            layout=Layout(pp=2),
            schedule=replace(base.schedule, name="DualPipe"),
            batch=Batch(16, 1, 64, schedule="0:5 9:7 20:16"),
        )


def test_experts_over_replicas_must_have_equal_microbatches_at_every_size():
    base = plan(8, dp=2)
    experts = replace(base.model, num_experts=4, experts_per_token=2, expert_ffn_hidden_size=64)
    with pytest.raises(PlanError, match=r"batches 3, 5, 7 of rampup=\[3, 1, 9\]: not equally many microbatches"):
        replace(base, model=experts, layout=Layout(dp=2, ep=2), batch=Batch(8, 1, 64, rampup=(3, 1, 9)))


def test_a_plan_with_a_ramp_comes_back_from_its_text():
    for made in (plan(24, rampup=(8, 8, 100)), plan(24, schedule="0:8 1.5K:24", schedule_unit="tokens")):
        assert Plan.from_toml(made.to_toml()) == made
