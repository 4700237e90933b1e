"""A field that is an option has its default, its type and all that is said of it in one place."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

from shardproof.core.base.bounds import Bound, bound_of
from shardproof.core.base.errors import PlanError
from shardproof.core.base.option import (
    Bounded,
    _Limited,
    _limited,
    limit_complaint,
    noun,
    option,
    option_choices,
    option_types,
)
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster import ClusterSpec
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.runtime import Runtime
from shardproof.core.plan.sections import Batch, Numerics, Precision
from shardproof.core.plan.train import Train


@noun()
class Oven(Bounded, section="oven"):
    """What is baked, and how hot."""

    degrees: int = option("how hot", minimum=50, bound=Bound(400, "steel melts"), read_by="kitchen")
    bread: Literal["rye", "wheat"] = option("what is baked", default="rye", read_by="kitchen")
    spices: tuple[str, ...] = option("what else", default=(), choices=("salt", "caraway"), read_by="kitchen")
    minutes: float | None = option("how long", default=None, kw_only=True, read_by="kitchen")


def test_an_option_without_a_default_must_be_given_and_one_may_need_its_name():
    assert Oven(200) == Oven(degrees=200, bread="rye", spices=(), minutes=None)
    assert Oven(200, minutes=3.0).minutes == 3.0
    with pytest.raises(TypeError, match="degrees"):
        Oven()
    with pytest.raises(TypeError, match="positional"):
        Oven(200, "rye", (), 3.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Oven(200).degrees = 3


def test_what_is_said_of_an_option_stands_at_its_field():
    about = dataclasses.fields(Oven)[0].metadata
    assert dict(about) == {"doc": "how hot", "minimum": 50, "bound": Bound(400, "steel melts"), "read_by": "kitchen"}
    assert option_types(Oven) == {
        "degrees": int,
        "bread": Literal["rye", "wheat"],
        "spices": tuple[str, ...],
        "minutes": float,
    }
    assert option_choices(Oven) == {"bread": ("rye", "wheat"), "spices": ("salt", "caraway")}


def test_a_number_beyond_its_bound_is_refused_with_the_reason_and_its_key():
    with pytest.raises(PlanError, match=r"degrees=500 must be at most 400: steel melts") as caught:
        Oven(500)
    assert [problem.key for problem in caught.value.problems] == ["oven.degrees"]


@pytest.mark.parametrize(
    ("value", "about", "complaint"),
    [
        (1, {"minimum": 1}, ""),
        (0, {"minimum": 1}, "must be at least 1"),
        (0.0, {"above": 0}, "must be above 0"),
        (1.5, {"above": 0, "maximum": 1}, "must be at most 1"),
        ([0.5, 1.0], {"minimum": 0, "below": 1}, "must be below 1"),
        (float("nan"), {"minimum": 0}, "must be at least 0"),
        ("text", {"minimum": 1}, ""),
        (None, {"minimum": 1}, ""),
    ],
)
def test_limits_are_said_in_one_way(value, about, complaint):
    assert limit_complaint(value, about) == complaint


def test_the_degree_of_stages_is_given_by_name_so_that_the_third_of_a_layout_stays_dp():
    assert Layout(2, 2, 4) == Layout(tp=2, pp=2, dp=4)


@pytest.mark.parametrize("field", [each for each in dataclasses.fields(ClusterSpec) if "above" in each.metadata])
def test_a_cluster_made_in_python_has_the_limits_of_its_options(field):
    cluster = cluster_preset("dgx-h100", 8)
    with pytest.raises(PlanError, match=f"{field.name}=0 must be above 0"):
        dataclasses.replace(cluster, **{field.name: 0})


@pytest.mark.parametrize(
    ("make", "sentence", "key"),
    [
        (lambda: Oven(200, "rey"), "bread='rey' is not one of rye, wheat; did you mean 'rye'?", "oven.bread"),
        (lambda: Oven(200, spices=("salt", "x")), "spices='x' is not one of salt, caraway.", "oven.spices"),
        (lambda: Oven(200.5), "degrees=200.5 must be a whole number of at least 50.", "oven.degrees"),
        (lambda: Oven(49), "degrees=49 must be a whole number of at least 50.", "oven.degrees"),
        (lambda: Runtime("xlb"), "is not one of `shardproof presets profiles`; did you mean 'xla'?", "runtime.profile"),
        (lambda: Numerics("exakt"), "mode='exakt' is not one of fast, exact; did you mean 'exact'?", "numerics.mode"),
    ],
)
def test_a_noun_made_in_python_has_the_choices_of_its_options(make, sentence, key):
    with pytest.raises(PlanError) as caught:
        make()
    (problem,) = caught.value.problems
    assert sentence in problem and problem.key == key


def edges(limit: _Limited) -> set[int]:
    """Whole numbers around everything that an option's limits and bound may mean."""
    given = [limit.about.get(name) for name in ("minimum", "maximum", "above", "below")]
    bound = limit.about.get("bound") or bound_of(limit.name, whole=True)
    found = {int(each) for each in (*given, bound.most, bound.least, 0, 1) if each is not None}
    return {number + change for number in found for change in (-1, 0, 1)}


@pytest.mark.parametrize("of", [Oven, Layout, ClusterSpec, ModelSpec, Batch, Numerics, Precision, Runtime, Train])
def test_whole_numbers_that_are_looked_up_are_those_without_a_complaint(of):
    for limit in _limited(of):
        asked = dataclasses.replace(limit, plain=range(0))
        for number in edges(limit):
            assert limit.complaint(number) == asked.complaint(number), (limit.name, number)
        assert not limit.is_whole or any(number in limit.plain for number in edges(limit)), limit.name
