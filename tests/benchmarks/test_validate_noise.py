"""Noise of the data from the data alone, coefficients held at other values, and what `--refit`
finds; rows typed in here."""

from __future__ import annotations

import math

import pytest

from shardproof.benchmarks.published.plans import plan_of
from shardproof.benchmarks.published.row import Row, measured_of, read_rows
from shardproof.benchmarks.published.validation import Prediction, held, predict_row
from shardproof.benchmarks.published.validation.bias import between_publications, bias_tables
from shardproof.benchmarks.published.validation.choices import AnotherDay, Quantiles, another_day
from shardproof.benchmarks.published.validation.noise import (
    Floor,
    across_publications,
    across_stages,
    floor_of,
    host_bound_layers,
    layer_seconds,
    scatter_of_layers,
    sequence_layer_s,
)
from shardproof.benchmarks.published.validation.refit import COEFFICIENTS, is_fitted_to, refit
from shardproof.benchmarks.published.validation.statistics import is_calibration
from shardproof.core.program import Product
from shardproof.simulator.compute import compute
from shardproof.simulator.simulation.simulate import simulate
from shardproof.simulator.stack.profiles import PROFILES, profile_of


def row(
    source="SC21 Narayanan",
    family="sc21_t1",
    *,
    seconds=1.0,
    layers=24,
    hidden=1024,
    micro=2,
    count=8,
    precision="fp16",
    **parallel,
) -> Row:
    cut = {"tp": 1, "pp": 1, "vpp": 1, "dp": 1, "cp": 1, "sp": False, "sharding": "none", **parallel}
    sizes = {
        "layers": layers,
        "hidden": hidden,
        "ffn": 4 * hidden,
        "heads": 16,
        "kv_heads": 16,
        "vocab": 51200,
        "seq": 1024,
    }
    return Row(
        {
            "id": "x",
            "source": source,
            "family": family,
            "kind": "train_step",
            "tier": "A",
            "model": {"name": f"GPT h{hidden} L{layers}", **sizes},
            "hardware": {
                "gpu": "A100-80GB SXM",
                "count": cut["tp"] * cut["pp"] * cut["dp"],
                "inter": "8x200 Gb/s HDR InfiniBand per node",
            },
            "parallel": cut,
            "batch": {"micro": micro, "num_microbatches": count, "global": micro * count * cut["dp"]},
            "precision": precision,
            "recompute": "full",
            "schedule": "1F1B",
            "flags": {"suspect": False},
            "measured": {"step_s": seconds},
        }
    )


def composed(layer_s, *, rest_s=0.010, tp=2, micro=1, hidden=1024) -> list[Row]:
    """Rows as vTrain puts them together: every layer of every microbatch, and what comes once."""
    return [
        row(
            "vTrain (MICRO24)",
            "vtrain_single",
            seconds=rest_s + count * layers * layer_s,
            layers=layers,
            hidden=hidden,
            micro=micro,
            count=count,
            tp=tp,
        )
        for layers in (12, 16)
        for count in (2, 4, 8)
    ]


def test_one_model_in_one_cut_in_two_publications_is_10_percent_apart_whatever_the_replicas():
    rows = [
        row(seconds=1.1, dp=9),
        row("Korthikanti 2022", "korthikanti_t5", seconds=1.0),
        row("Other", "other", seconds=3.0, tp=2),
    ]
    assert across_publications(rows) == [
        Floor(
            "Korthikanti 2022 and SC21 Narayanan",
            "step of one model and cut",
            1,
            pytest.approx(0.1),
            pytest.approx(0.1),
        )
    ]


def test_publications_in_8_and_16_bits_are_not_compared():
    assert across_publications([row(precision="fp8"), row("Korthikanti 2022", precision="bf16")]) == []


def test_a_layer_of_one_sequence_is_a_step_over_m_plus_p_minus_1_stages():
    # 24 layers in 4 stages, 8 microbatches of 2: 11 turns of 6 layers and 2 sequences.
    assert sequence_layer_s(row(seconds=132.0, pp=4)) == pytest.approx(1.0)


def test_equal_work_in_4_and_8_stages_shows_how_far_it_is_apart():
    def seconds(pp, per_layer):
        return per_layer * (8 + pp - 1) * 2 * 24 / pp

    rows = [
        row("vTrain (MICRO24)", "vtrain_multi", seconds=seconds(pp, per), pp=pp, tp=4)
        for pp, per in ((4, 0.010), (8, 0.013))
    ]
    whole, of_tp = across_stages(rows)
    assert (whole.source, of_tp.source, whole.groups) == ("vTrain multi-node", "vTrain multi-node, tp=4", 1)
    assert whole.largest == of_tp.median == pytest.approx(0.3)


def test_layer_times_are_taken_out_of_composed_rows():
    rows = composed(0.003) + composed(0.004, tp=4, micro=2) + composed(0.005, hidden=2048)
    found = layer_seconds(rows)
    assert found == {
        (1024, 2, 1): pytest.approx(0.003),
        (1024, 4, 2): pytest.approx(0.004),
        (2048, 2, 1): pytest.approx(0.005),
    }
    assert host_bound_layers(rows) == [pytest.approx(0.003), pytest.approx(0.004)]
    scatter = scatter_of_layers(rows)
    assert (scatter.groups, scatter.median, scatter.largest) == (2, pytest.approx(0.5 / 3.5), pytest.approx(1 / 3))


def test_a_choice_by_times_that_scatter_costs_something_and_by_times_that_do_not_nothing():
    still, scattered = (composed(0.003) + composed(layer_s, micro=2) for layer_s in (0.003, 0.0045))
    nothing = another_day(still)
    assert (nothing.mean, nothing.worst) == (Quantiles(0.0, 0.0, 0.0), Quantiles(0.0, 0.0, 0.0))
    day = another_day(scattered)
    assert day.mean.low == 0.0 < day.mean.high <= day.worst.high < 0.5
    assert day.met.low < nothing.met.low == day.met.high
    assert another_day(scattered) == day
    assert another_day([row()]) is None


def test_choices_are_explained_by_noise_when_those_of_another_day_are_as_bad():
    day = AnotherDay(mean=Quantiles(0.01, 0.04, 0.09), worst=Quantiles(0.1, 0.3, 0.4), met=Quantiles(2.0, 3.0, 4.0))
    assert day.explains([0.0, 0.02, 0.2])
    assert not day.explains([0.0, 0.0, 0.45])  # worse than the worst group of other days
    assert not day.explains([0.01, 0.1, 0.1])  # one group met, on other days two
    assert not day.explains([0.0, 0.0, 0.28])  # a mean of 9.3%


def test_a_source_without_repetitions_is_held_to_what_publications_differ_by():
    rows = [row(seconds=1.1), row("Korthikanti 2022", "korthikanti_t5", seconds=1.0)]
    alone = [row("SimuMax B200 (MooreThreads)", "simumax_x", tp=8, layers=layers) for layers in (24, 48)]
    assert between_publications([*rows, *alone]).median == pytest.approx(0.1)
    predictions = [Prediction(one, measured_of(one), predicted_s=1.05) for one in alone]
    sources, _, series = bias_tables([*rows, *alone], predictions)
    assert [cells[2:] for cells in sources.rows] == [
        ("+5.0%", "+5.0%", ("10.0% (step of one model and cut)"), "within noise")
    ]
    assert [cells[3:] for cells in series.rows] == [("+5.0%", "+5.0%", "not known", "no")]


def test_no_coefficient_is_fitted_to_vtrains_rows_of_several_nodes():
    assert not is_fitted_to(row("vTrain (MICRO24)", "vtrain_multi"))
    assert is_fitted_to(row("vTrain (MICRO24)", "vtrain_single")) and is_fitted_to(
        row("Korthikanti 2022", "korthikanti_t5")
    )


def test_a_source_is_held_to_its_own_repetitions_before_those_it_shares():
    own, shared, other = (
        Floor("A", "", 1, 0.02, 0.02),
        Floor("A and B", "", 1, 0.1, 0.1),
        Floor("vTrain multi-node", "", 1, 0.05, 0.05),
    )
    assert floor_of([own, shared, other], "A", "a") == own
    assert floor_of([own, shared, other], "B", "b") == shared
    assert floor_of([own, shared, other], "vTrain (MICRO24)", "vtrain_multi") == other
    assert floor_of([own, shared], "C", "c") is None


def test_composed_rows_that_share_a_layer_time_fall_into_one_half():
    rows = [one for layers in (0.003, 0.004) for one in composed(layers)]
    assert len({one.setting_key for one in rows}) == 1 and len({is_calibration(one) for one in rows}) == 1


@pytest.mark.parametrize(("name", "value"), [("engine_share", 0.3), ("host_calls", 20.0)])
def test_a_stack_is_held_at_another_value_and_comes_back(name, value):
    plan = plan_of(row(hidden=4096 if name == "engine_share" else 1024)).plan  # the smaller is bound by its host
    before = simulate(plan).report["step_time_s"]
    today, hold = getattr(held, name)()
    assert today(plan) == getattr(PROFILES["megatron-2021"], name)
    with hold(plan, value) as changed:
        assert getattr(profile_of(changed), name) == value
        assert simulate(changed).report["step_time_s"] > before * 1.1
    assert getattr(profile_of(plan), name) == today(plan) != value
    assert simulate(plan).report["step_time_s"] == before


def test_alignment_is_held_at_another_value_and_comes_back():
    plan = plan_of(row(hidden=1000)).plan  # rows of 1,000 elements begin at multiples of 8
    before, shares = simulate(plan).report["step_time_s"], compute.ALIGNED_SHARES
    today, hold = held.aligned(3)
    assert today(plan) == compute.ALIGNED_AT_16_BYTES
    with hold(plan, 0.3):
        assert compute.ALIGNED_SHARES[3] == 0.3 and compute.ALIGNED_SHARES[0] == shares[0]
    assert compute.ALIGNED_SHARES is shares and simulate(plan).report["step_time_s"] == before


def test_device_fields_are_held_up_to_1_in_a_format_of_their_own():
    plan = plan_of(row()).plan
    today, hold = held.device_field("sustained_share", "fp8")
    assert today(plan) == plan.cluster.sustained_share
    with hold(plan, 1.2) as changed:
        assert (
            changed.cluster.sustained_share_by_dtype["fp8"] == 1.0
            and changed.cluster.sustained_share == plan.cluster.sustained_share
        )


def test_aligned_shares_are_straight_between_two_fitted_ones_and_the_whole():
    assert compute.aligned_shares(0.4, 0.7) == pytest.approx((0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0))
    whole, odd = (
        compute.product_s(plan_of(row()).plan.cluster, "fp16", Product("", 8192, n, 8192)) for n in (8192, 8191)
    )
    assert odd / whole == pytest.approx(1 / compute.ALIGNED_AT_2_BYTES, rel=0.15)


def test_refit_finds_the_share_that_made_the_data():
    coefficient = next(one for one in COEFFICIENTS if one.name == "A100, megatron-2021" and one.field == "engine_share")
    rows = []
    for layers in range(8, 40, 4):
        seconds = predict_row(row(layers=layers, micro=8, count=4)).predicted_s
        rows.append(row(layers=layers, micro=8, count=4, seconds=seconds * 1.05 / 1.0))
    (fit,) = [one for one in refit(rows) if one.coefficient == coefficient]
    assert fit.count == fit.rows == sum(map(is_calibration, rows)) >= 2
    assert fit.fitted - fit.value == pytest.approx(0.05 * (1 + fit.value), abs=0.011)
    assert fit.fitted_error < 0.01 < fit.error == pytest.approx(math.log(1.05))


def test_published_noise_is_what_the_causes_say():
    rows = [one for one in read_rows() if one["kind"] == "train_step"]
    floors = {floor.source: floor for floor in (*across_publications(rows), *across_stages(rows))}
    assert floors["Korthikanti 2022 and SC21 Narayanan"].median == pytest.approx(0.103, abs=0.001)
    assert floors["SC21 Narayanan and vTrain (MICRO24)"].median == pytest.approx(0.065, abs=0.001)
    assert [round(floors[f"vTrain multi-node, tp={tp}"].largest, 2) for tp in (2, 4, 8)] == [0.34, 0.31, 0.10]
    assert len(layer_seconds(rows)) == 24
