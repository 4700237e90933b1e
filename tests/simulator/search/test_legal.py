"""The rules asked in parts are the rules of a plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from shardproof.core.base.errors import LayoutError
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.rules import broken_rules
from shardproof.core.plan.sections import Batch, Numerics, Precision
from shardproof.simulator.search.legal import Legality

MODELS = {
    "dense": replace(model_preset("llama3-8b"), num_layers=6),
    "experts": replace(model_preset("mixtral-8x7b"), num_layers=4),
    "few positions": replace(model_preset("tiny-gpt"), num_layers=4, max_positions=512),
}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, Optimizer()) for name in MODELS), ("dense", Optimizer(weight_decay_schedule="linear"))],
)
def test_the_first_rule_broken_is_that_of_asking_all_of_them(name, optimizer):
    cluster, numerics = cluster_preset("dgx-h100", 12), Numerics("exact")
    cluster = replace(cluster, devices_per_node=4)
    shared = {"model": MODELS[name], "cluster": cluster, "numerics": numerics, "optimizer": optimizer}
    shared |= {"precision": Precision("fp8")}
    legality, seen = Legality(shared, Batch(30, 1, 1024)), set()
    for tp, pp, vpp, dp, cp, ep in product((1, 3, 16), (1, 2, 4), (1, 3), (1, 4), (1, 3), (1, 4)):
        try:
            layout = Layout(tp=tp, pp=pp, vpp=vpp, dp=dp, cp=cp, ep=ep)
        except LayoutError:
            continue
        of_layout = legality.of_layout(layout)
        for micro in (1, 2, 4, 16):
            batch = Batch(30, micro, 1024)
            broken = broken_rules({**shared, "layout": layout, "batch": batch})
            first = broken[0].rule if broken else None
            assert legality.broken(layout, batch, of_layout) is first
            seen.add(first and first.name)
    assert len(seen) >= 4
