"""The builder of the plans of tests: what it says of its defaults holds, and a misspelt option is an error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import plan, product_plan, training_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Numerics, Precision
from shardproof.core.plan.train import Train


def test_by_default_it_is_a_tiny_model_of_two_layers_on_one_device_in_exact_fp32():
    found = plan()
    assert found.model == replace(model_preset("tiny-gpt"), num_layers=2)
    assert (found.layout, found.cluster.num_devices, found.batch) == (Layout(), 1, Batch(4, 1, 24))
    assert (found.precision, found.numerics) == (Precision("fp32"), Numerics("exact", 8, 4))
    assert Plan.from_toml(found.to_toml()) == found


def test_layers_devices_samples_and_schedule_follow_the_layout():
    found = plan(Layout(pp=2), vpp=2, dp=3, micro=2)
    assert (found.model.num_layers, found.cluster.num_devices, found.batch.global_size) == (4, 6, 24)
    assert found.schedule.name == "Interleaved1F1B"
    assert plan(model=model_preset("tiny-gpt"), pp=2).model.num_layers == model_preset("tiny-gpt").num_layers


def test_fields_go_to_their_sections_and_change_a_section_that_is_given_whole():
    found = plan(
        tp=2,
        num_heads=8,
        num_kv_heads=8,
        head_dim=8,
        dtype="bf16",
        mode="fast",
        train=Train(steps=9),
        seed=7,
        every=3,
        folder="c",
    )
    assert (found.layout.tp, found.model.num_heads, found.precision.dtype, found.numerics.mode) == (
        2,
        8,
        "bf16",
        "fast",
    )
    assert (found.train, found.checkpoint.every) == (Train(steps=9, seed=7), 3)
    assert (training_plan().optimizer.clip_grad_norm, training_plan(steps=5).train) == (
        0.1,
        Train(steps=5, learning_rate=1e-2),
    )
    assert (product_plan().precision, product_plan(mode="exact").numerics) == (Precision(), Numerics("exact"))


@pytest.mark.parametrize("option", ["num_head", "name", "batch", "jitter"])
def test_an_option_that_no_section_has_is_an_error(option):
    with pytest.raises(TypeError, match=f"no section of a plan has '{option}'"):
        plan(**{option: 1})
