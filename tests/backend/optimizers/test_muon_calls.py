"""The calls in which Muon's matrices come together are those that `core.program.orthogonal` says, on every rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from helpers.plans import plan
from helpers.program import recorded_step
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.parameter_groups import ParameterGroup
from shardproof.core.program import Collective
from shardproof.core.program.orthogonal import AXIS, muon_calls, muon_set_up, owned_matrices
from shardproof.core.schedule.action import Kind

FROZEN = Optimizer("muon", groups=(ParameterGroup("layers.0.*", frozen=True),))


@pytest.mark.parametrize(
    ("layout", "options", "optimizer"),
    [
        pytest.param(Layout(dp=3), {"samples": 3}, Optimizer("muon"), id="dp3"),
        pytest.param(Layout(tp=2, pp=2, zero=1), {"samples": 2}, FROZEN, id="tp2-pp2-frozen"),
        pytest.param(
            Layout(pp=2, dp=2, ep=2, zero=2),
            {"model": "tiny-moe", "samples": 8, "schedule": "DualPipe"},
            Optimizer("muon"),
            id="experts-dualpipe",
        ),
    ],
)
def test_every_rank_calls_what_the_program_says(layout: Layout, options: dict[str, object], optimizer) -> None:
    own = replace(plan(layout, **{"model": "tiny-llama", **options}), optimizer=optimizer)
    num_calls = 0
    for rank, events in enumerate(run_threads(MemoryWorld(own.world_size, timeout_s=60), recorded_step, own)):
        made = [(action, each) for action, each in events if isinstance(each, Collective) and each.axis == AXIS]
        stages = own.placement.stages_of(own.layout.coordinates(rank)["pp"])
        for calls, kind in ((muon_set_up, None), (muon_calls, Kind.STEP)):
            here = Counter(replace(each, sent_bytes=0) for action, each in made if (action and action.kind) == kind)
            assert here == Counter(call for stage in stages for call in calls(own, stage)), (rank, kind)
            num_calls += here.total()
    assert num_calls


def test_the_largest_matrix_goes_first_to_who_has_the_least() -> None:
    flops = {("b", 0): 5, ("a", 0): 5, ("c", 1): 4, ("c", 0): 3, ("d", 0): 1}
    assert owned_matrices(flops, 2) == [[("a", 0), ("c", 1)], [("b", 0), ("c", 0), ("d", 0)]]
    assert owned_matrices({}, 3) == [[], [], []]
