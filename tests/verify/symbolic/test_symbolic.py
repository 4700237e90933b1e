"""The symbolic proof: silent on right plans, and every broken schedule found, with the kind of
its fault and its place."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import plan
from shardproof.core.base.divisors import divisors
from shardproof.core.commands.cli import main
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.plan.sections import Batch
from shardproof.core.schedule import CATALOG, lower
from shardproof.core.schedule.action import Action, Kind
from shardproof.core.schedule.schedule import Schedule
from shardproof.verify.symbolic.layers import Program
from shardproof.verify.symbolic.symbolic import ORDER_RULE, VALUE_RULE, SymbolicProof, prove


def plan_of(
    model="tiny-gpt",
    mode="exact",
    *,
    recompute="none",
    micro=1,
    per_copy=4,
    layers=None,
    schedule=None,
    stages=None,
    **degrees,
) -> Plan:
    layout = Layout(stages=stages, **degrees)
    return plan(
        layout,
        model=model,
        num_layers=layers or -(-model_preset(model).num_layers // layout.num_stages) * layout.num_stages,
        samples=per_copy * micro * layout.dp,
        micro=micro,
        recompute=recompute,
        schedule=schedule,
        mode=mode,
        reduction_token_block=None,
    )


def proof_of(plan: Plan, program: Program | None = None) -> SymbolicProof:
    return prove(plan, lower(schedule_for(plan)), program)


def rules(proof: SymbolicProof) -> set[str]:
    return {finding.rule for finding in proof.findings}


RIGHT = [
    pytest.param({"tp": 4}, id="tp4"),
    pytest.param({"model": "tiny-gpt-6h", "tp": 3, "dp": 2}, id="tp3-dp2"),
    pytest.param({"model": "tiny-gpt-6h", "tp": 6}, id="tp6"),
    pytest.param({"model": "tiny-llama", "tp": 2, "pp": 3}, id="llama-tp2-pp3"),
    pytest.param({"tp": 2, "pp": 2, "dp": 3}, id="tp2-pp2-dp3"),
    pytest.param({"pp": 5, "dp": 2}, id="pp5-dp2"),
    pytest.param({"pp": 2, "vpp": 3, "dp": 2}, id="pp2-vpp3-dp2"),
    pytest.param({"model": "tiny-gpt-6h", "tp": 6, "sequence_parallel": True}, id="tp6-sp"),
    pytest.param({"tp": 2, "pp": 2, "dp": 3, "sequence_parallel": True}, id="tp2-pp2-dp3-sp"),
    pytest.param({"tp": 2, "dp": 3, "zero": 1}, id="zero1"),
    pytest.param({"tp": 2, "dp": 3, "zero": 3}, id="zero3"),
    pytest.param({"pp": 4, "stages": "Ett|||ttL", "dp": 2, "zero": 2, "layers": 4}, id="empty-stages"),
    pytest.param({"pp": 3, "vpp": 2, "schedule": "ZBVZeroBubble", "tp": 2}, id="vee"),
    pytest.param({"pp": 4, "schedule": "DualPipe", "dp": 2, "per_copy": 8}, id="dualpipe-dp2"),
]


@pytest.mark.parametrize("choices", RIGHT)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_exact_plans_are_the_same_mathematics_in_the_same_order(choices, recompute):
    proof = proof_of(plan_of(**choices, recompute=recompute))
    assert proof.findings == () and proof.same_order and proof.ok
    assert "same mathematics in the same order" in proof.line


@pytest.mark.parametrize("choices", RIGHT)
def test_fast_plans_are_the_same_mathematics_and_say_where_sums_are_reordered(choices):
    proof = proof_of(plan_of(**choices, mode="fast"))
    assert proof.same_mathematics and proof.ok and rules(proof) == {ORDER_RULE}
    assert {finding.severity for finding in proof.findings} == {"info"}


def test_one_device_and_a_ladder_of_stages_keep_every_order_in_fast_numerics_but_that_of_the_norm():
    assert proof_of(plan_of(mode="fast")).findings == ()
    assert [finding.where for finding in proof_of(plan_of(mode="fast", pp=4)).findings] == [
        ("STEP, grad_norm and 1 more")
    ]


def test_every_builder_of_the_catalog_computes_what_one_device_computes():
    for name, entry in CATALOG.items():
        plan = None
        for vpp in (2, 1) if entry.chunks else (1, 2):
            try:
                plan = plan_of(pp=4, vpp=vpp, schedule=name, per_copy=8)
            except ValueError:
                continue
            break
        assert plan is not None, name
        assert proof_of(plan).findings == (), name


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    model = draw(st.sampled_from(["tiny-gpt", "tiny-gpt-6h", "tiny-llama"]))
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2), (3, 2)]))
    layout = {
        "tp": draw(st.sampled_from(divisors(model_preset(model).num_kv_heads))),
        "pp": pp,
        "vpp": vpp,
        "dp": draw(st.integers(1, 5)),
    }
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    chosen = {
        **layout,
        "zero": draw(st.integers(0, 3)),
        "micro": draw(st.integers(1, 3)),
        "per_copy": draw(st.integers(1, 6)),
    }
    return plan_of(model, "exact", recompute=recompute, **chosen)


@settings(deadline=None, max_examples=25)
@given(plans())
def test_exact_numerics_keep_every_order_in_any_layout(plan: Plan):
    assert proof_of(plan).findings == ()


def with_rows(schedule: Schedule, change) -> Schedule:
    rows = [list(row) for row in schedule.rows()]
    change(rows)
    return Schedule.from_rows("mutant", schedule.placement, rows)


def at(rows, rank, text):
    return rows[rank].index(Action.from_str(text))


def swap(rows, rank, one, other):
    i, j = at(rows, rank, one), at(rows, rank, other)
    rows[rank][i], rows[rank][j] = rows[rank][j], rows[rank][i]


def broken(plan: Plan, change) -> list:
    schedule = with_rows(lower(schedule_for(plan)), change)
    return [finding for finding in prove(plan, schedule).findings if finding.rule == VALUE_RULE]


def test_sends_in_another_order_deliver_to_the_wrong_microbatch():
    plan = plan_of(pp=3, schedule="GPipe", per_copy=3)

    def change(rows):
        i, j = at(rows, 1, "1SEND_F1"), at(rows, 1, "1SEND_F2")
        send = rows[1].pop(i)
        rows[1].insert(j, send)

    first, second, *_ = broken(plan, change)
    assert "2F1" in first.where and first.what == (
        "it gets the output of stage 1 for microbatch 2 instead of the output of stage 1 for microbatch 1."
    )
    assert "2F2" in second.where


def test_receives_in_another_order_are_the_same_fault():
    assert "2F0" in broken(plan_of(pp=3, schedule="GPipe"), lambda rows: swap(rows, 2, "2RECV_F0", "2RECV_F1"))[0].where


def test_a_missing_reduction_of_one_stage_is_found_where_it_is_missing():
    wrong = broken(plan_of(mode="fast", pp=3, dp=2), lambda rows: rows[1].remove(Action(1, Kind.REDUCE_GRAD)))
    assert wrong and all(finding.where.startswith("1REDUCE_GRAD") for finding in wrong)
    assert "never reduced" in wrong[0].what


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_a_gradient_reduced_twice_over_dp_3_is_3_times_too_large(mode):
    def change(rows):
        rows[1].insert(-1, Action(1, Kind.REDUCE_GRAD))

    wrong = broken(plan_of(mode=mode, pp=2, dp=3), change)
    assert wrong and all("1REDUCE_GRAD" in finding.where and "3 times" in finding.what for finding in wrong)


def test_a_reduction_before_the_last_backward_leaves_a_microbatch_out():
    def change(rows):
        rows[1].remove(Action(1, Kind.REDUCE_GRAD))
        rows[1].insert(at(rows, 1, "1B3"), Action(1, Kind.REDUCE_GRAD))

    assert "1REDUCE_GRAD" in broken(plan_of(mode="fast", pp=2, dp=2), change)[0].where


def test_a_missing_and_a_doubled_microbatch_are_counted():
    plan = plan_of(pp=2)
    missing = broken(plan, lambda rows: rows[0].remove(Action(0, Kind.B, 2)))
    assert [finding.what for finding in missing] == [
        ("microbatch 2 is missing from the gradient of stage 0 that STEP applies.")
    ]
    doubled = broken(plan, lambda rows: rows[0].insert(at(rows, 0, "0REDUCE_GRAD"), Action(0, Kind.B, 2)))
    assert [finding.what for finding in doubled] == [
        ("microbatch 2 is 2 times in the gradient of stage 0 that STEP applies.")
    ]


def test_a_backward_after_step_comes_too_late():
    def change(rows):
        rows[0].remove(Action(0, Kind.B, 3))
        rows[0].append(Action(0, Kind.B, 3))

    assert "microbatch 3 is missing from the gradient of stage 0" in broken(plan_of(pp=2), change)[0].what


def test_a_forward_before_its_message_computes_on_nothing():
    def change(rows):
        swap(rows, 1, "1RECV_F0", "1F0")

    assert broken(plan_of(pp=2), change)[0].what == "it never gets the output of stage 0 for microbatch 0."


def test_a_use_of_parameters_that_are_not_gathered_is_found():
    def change(rows):
        rows[0].insert(at(rows, 0, "0F1"), Action(0, Kind.RESHARD))

    assert "parameters are not gathered" in broken(plan_of(pp=2), change)[0].what


def test_microbatches_added_in_another_order_are_another_order_in_fast_numerics_only():
    """Rank 0 of GPipe goes back through its microbatches from the last one; its own messages follow."""
    for mode, expected in (("fast", True), ("exact", False)):
        plan = plan_of(mode=mode, pp=1, schedule="GPipe", per_copy=3)
        rows = [[Action.from_str(text) for text in ["0F0", "0F1", "0F2", "0B2", "0B0", "0B1", "0REDUCE_GRAD", "0STEP"]]]
        proof = prove(plan, Schedule.from_rows("reversed", lower(schedule_for(plan)).placement, rows))
        assert proof.ok and [finding.rule for finding in proof.findings] == [ORDER_RULE] * expected


def test_samples_that_two_copies_see_are_found(monkeypatch):
    plan = plan_of(dp=3)
    monkeypatch.setattr(Plan, "copy_samples", lambda plan, stage, copy: (4 * min(copy, 1), 4 * min(copy, 1) + 4))
    (finding,) = proof_of(plan).findings
    assert finding.what == (
        "its copies see the samples [(0, 4), (4, 8), (4, 8)], which are not every one of 12 samples once."
    )


def test_gpt3_on_1024_ranks_is_proved():
    """Narayanan et al. 2021, table 1: 175 billion parameters, tp=8, pp=16, here with dp=8 and sequence parallelism."""
    layout = Layout(tp=8, pp=16, dp=8, sequence_parallel=True)
    plan = Plan(model_preset("gpt3-175b"), cluster_preset("dgx-a100-80g", 1024), layout, Batch(1536, 1, 2048))
    proof = proof_of(plan)
    assert proof.ok and proof.same_mathematics and proof.num_ranks == 1024
    assert proof.report["num_values"] > 50_000


def verified(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(
        [
            "verify",
            "--model",
            "llama3-8b",
            "--cluster",
            "dgx-h100",
            "--devices",
            "8",
            "--tp",
            "2",
            "--pp",
            "4",
            *arguments,
        ]
    )
    return status, capsys.readouterr().out


def test_verify_says_it_in_one_line_and_lists_reorderings_as_infos_in_json(capsys: pytest.CaptureFixture[str]):
    status, text = verified(capsys, "--global-batch", "8")
    (line,) = [line for line in text.splitlines() if line.startswith("Symbolic proof")]
    assert status == 0 and "8 ranks compared with one device, the same mathematics;" in line
    status, text = verified(capsys, "--global-batch", "8", "--json")
    report = json.loads(text)
    assert (
        status == 0 and report["ok"] and report["symbolic"]["same_mathematics"] and not report["symbolic"]["same_order"]
    )
    assert {(each["rule"], each["severity"]) for each in report["findings"] if each["rule"].startswith("other")} == {
        ("other-order", "info")
    }


def test_verify_of_a_schedule_alone_proves_nothing_about_a_program(tmp_path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0B0,0REDUCE_GRAD,0STEP\n")
    assert main(["verify", str(path)]) == 0
    assert "Symbolic" not in capsys.readouterr().out
