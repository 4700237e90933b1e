"""What families are first ranked by is no more than what any of their plans takes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from shardproof.core.commands.options import SearchSpace
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.runtime import Runtime
from shardproof.core.plan.sections import Batch
from shardproof.simulator.cost.pricing import Pricing
from shardproof.simulator.search.bounds import chain_bounds_s
from shardproof.simulator.search.space import Tally, cuts, families
from shardproof.simulator.search.work_floor import WorkFloors

MODELS = {
    "dense": replace(model_preset("llama3-8b"), num_layers=6),
    "experts": replace(model_preset("mixtral-8x7b"), num_layers=4),
}


@pytest.mark.parametrize(
    ("name", "profile", "overlaps"),
    [("dense", "megatron-te", None), ("experts", "megatron-te", True), ("experts", "shardproof", None)],
)
def test_the_work_that_families_share_bounds_each_of_them(name, profile, overlaps):
    cluster = replace(cluster_preset("dgx-h100", 8), devices_per_node=4)
    runtime = Runtime(profile, ep_comm_overlap=overlaps)
    space = SearchSpace(
        MODELS[name], cluster, Batch(16, 1, 4096), runtime=runtime, pinned={"layout.vpp": 1, "batch.micro": 1}
    )
    shared: dict[object, object] = {}
    floors = WorkFloors(lambda plan: Pricing(plan, shared=shared), lambda plan: None)
    shares = defaultdict(list)
    for family in families(space, Tally()):
        floor_s = floors.bound_s(family)
        for same_cut in cuts(family):
            plan = same_cut[0].plan
            names = [cut.schedule for cut in same_cut]
            shares[plan.recompute.mode] += [
                floor_s / bound_s for bound_s in chain_bounds_s(plan, names, Pricing(plan, shared=shared))
            ]
    assert max(max(each) for each in shares.values()) <= 1
    assert max(shares["none"]) > (0.5 if overlaps else 0.98)  # one rank that nothing is recomputed on does no more
    assert 0.5 < max(shares["full"]) < 0.85
