"""Of axes of one degree the one is named that a wrong multiple can come from: by the tensor, by the ranks,
by the other gradients."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from shardproof.core.layout.layout import Layout
from shardproof.core.model.parameters import parameters
from shardproof.verify.causes.axes import likely_axes
from shardproof.verify.ledger.ledger import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GRADIENT,
    SCALAR,
    WEIGHT,
    Key,
)
from shardproof.verify.ledger.relations import Evidence, in_ratio, relate_values
from shardproof.verify.mutations.plans import EXPERTS, tiny

PLAN = tiny(tp=2, dp=2, etp=2, sequence_parallel=True, model=EXPERTS)
ALL = frozenset(each.name for each in parameters(PLAN.model))
WHOLE = frozenset(each.name for each in parameters(PLAN.model) if each.cut is None)
RANKS = (0, 1, 2, 3)


def named(plan, phase, tensor, wrong=RANKS, gradients=frozenset(), sample=None) -> list[str]:
    axes = likely_axes(plan, Key(0, phase, tensor, sample), wrong, range(plan.world_size), gradients)
    return [axis for axis in axes if axis in ("tp", "dp", "etp", "ep", "cp", "pp")]


@pytest.mark.parametrize(
    ("phase", "tensor", "wrong", "gradients", "axes"),
    [
        (GRADIENT, "head.output.weight", RANKS, ALL, ["dp"]),  # tensor parallelism cuts it: no sum over tp
        (GRADIENT, "head.norm.weight", RANKS, ALL, ["dp"]),  # so are those that tp cuts
        (GRADIENT, "head.norm.weight", RANKS, WHOLE, ["tp"]),  # and only those that it does not cut
        (GRADIENT, "head.norm.weight", RANKS, {"head.norm.weight"}, ["tp", "dp"]),  # nothing shows
        # one group of tp is wrong, and the other is right
        (GRADIENT, "head.norm.weight", (0, 1), {"head.norm.weight"}, ["tp"]),
        (GRADIENT, "head.norm.weight", (0, 2), {"head.norm.weight"}, ["dp"]),
        (GRADIENT, "head.norm.weight", (3,), {"head.norm.weight"}, ["tp", "dp"]),  # neither is wrong in whole
        (GRADIENT, "layers.1.mlp.experts.down.weight", RANKS, {"layers.1.mlp.experts.down.weight"}, ["dp"]),
        (ACTIVATION, "layers.0.attention", RANKS, frozenset(), ["tp"]),
        (ACTIVATION, "layers.0.mlp", RANKS, frozenset(), ["etp"]),
        (ACTIVATION_GRADIENT, "head.losses", RANKS, frozenset(), ["tp", "dp"]),
        (SCALAR, "loss", RANKS, frozenset(), ["tp", "dp"]),
        (WEIGHT, "layers.0.attention.qkv.weight", RANKS, frozenset(), ["dp"]),
    ],
)
def test_axes_are_distinguished_as_far_as_the_data_allow(phase, tensor, wrong, gradients, axes) -> None:
    assert named(PLAN, phase, tensor, wrong, frozenset(gradients)) == axes


def test_a_ratio_names_the_axes_that_are_left() -> None:
    assert in_ratio(Fraction(1, 2), Layout(tp=2, dp=2), ("dp",)) == ("scaled", "the right values times 1/2, as dp is")
    assert in_ratio(Fraction(1, 2), Layout(tp=2, dp=2))[1].endswith("as tp or dp or etp is")


@pytest.mark.parametrize(("axes", "axis"), [(("dp",), "dp"), (("tp", "dp"), None), (("cp",), None)])
def test_a_relation_has_the_axis_where_only_one_is_left(axes: tuple[str, ...], axis: str | None) -> None:
    right = np.random.default_rng(1).standard_normal((4, 6), dtype=np.float32)
    evidence = Evidence(layout=Layout(tp=2, dp=2), axes=axes)
    related = relate_values(right, right / 2, (4, 6), ((0, 4), (0, 6)), evidence)
    assert (related.kind, related.axis) == ("scaled", axis)
    zero = relate_values(right, right * 0, (4, 6), ((0, 4), (0, 6)), evidence)
    assert (zero.kind, zero.axis) == ("missing", None)
