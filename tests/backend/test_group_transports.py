"""Which transport the groups of a plan get, foretold, and as ranks agree on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.plans import training_plan
from shardproof import Layout
from shardproof.backend.group_transports import group_transports
from shardproof.backend.transport.base import Transport
from shardproof.backend.transport.symmetric import heap, membership
from shardproof.backend.transport.symmetric.shared_memory import SharedMemoryGroup
from shardproof.core.plan.communicators import Communicators

LAYOUT = Layout(tp=2, cp=2, pp=2)


def test_ranks_of_one_host_share_memory() -> None:
    found = group_transports(training_plan(LAYOUT, sequence=32), "shm", {})
    assert [str(each) for each in found] == [
        "tp: 4 groups of 2 over shared memory, since all their ranks are on one host",
        "cp: 4 groups of 2 over shared memory, since all their ranks are on one host",
        "dp: 4 groups of 2 over shared memory, since all their ranks are on one host",
        "pp: 4 groups of 2 over shared memory, since all their ranks are on one host",
    ]


@pytest.mark.parametrize(
    ("transport", "expected"),
    [("gloo", ("gloo", "--transport")), ("memory", ("memory", "threads")), ("nccl", ("NCCL", "GPU"))],
)
def test_what_the_user_asks_for_is_said(transport: Any, expected: tuple[str, str]) -> None:
    for each in group_transports(training_plan(LAYOUT, sequence=32), transport, {}):
        assert each.transport == expected[0] and expected[1] in each.why


def test_whether_buffers_are_registered_is_said_of_the_axes_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(training_plan(Layout(dp=2, tp=2)), communicators=Communicators(registered=("dp",)))
    said = {each.axis: each.buffers for each in group_transports(plan, "gloo", {})}
    assert said == {"tp": "", "dp": "its buffers are not registered, since only NCCL does that"}
    monkeypatch.setattr("shardproof.backend.transport.registered.dist.is_nccl_available", lambda: False)
    monkeypatch.delattr("shardproof.backend.transport.registered.dist.ProcessGroupNCCL", raising=False)
    (dp,) = [str(each) for each in group_transports(plan, "nccl", {}) if each.axis == "dp"]
    assert dp.startswith(
        "dp: 2 groups of 2 over NCCL, since each rank has a GPU; its buffers are not registered, since "
    )
    assert "has no NCCL" in dp


def test_groups_too_large_and_other_systems_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    (large,) = group_transports(training_plan(Layout(dp=65), samples=65), "shm", {})
    assert (large.transport, large.why) == ("gloo", "65 members are more than 64")
    monkeypatch.delattr(heap.os, "memfd_create")
    (other,) = group_transports(training_plan(Layout(dp=2)), "shm", {})
    assert (other.transport, other.why) == ("gloo", "the system is not Linux")


def opened_on_several_hosts(transport: Transport, per_host: int) -> dict[str, bool]:
    """Whether the group of this rank shares memory, by axis, where every `per_host` ranks see each other."""
    heap.this_host.cache_clear()
    heap.this_host, real = lambda: f"host {transport.global_rank // per_host}", heap.this_host
    try:
        groups = {
            axis: transport.group(f"{axis}/{members[0]}", axis, members)
            for axis, axes in (("tp", "tp"), ("cp", "cp"), ("dp", "cp-dp"), ("pp", "pp"))
            for members in [LAYOUT.group_of(transport.global_rank, axes)]
        }
        return {axis: isinstance(group, SharedMemoryGroup) for axis, group in groups.items()}
    finally:
        heap.this_host = real


@pytest.mark.skipif(membership.compiled is None, reason="the package was installed without a C compiler")
@pytest.mark.parametrize("per_host", [2, 4])
def test_what_is_foretold_of_several_hosts_is_what_ranks_agree_on(workers: Any, per_host: int) -> None:
    found = workers(LAYOUT.world_size, "shm").run(opened_on_several_hosts, per_host)
    foretold = group_transports(
        training_plan(LAYOUT, sequence=32), "shm", {"LOCAL_WORLD_SIZE": str(per_host), "WORLD_SIZE": "8"}
    )
    assert {each.axis: each.transport == "shared memory" for each in foretold} == found[0]
    assert set(map(str, found)) == {str(found[0])}
    assert not found[0]["pp"] and found[0]["tp"]
