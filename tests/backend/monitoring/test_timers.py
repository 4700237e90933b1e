"""Timers over all ranks, and the rank that holds up the others: one that is really slowed down."""

from __future__ import annotations

import socket
import time

import pytest

from helpers.plans import training_plan
from shardproof import Layout, Trainer
from shardproof.backend.base.observe import Observer
from shardproof.backend.monitoring.stragglers import Stragglers, straggler_line
from shardproof.core.base.metrics import read_metrics
from shardproof.core.plan.log import Log

SLOW, PAUSE_S = 2, 0.2


class Slow(Observer):
    """Holds up its rank in every forward of its first layer."""

    def activation(self, name, microbatch, tokens, tensor_BSH):
        if name == "layers.0.output" and microbatch.step is not None:
            time.sleep(PAUSE_S)


def slowed(global_rank):
    return Slow() if global_rank == SLOW else None


def rows_of(tmp_path, layout, level, observer=None, steps=1, every=1, samples=4):
    file = tmp_path / "run.jsonl"
    plan = training_plan(
        layout, samples=samples, sequence=16, steps=steps, log=Log(file=str(file), timers=level, every=every)
    )
    Trainer(plan, transport="memory", observer=observer).fit()
    return read_metrics(file)


def test_a_slow_rank_is_named_although_its_peers_wait_for_it(tmp_path):
    """Ranks 2 and 3 share their layers: both take long, and one of them only waits."""
    (row,) = rows_of(tmp_path, Layout(dp=2, tp=2, order="tp-cp-ep-dp-pp"), 1, slowed)
    found = row["straggler"]
    assert (found["rank"], found["host"], found["what"]) == (SLOW, socket.gethostname(), "forward of stage 0")
    assert found["own_s"] - found["usual_s"] > 2 * PAUSE_S * 0.9  # of two microbatches
    least, middle, most = row["timers"]["forward"]
    assert least <= middle <= most and most > 2 * PAUSE_S
    assert "timers_by_stage" not in row
    assert straggler_line(found).startswith(f"straggler: rank 2 on {socket.gethostname()}: forward of stage 0 takes ")


def test_levels_and_every(tmp_path):
    rows = rows_of(tmp_path, Layout(pp=2), 2, steps=3, every=2)
    assert ["timers" in row for row in rows] == [False, True, True]
    assert {*rows[1]["timers"]} == {"forward", "backward", "send", "receive", "reduce gradients", "optimizer"}
    by_stage = rows[1]["timers_by_stage"]
    assert by_stage["forward of stage 1"][0] == by_stage["forward of stage 1"][2] > 0  # one rank has it
    forward = [by_stage[f"forward of stage {stage}"][0] for stage in (0, 1)]
    assert rows[1]["timers"]["forward"] == [min(forward), pytest.approx(sum(forward) / 2), max(forward)]
    assert not any("timers" in row for row in rows_of(tmp_path, Layout(), 0))


def test_a_rank_without_peers_is_compared_with_itself():
    looks = Stragglers({0: "first", 1: "last"}, ["a", "b"])
    usual = [{("forward", 0): 1.0}, {("forward", 1): 5.0}]
    assert [looks.find(usual, 6.0) for _ in range(3)] == [None] * 3
    found = looks.find([{("forward", 0): 1.05}, {("forward", 1): 10.0}], 11.0)
    assert found is not None and (found.rank, found.host, found.what) == (1, "b", "forward of stage 1")
    assert (found.own_s, found.usual_s) == (10.0, 5.0)


def test_what_is_small_or_shared_by_all_is_no_straggler():
    looks = Stragglers({0: "same", 1: "same"}, ["a", "b", "c"])
    assert looks.find([{("forward", 0): 2.0}, {("forward", 1): 2.5}, {("forward", 0): 2.4}], 3.0) is None
    assert looks.find([{("optimizer", 0): 0.01}, {("optimizer", 1): 0.02}, {("optimizer", 0): 0.01}], 3.0) is None
    found = looks.find([{("forward", 0): 2.0}, {("forward", 1): 2.0}, {("forward", 0): 4.0}], 4.0)
    assert found is not None and (found.rank, found.host) == (2, "c")
