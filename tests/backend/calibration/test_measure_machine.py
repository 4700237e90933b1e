"""`measure_machine` measures every kernel that the simulator's host model asks for. What the seconds
are is no test's business."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof.backend.calibration.cases import COLLECTIVES
from shardproof.backend.calibration.machine import MeasureJob, measure_rank
from shardproof.backend.transport.memory import MemoryWorld
from shardproof.core.commands.probes import PROBES
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Numerics, Precision
from shardproof.simulator.calibrate import calibrated
from shardproof.simulator.simulation.simulate import simulate


@pytest.fixture(scope="module")
def compute():
    return measure_rank(MemoryWorld(1).transport(0), MeasureJob("compute", 1, True, 0.5))


def test_every_case_has_positive_seconds_for_each_size_once(compute):
    assert all(row.seconds > 0 for row in compute)
    keys = [(row.kind, row.name, row.sizes) for row in compute]
    assert len(set(keys)) == len(keys)
    assert {row.name for row in compute if row.kind == "product"} == {"nt", "nn", "tn", "tn_"}


@pytest.mark.parametrize("preset", ["tiny-gpt", "tiny-llama"])
def test_a_simulation_on_what_was_measured_finds_all_its_kernels(preset, compute, workers):
    transfers = workers(2).run(measure_rank, MeasureJob("transfers", 1, True, 0.5))[0]
    turns = {"short", "short_work", "long", "long_work", "work"}
    assert {row.name for row in transfers} == {*COLLECTIVES, "message", "message_work", *turns}
    cluster = calibrated([*compute, *transfers], name="here", num_cores=2, memory_bytes=8e9, when="now")
    model = (
        replace(model_preset(preset), num_heads=4, num_kv_heads=2, head_dim=32)
        if preset == "tiny-llama"
        else model_preset(preset)
    )
    model = replace(model, num_heads=2, num_kv_heads=2, head_dim=32) if preset == "tiny-gpt" else model
    for layout in (Layout(), Layout(pp=2), Layout(tp=2)):
        here, batch = replace(cluster, num_devices=layout.world_size), Batch(4, 1, 64)
        plan = Plan(model, here, layout, batch, precision=Precision("fp32"), numerics=Numerics("fast"))
        assert simulate(plan).report["step_time_s"] > 0


def test_every_probe_is_measured_alone_and_together(workers, compute):
    rows = workers(2).run(measure_rank, MeasureJob("sharing", 1, True, 0.5))[0]
    alone, together = ({(row.name, row.sizes) for row in rows if row.kind == kind} for kind in ("alone", "together"))
    once = {(row.name, row.sizes) for row in compute if row.kind == "step"}
    assert alone == together == once == {(plan.model.name, ()) for plan in PROBES}
