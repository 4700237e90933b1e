"""What is usable of a device: its parts, who reads it, and runs that were published: those that ran out
of memory must not fit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from helpers.paths import DATA
from helpers.plans import product_plan
from shardproof.benchmarks.published.row import Row
from shardproof.benchmarks.published.validation import predict_row
from shardproof.benchmarks.published.validation.fitting import (
    fitting_table,
    open_fields,
    ran_out_of_memory,
    refused_though_it_ran,
)
from shardproof.core.commands.cli import main
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.machine.variation import Variation
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Offload, Recompute
from shardproof.core.plan.sections import Batch
from shardproof.simulator.memory.capacity import capacities, capacity_of
from shardproof.simulator.memory.reserved import (
    CONTEXT_BYTES,
    HOST_PROCESS_BYTES,
    num_communicators,
    reserved_bytes,
)
from shardproof.simulator.search import remedies
from shardproof.simulator.search.fit import fit
from shardproof.simulator.search.search import search
from shardproof.simulator.simulation.simulate import simulate

GIB, MIB = 2**30, 2**20
ROWS = [Row(json.loads(line)) for line in (DATA / "out_of_memory.jsonl").read_text().splitlines()]


def llama(
    layout: Layout, *, model="llama3-8b", cluster="dgx-h100", profile="megatron-te", micro=1, headroom="0", **more
) -> Plan:
    return product_plan(
        layout,
        model=model_preset(model),
        cluster=replace(cluster_preset(cluster, layout.world_size), headroom=headroom),
        samples=4 * micro * layout.dp * layout.pp,
        micro=micro,
        sequence=8192,
        dtype="bf16"
        if "bf16" in replace(cluster_preset(cluster, layout.world_size), headroom=headroom).peak_flops_per_s
        else "fp16",
        profile=profile,
        **more,
    )


def test_the_parts_of_a_device_sum_to_what_its_runtime_reports():
    plan = llama(Layout(tp=4, pp=2, dp=2), headroom="8%")
    report = fit(plan).report
    assert report["device_bytes"] == round(79.11 * GIB) and report["headroom_bytes"] == int(
        0.08 * report["device_bytes"]
    )
    assert report["reserved_bytes"] == CONTEXT_BYTES == 1_500_000_000
    parts = ("capacity_bytes", "reserved_bytes", "headroom_bytes", "fragmentation_bytes")
    assert sum(report[name] for name in parts) == report["device_bytes"]
    assert report["capacity_bytes"] == int(
        (report["device_bytes"] - report["reserved_bytes"] - report["headroom_bytes"]) / 1.04
    )


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        (Layout(), 0),
        (Layout(dp=8), 1),
        (Layout(tp=2, cp=2), 3),
        (Layout(tp=2, pp=2, dp=2), 3),
        (Layout(tp=2, pp=2, cp=2), 4),
    ],
)
def test_a_communicator_is_counted_for_every_group_of_more_than_one_rank(layout, count):
    assert num_communicators(llama(layout)) == count
    assert reserved_bytes(llama(layout)) == CONTEXT_BYTES + 288 * MIB * max(0, count - 3)


def test_experts_add_their_groups_and_what_ranks_of_a_node_hold_for_each_other():
    plans = [llama(Layout(dp=16, ep=ep), model="mixtral-8x7b") for ep in (1, 2, 8)]
    assert [num_communicators(plan) for plan in plans] == [1, 3, 3]
    assert [reserved_bytes(plan) - CONTEXT_BYTES for plan in plans] == [0, 384 * MIB, 7 * 384 * MIB]
    across = llama(Layout(tp=8, dp=2, ep=2), model="mixtral-8x7b")  # etp 8 fills a node
    assert reserved_bytes(across) == CONTEXT_BYTES


def test_a_rank_on_a_cpu_holds_its_process_and_no_allocator_holds_more_than_tensors():
    capacity = capacity_of(llama(Layout(), cluster="this-host", profile="shardproof"))
    assert (capacity.reserved_bytes, capacity.fragmentation_bytes) == (HOST_PROCESS_BYTES, 0)
    assert capacity.usable_bytes == capacity.device_bytes - HOST_PROCESS_BYTES


def test_a_plan_that_fits_stops_fitting_with_enough_headroom():
    verdicts = [fit(llama(Layout(tp=4, pp=2), headroom=headroom)).fits for headroom in ("0", "8%", "90%")]
    assert verdicts == [True, True, False]


def test_the_smallest_device_of_a_pipeline_rank_counts_and_keeps_the_headroom():
    plan = llama(Layout(pp=2, dp=8), headroom="1GiB", variation=Variation(device_classes={"dgx-a100-40g": "node-1"}))
    first, second = capacities(plan)
    assert (first.device_bytes, second.device_bytes) == (round(79.11 * GIB), round(39.41 * GIB))
    assert first.headroom_bytes == second.headroom_bytes == GIB


def test_simulate_fit_and_search_hold_a_plan_against_the_same_number(capsys):
    plan = llama(Layout(tp=4, pp=2))
    usable = fit(plan).report["capacity_bytes"]
    assert simulate(plan).report["capacity_bytes"] == usable
    found = search(replace(plan, batch=Batch(16, 1, 8192))).plans
    needed, heaviest = max(
        (fit(other).report["peak_memory_bytes"] * 1.04 + reserved_bytes(other), n) for n, other in enumerate(found)
    )
    # enough for the live tensors and the context, not for fragments
    smaller = replace(plan.cluster, device_memory_bytes=needed - MIB)
    limited = search(replace(plan, batch=Batch(16, 1, 8192), cluster=smaller)).plans
    assert limited and all(fit(other).fits for other in limited)
    assert found[heaviest].layout not in [
        other.layout for other in limited if other.recompute == found[heaviest].recompute
    ]
    options = [
        "--model",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--devices",
        "8",
        "--tp",
        "4",
        "--pp",
        "2",
        "--profile",
        "megatron-te",
    ]
    assert main(["simulate", *options]) == 0
    assert f"GiB of {usable / GIB:.3g} GiB" in capsys.readouterr().out


def answer(capsys, *arguments: str) -> tuple[int, dict]:
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("from_file", [True, False], ids=["plan file", "options alone"])
def test_every_remedy_fits_when_it_is_set_and_reports_its_peak_and_step(tmp_path, capsys, monkeypatch, from_file):
    path = tmp_path / "plan.toml"
    path.write_text(
        llama(Layout(tp=4, pp=2, dp=4), model="llama3-70b", micro=2, recompute=Recompute("selective")).to_toml()
    )
    options = [
        "--model",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--devices",
        "8",
        "--tp",
        "4",
        "--zero",
        "1",
        "--micro-batch",
        "4",
    ]
    given = [*([str(path)] if from_file else options), "--headroom", "2%"]
    code, report = answer(capsys, "fit", *given)
    assert code == 1 and report["headroom_bytes"] == int(0.02 * report["device_bytes"]) and report["remedies"]
    for remedy in report["remedies"]:
        settings = [word for text in remedy["set"] for word in ("--set", text)]
        code, changed = answer(capsys, "fit", *given, *settings)
        assert code == 0 and changed["remedies"] == []
        assert changed["peak_memory_bytes"] == remedy["peak_memory_bytes"]
        assert answer(capsys, "simulate", *given, *settings)[1]["step_time_s"] == remedy["step_time_s"]
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["fit", *given]) == 1
    out = capsys.readouterr().out
    assert "it fits with one of these" in out and max(map(len, out.splitlines())) <= 80
    assert all(text in " ".join(out.split()) for remedy in report["remedies"] for text in remedy["set"])


def test_the_first_value_that_is_enough_is_offered_of_every_knob():
    plan = llama(Layout(tp=2, dp=4, zero=1), micro=4)
    offered = [remedy["set"] for remedy in fit(plan).remedies]
    assert ["batch.micro=1"] in offered and not fit(replace(plan, batch=replace(plan.batch, micro_size=2))).fits
    assert ["recompute.mode=full"] in offered and not fit(replace(plan, recompute=Recompute("selective"))).fits
    assert ["layout.tp=8", "layout.dp=1"] in offered and not fit(replace(plan, layout=Layout(tp=4, dp=2, zero=1))).fits


def test_memory_of_the_host_is_offered_with_its_price_and_only_where_there_is_such():
    plan = llama(Layout(tp=2, dp=4), micro=2)
    steps = {tuple(remedy["set"]): remedy["step_time_s"] for remedy in fit(plan).remedies}
    for offload, settings in (
        (Offload(optimizer=1.0, masters=True), ("offload.optimizer=1.0", "offload.masters=true")),
        (Offload(activations=32), ("offload.activations=32",)),
    ):
        assert steps[settings] == simulate(replace(plan, offload=offload)).report["step_time_s"]
    assert not fit(replace(plan, offload=Offload(optimizer=1.0))).fits
    host = replace(plan, cluster=replace(plan.cluster, collective_library="gloo"))
    assert not any(text.startswith("offload") for remedy in fit(host).remedies for text in remedy["set"])


def test_where_nothing_helps_the_hint_and_the_text_say_so(capsys):
    plan = llama(Layout(), model="llama3-70b")
    assert fit(plan).remedies == []
    (finding,) = fit(plan).findings
    assert "use more devices" in finding.hint
    assert finding.rank == 0 and finding.key == "cluster.device_memory_bytes"
    assert finding.where == ", ".join(["rank 0", *([finding.action] if finding.action else [])])
    assert main(["fit", "--model", "llama3-70b", "--cluster", "dgx-h100", "--devices", "1"]) == 1
    assert finding.hint in capsys.readouterr().out


def test_of_a_schedule_of_millions_of_actions_nothing_is_tried_and_that_is_said(monkeypatch):
    monkeypatch.setattr(remedies, "MOST_TRIED_ACTIONS", 1)
    given = fit(llama(Layout(tp=2, dp=4, zero=1), micro=4))
    assert given.remedies == [] and "too long to try" in given.hint


def test_a_plan_that_fits_has_no_remedies_and_one_that_does_not_is_hinted_at_the_first():
    assert fit(llama(Layout(tp=8))).remedies == []
    given = fit(llama(Layout(tp=2, dp=4), model="llama3-8b", micro=4))
    (finding,) = given.findings
    assert all(f"--set {text}" in finding.hint for text in given.remedies[0]["set"])


@pytest.mark.parametrize("row", [row for row in ROWS if row["measured.oom"]], ids=lambda row: row.id)
def test_a_published_run_that_ran_out_of_memory_does_not_fit(row):
    found = predict_row(row)
    assert ran_out_of_memory(found)
    assert found.fits is False or "model.moe.experts is not published" in found.refused


@pytest.mark.parametrize("row", [row for row in ROWS if not row["measured.oom"]], ids=lambda row: row.id)
def test_a_published_run_near_the_limit_fits_unless_its_row_leaves_open_what_it_held(row):
    found = predict_row(row)
    assert found.fits is True or (refused_though_it_ran(found) and "recompute" in open_fields(found))


@pytest.mark.parametrize(
    ("cluster", "allocated_gib", "asked_gib"),
    [
        pytest.param("dgx-2", 30.41, 384 / 1024, id="liucongg/ChatGLM-Finetuning, issue 73"),
        pytest.param("dgx-a100-80g", 76.28, 2.22, id="Lightning-AI/litgpt, tutorials/oom.md"),
        pytest.param("dgx-h100", 73.15, 1.96, id="NVIDIA-NeMo/Automodel, pull request 2673"),
        pytest.param("alps-gh200", 91.40, 224 / 1024, id="Lightning-AI/litgpt, issue 1892"),
        pytest.param("dgx-b200", 172.45, 512 / 1024, id="NVIDIA-NeMo/Megatron-Bridge, pull request 6091"),
    ],
)
def test_live_tensors_with_which_pytorch_ran_out_of_memory_are_above_what_is_usable(cluster, allocated_gib, asked_gib):
    plan = llama(Layout(tp=2, pp=2, dp=2), cluster=cluster, profile="torchtitan")
    assert allocated_gib + asked_gib > capacity_of(plan).usable_bytes / GIB


def test_the_peak_of_a_run_that_nearly_filled_an_h100_is_within_what_is_usable():
    """NVIDIA-NeMo/Speech, issue 14857: 16 devices, tp1 pp2 ep8; max_memory_allocated and max_memory_reserved."""
    capacity = capacity_of(llama(Layout(pp=2, dp=8, ep=8), model="qwen3-30b-a3b"))
    assert capacity.usable_bytes >= 75_893_735_424
    assert capacity.device_bytes - capacity.reserved_bytes >= 79_303_802_880


def test_the_table_counts_what_is_refused_though_it_ran_and_names_what_its_rows_leave_open():
    table = fitting_table([predict_row(row) for row in ROWS])
    assert table.rows[-1][:6] == ("all", "7", "1", "5", "3", "2")
    assert "recompute" in table.rows[-1][6]
    assert fitting_table([predict_row(row) for row in ROWS if row.id.startswith("torchtitan")]).rows == ()


def test_the_headroom_of_a_plan_file_reaches_the_report():
    text = llama(Layout(tp=4, pp=2), headroom="4GiB").to_toml()
    assert 'headroom = "4GiB"' in text
    assert fit(Plan.from_toml(text)).report["headroom_bytes"] == 4 * GIB
