"""Learning rates and weight decay: Megatron's facts, a second writing of its formulas, and what a plan may not say."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.paths import DATA
from shardproof.core.base.errors import PlanError
from shardproof.core.plan.batch_sizes import samples_before
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.rates import Rates
from shardproof.core.plan.sections import Batch
from shardproof.core.plan.train import Train

FACTS = json.loads((DATA / "rate_facts.json").read_text())["facts"]
OURS = {"inverse-square-root": "inverse_sqrt", "WSD": "wsd"}
"""Megatron's names of schedules -> ours, where they differ."""


def facts(area):
    return [
        pytest.param(fact["input"], fact["expected"], id=str(fact["input"])[:60])
        for fact in FACTS
        if fact["area"] == area
    ]


def rates(optimizer, *, peak, steps=1000, batch=None):
    return Rates.of(optimizer, Train(steps, learning_rate=peak), batch or Batch(8, 1, 16))


def optimizer_of(fact):
    schedule = OURS.get(fact["style"], fact["style"])
    own = {"initial_learning_rate": fact["init_lr"], "warmup_steps": fact["warmup"]}
    if schedule != "constant":
        own |= {"minimum_learning_rate": fact["min_lr"], "decay_steps": fact["decay"]}
    if schedule == "wsd":
        own |= {"wsd_decay": fact["wsd_style"], "wsd_decay_steps": fact["wsd_steps"]}
    return Optimizer(schedule=schedule, **own)


@pytest.mark.parametrize("fact, expected", facts("lr_schedule"))
def test_megatron_learning_rates(fact, expected):
    found = rates(optimizer_of(fact), peak=fact["max_lr"])
    assert [found.learning_rate(step) for step in fact["steps"]] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("fact, expected", facts("weight_decay_schedule"))
def test_megatron_weight_decays(fact, expected):
    own = Optimizer(
        weight_decay=fact["start"],
        end_weight_decay=fact["end"],
        weight_decay_schedule=fact["style"],
        weight_decay_steps=fact["incr_steps"],
    )
    found = [rates(own, peak=0.1).weight_decay(step) for step in fact["steps"]]
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("fact, expected", facts("lr_schedule_groups"))
def test_a_group_with_another_peak_has_the_same_schedule_up_to_it(fact, expected):
    own = Optimizer(
        schedule="cosine",
        initial_learning_rate=fact["init_lr"],
        minimum_learning_rate=fact["min_lr"],
        warmup_steps=fact["warmup"],
        decay_steps=fact["decay"],
        weight_decay=0.0,
        end_weight_decay=0.1,
        weight_decay_schedule="linear",
    )
    for group, of_group in zip(fact["groups"], expected, strict=True):
        found = rates(own, peak=group.get("max_lr", fact["max_lr"]))
        assert found.learning_rate(fact["step"]) == pytest.approx(of_group.get("lr", 0.1), rel=1e-12)
        decay = found.weight_decay(fact["step"]) * group.get("wd_mult", 1)
        assert decay == pytest.approx(of_group["weight_decay"], rel=1e-12)


def megatron(style, step, *, first, top, least, warmup, decay, wsd=0, form="linear"):
    """`megatron/core/optimizer_param_scheduler.py::get_lr`, from its description."""
    if warmup > 0 and step <= warmup:
        return first + (top - first) * step / warmup
    if style == "constant":
        return top
    if step > decay:
        return least
    if style == "inverse_sqrt":
        return max(least, top * max(warmup, 1) ** 0.5 / max(step, 1) ** 0.5)
    passed = (step - warmup) / (decay - warmup)
    coefficient = {"linear": lambda: 1 - passed, "cosine": lambda: (math.cos(math.pi * passed) + 1) / 2}.get(style)
    if coefficient is None:
        late = max(0.0, (step - (decay - wsd)) / wsd)
        forms = {
            "linear": 1 - late,
            "cosine": (math.cos(math.pi * late) + 1) / 2,
            "exponential": 2 * 0.5**late - 1,
            "minus_sqrt": 1 - late**0.5,
        }
        return least + forms[form] * (top - least)
    return least + coefficient() * (top - least)


@st.composite
def schedules(draw):
    style = draw(st.sampled_from(("constant", "linear", "cosine", "inverse_sqrt", "wsd")))
    decay = draw(st.integers(2, 2000))
    warmup = draw(st.integers(0, decay - 1))
    top = draw(st.floats(1e-5, 1.0))
    share = st.floats(0, 1)
    return {
        "style": style,
        "decay": decay,
        "warmup": warmup,
        "top": top,
        "first": draw(share) * top if warmup else 0.0,
        "least": draw(share) * top,
        "wsd": draw(st.integers(1, decay)),
        "form": draw(st.sampled_from(("linear", "cosine", "exponential", "minus_sqrt"))),
    }


@given(schedules(), st.data())
@settings(max_examples=300)
def test_every_schedule_is_megatrons(of, data):
    style, own = of["style"], {"initial_learning_rate": of["first"], "warmup_steps": of["warmup"]}
    if style != "constant":
        own |= {"minimum_learning_rate": of["least"], "decay_steps": of["decay"]}
    if style == "wsd":
        own |= {"wsd_decay": of["form"], "wsd_decay_steps": of["wsd"]}
    found = rates(Optimizer(schedule=style, **own), peak=of["top"])
    for step in {0, 1, of["warmup"], of["warmup"] + 1, of["decay"], of["decay"] + 1, data.draw(st.integers(0, 2500))}:
        given = {name: value for name, value in of.items() if name != "style"}
        assert found.learning_rate(step) == pytest.approx(megatron(style, step, **given), rel=1e-12, abs=1e-18)


def test_samples_are_counted_where_the_plan_says_so():
    batch = Batch(8, 1, 16, rampup=(2, 2, 9))
    own = Optimizer(schedule="linear", decay_steps=30, warmup_steps=4, counted_in="samples")
    found = rates(own, peak=1.0, batch=batch)
    expected = [
        megatron("linear", samples_before(batch, step), first=0, top=1, least=0, warmup=4, decay=30)
        for step in range(9)
    ]
    assert [found.learning_rate(step) for step in range(9)] == expected
    assert expected[:4] == [0.0, 0.5, 1.0, 22 / 26]


def test_what_says_no_end_ends_with_the_run():
    by_step, by_sample = Optimizer(schedule="linear"), Optimizer(schedule="linear", counted_in="samples")
    batch = Batch(8, 1, 16, rampup=(2, 2, 9))
    assert [rates(by_step, peak=1.0, steps=4).learning_rate(step) for step in range(6)] == [1, 0.75, 0.5, 0.25, 0, 0]
    ramped = rates(by_sample, peak=1.0, steps=4, batch=batch)
    assert [ramped.learning_rate(step) for step in range(5)] == [1, 1 - 2 / 14, 1 - 4 / 14, 1 - 8 / 14, 0]


def test_a_warm_up_may_be_a_share_of_the_decay():
    own = Optimizer(schedule="constant", warmup_fraction=0.25, decay_steps=10)
    found = [rates(own, peak=1.0).learning_rate(step) for step in range(5)]
    assert found == [0.0, 0.4, 0.8, 1.0, 1.0]


PLAN = Plan.from_toml(
    '[model]\npreset = "gpt2-xl"\n[cluster]\nnum_devices = 1\n[batch]\nglobal = 8\nsequence = 64\n[precision]\n'
    'dtype = "fp32"\n'
)


@pytest.mark.parametrize(
    "own, sentence",
    [
        ({"schedule": "cosine", "minimum_learning_rate": 1.0}, r"minimum_learning_rate=1 is above train.learning_rate"),
        ({"warmup_steps": 2, "initial_learning_rate": 1.0}, r"initial_learning_rate=1 is above train.learning_rate"),
        ({"schedule": "linear", "warmup_steps": 20}, r"warmup_steps=20 is not below the length of the run"),
        ({"schedule": "linear", "warmup_steps": 9, "decay_steps": 9}, r"warmup_steps=9 is not below decay_steps=9"),
        ({"schedule": "wsd", "decay_steps": 9, "wsd_decay_steps": 10}, r"wsd_decay_steps=10 is longer than decay_st"),
        ({"schedule": "wsd"}, r"Set optimizer.wsd_decay_steps"),
        ({"decay_steps": 9}, r"decay_steps=9 has no effect here"),
        ({"wsd_decay": "linear"}, r'wsd_decay="linear" has no effect here'),
        ({"initial_learning_rate": 1e-5}, r"initial_learning_rate=1e-05 has no effect here"),
        ({"warmup_steps": 3, "warmup_fraction": 0.5}, r"both say how long the warm-up is"),
        ({"end_weight_decay": 0.2}, r"end_weight_decay=0.2 has no effect here"),
        ({"weight_decay_schedule": "linear"}, r"Set optimizer.end_weight_decay"),
        ({"weight_decay_schedule": "linear", "end_weight_decay": 0.01}, r"end_weight_decay=0.01 is below weight_decay"),
        ({"counted_in": "samples"}, r'counted_in="samples" has no effect'),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_schedule_that_cannot_be_is_refused_with_what_to_do(own, sentence):
    with pytest.raises(PlanError, match=sentence):
        replace(PLAN, optimizer=Optimizer(**own))


def test_all_problems_of_a_schedule_are_reported_together():
    with pytest.raises(PlanError) as refused:
        replace(PLAN, optimizer=Optimizer(schedule="wsd", warmup_steps=30, minimum_learning_rate=1.0))
    assert len(refused.value.problems) == 3
