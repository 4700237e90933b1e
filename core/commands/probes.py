"""The training steps that `calibrate` measures besides single kernels, and prices from them: what a step takes
longer than its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..layout.layout import Layout
from ..machine.cluster_presets import cluster_preset
from ..model.model_presets import model_preset
from ..plan.plan import Plan
from ..plan.sections import Batch, Numerics, Precision


def _probe(name: str, preset: str, hidden: int, ffn: int, heads: int, kv_heads: int, batch: Batch) -> Plan:
    model = replace(
        model_preset(preset),
        name=name,
        num_layers=2,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        max_positions=batch.sequence,
    )
    return Plan(
        model, cluster_preset("this-host", 1), Layout(), batch, precision=Precision("fp32"), numerics=Numerics("fast")
    )


PROBE_STEPS = 3
"""Steps of one call: the first finds its weights pushed out of the caches by others, which no
training does to itself."""

PROBES: Sequence[Plan] = (
    _probe("plain-192", "tiny-gpt", 192, 768, 6, 6, Batch(4, 2, 96)),
    _probe("plain-448", "tiny-gpt", 448, 1792, 7, 7, Batch(2, 1, 192)),
    _probe("gated-96", "tiny-llama", 96, 288, 6, 3, Batch(8, 4, 48)),
    _probe("gated-320", "tiny-llama", 320, 960, 10, 5, Batch(2, 1, 160)),
)
"""Steps of one rank: both kinds of layer, each with a narrow and a wide model."""
