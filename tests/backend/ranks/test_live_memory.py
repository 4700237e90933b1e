"""`LiveMeter` counts every storage once, from its birth to its end, whichever thread makes or frees it."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from shardproof.backend.ranks.live_memory import LiveMeter
from shardproof.backend.trainer import Trainer
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Numerics, Precision
from shardproof.core.plan.train import Train
from shardproof.core.schedule.action import Action, Kind
from shardproof.simulator.search.fit import fit


def test_a_product_and_its_exponential_hold_400_and_4000_bytes_each_while_they_live():
    meter = LiveMeter(0)
    weight = torch.randn(10, 10)
    meter.hold([weight, weight.t()])  # one storage
    assert meter.live_bytes == 400
    with meter.watch():
        x = torch.randn(100, 10)
        y = (x @ weight).exp()
    assert meter.live_bytes == 400 + 4000 + 4000  # the product itself is gone
    assert meter.peak_bytes == 400 + 3 * 4000
    del x, y
    assert meter.live_bytes == 400


def test_views_and_operations_in_place_hold_nothing_more():
    meter = LiveMeter(0)
    with meter.watch():
        x = torch.zeros(1000)
        x.view(10, 100)[3:].mul_(2).add_(1)
    assert (meter.live_bytes, meter.peak_bytes) == (4000, 4000)


def test_what_autograd_keeps_lives_until_the_backward_has_run():
    meter = LiveMeter(0)
    with meter.watch():
        x = torch.ones(250, requires_grad=True)
        y = x.exp().exp().sum()
        assert meter.live_bytes == 3 * 1000 + 4  # both exponentials are kept
        y.backward()
        assert meter.live_bytes == 2 * 1000 + 4  # x and its gradient
        assert meter.peak_bytes > 4 * 1000


def test_a_storage_made_by_a_lane_is_named_after_the_compute_action_and_freed_by_another_thread():
    meter, handed = LiveMeter(3), []

    def lane():
        with meter.watch(), meter.during(Action(0, Kind.RECV_F, 1), compute=False):
            handed.append(torch.zeros(500))

    with meter.during(Action(0, Kind.F, 0), compute=True):
        thread = threading.Thread(target=lane)
        thread.start()
        thread.join()
    assert (meter.live_bytes, meter.peak_action) == (2000, "0F0")
    handed.clear()
    assert meter.live_bytes == 0
    lane()
    lane()
    assert (meter.peak_bytes, meter.peak_action) == (4000, "0RECV_F1")


def test_samples_show_the_most_between_two_of_them_and_what_is_left():
    meter = LiveMeter(2)
    meter.sample(0.0)
    with meter.watch():
        x = torch.zeros(100) + torch.zeros(100)
    meter.sample(1.5)
    taken = [(sample.global_rank, sample.time_s, sample.num_bytes) for sample in meter.samples]
    assert taken == [(2, 0.0, 0), (2, 0.0, 1200), (2, 1.5, 400)]
    assert x.sum() == 0


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=["one-device", "pp2"])
def test_a_trainer_that_is_asked_returns_the_peak_of_every_rank_and_its_action(layout):
    plan = Plan(
        model_preset("tiny-llama"),
        cluster_preset("this-host", layout.world_size),
        layout,
        Batch(4, 1, 32),
        precision=Precision("fp32"),
        numerics=Numerics("fast"),
        train=Train(steps=2),
    )
    result = Trainer(plan, transport="memory", live_memory=True).fit()
    assert [peak.global_rank for peak in result.peak_memory] == list(range(layout.world_size))
    assert result.timeline is not None
    for peak in result.peak_memory:
        samples = [sample.num_bytes for sample in result.timeline.memory if sample.global_rank == peak.global_rank]
        assert max(samples) == peak.num_bytes > min(samples)
        assert Action.from_str(peak.action).kind in (Kind.B, Kind.F, Kind.STEP)
    assert Trainer(plan, transport="memory").fit().peak_memory == ()


@pytest.mark.parametrize("norms", ["qk_norm", "whole_qk_norm"])
def test_norms_of_queries_and_keys_keep_what_is_predicted(norms):
    """Beyond the same model without; statistics and weights, which lie elsewhere at the peak, are below 1%."""

    def peaks(**changes: bool) -> tuple[int, int]:
        plan = Plan(
            replace(model_preset("tiny-llama"), num_layers=4, **changes),
            cluster_preset("this-host", 1),
            Layout(),
            Batch(2, 2, 128),
            precision=Precision("fp32"),
            numerics=Numerics("fast"),
            train=Train(steps=1),
        )
        (measured,) = Trainer(plan, transport="memory", live_memory=True).fit().peak_memory
        return measured.num_bytes, fit(plan).report["per_rank"][0]["peak_memory_bytes"]

    (plain, predicted_plain), (normed, predicted) = peaks(), peaks(**{norms: True})
    assert predicted - predicted_plain > 500_000
    assert normed - plain == pytest.approx(predicted - predicted_plain, rel=0.01)
