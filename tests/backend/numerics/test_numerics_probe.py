"""What exact numerics assume of the library holds on this machine, and the probe sees it when it does not."""

from __future__ import annotations

import pytest
import torch

from helpers.plans import product_plan
from shardproof.backend.numerics import probe as probe_module
from shardproof.backend.numerics import tile_probe
from shardproof.backend.numerics.probe import PROBES, probe
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan


def plan_of(name: str, sequence: int) -> Plan:
    return product_plan(model=model_preset(name), samples=2, sequence=sequence, dtype="fp32", mode="exact")


@pytest.mark.parametrize("sequence", [1, 33, 48, 128])
@pytest.mark.parametrize("model", ["tiny-gpt", "tiny-gpt-6h", "tiny-llama"])
def test_every_assumption_holds_here(model, sequence):
    assert probe(plan_of(model, sequence)) == []


def test_a_kernel_that_depends_on_its_neighbours_is_named(monkeypatch):
    kernel = torch.nn.functional.scaled_dot_product_attention
    biased = lambda q, k, v, is_causal: kernel(q, k, v, is_causal=is_causal) + q.shape[1]  # noqa: E731
    monkeypatch.setattr(probe_module.F, "scaled_dot_product_attention", biased)
    (finding,) = probe(plan_of("tiny-gpt", 16))
    assert finding.rule == "attention-slices" and finding.severity == "error"
    # 2 samples x 3 heads x 16 tokens x 16 dims: every output
    assert "does not hold: 1536 elements differ" in finding.what


def test_a_product_whose_bits_depend_on_strides_is_named(monkeypatch):
    multiply_into = tile_probe.multiply_into

    def biased(out, left, right):
        multiply_into(out, left, right)
        out.mul_(out.stride(0))

    monkeypatch.setattr(tile_probe, "multiply_into", biased)
    assert [finding.rule for finding in probe(plan_of("tiny-gpt", 16))] == ["product-alignment"]


def test_elementwise_code_that_depends_on_the_length_is_named(monkeypatch):
    monkeypatch.setattr(probe_module.ExactNumerics, "elementwise", lambda self, function, x: function(x) + x.numel())
    assert [finding.rule for finding in probe(plan_of("tiny-gpt", 16))] == ["elementwise-length"]


def test_probe_names_are_unique_and_each_has_a_hint():
    assert len({entry.name for entry in PROBES}) == len(PROBES)
    assert all(entry.hint.endswith(".") for entry in PROBES)
