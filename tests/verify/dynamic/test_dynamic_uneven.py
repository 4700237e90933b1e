"""A batch that data-parallel ranks cannot share evenly: later ranks run one microbatch less, and no bit
differs from one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import shardproof.backend.unsupported as unsupported_module
from helpers.gates import sampled
from helpers.plans import training_plan
from shardproof.backend.unsupported import unsupported
from shardproof.core.base.errors import PlanError
from shardproof.core.commands.cli import main
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.plan.sections import ScheduleChoice
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.symbolic.static import prove_schedule


def tiny(layout: Layout, samples: int, *, micro: int = 1, schedule: str = "1F1B", model: str = "tiny-gpt") -> Plan:
    """Clipping is active; a sequence of 16 has four blocks of tokens."""
    return training_plan(
        layout, model=model, samples=samples, micro=micro, sequence=16, schedule=schedule, gradient_token_block=4
    )


@sampled(
    ("plan", "samples"),
    [
        pytest.param(tiny(Layout(dp=3), 7), [(0, 3), (3, 5), (5, 7)], id="dp3-of-7"),
        pytest.param(
            tiny(Layout(tp=2, dp=2), 10, micro=2, model="tiny-llama"), [(0, 6), (6, 10)], id="tp2-dp2-micro2-of-10"
        ),
        pytest.param(tiny(Layout(pp=2, vpp=2, dp=2), 7, schedule="ZBVZeroBubble"), [(0, 4), (4, 7)], id="zbv-dp2-of-7"),
        pytest.param(
            tiny(Layout(cp=2, dp=3), 4, model="tiny-moe"), [(0, 2), (2, 3), (3, 4)], id="experts-cp2-dp3-of-4"
        ),
    ],
    on_push=2,
)
def test_no_bit_differs(plan: Plan, samples: list[tuple[int, int]]) -> None:
    assert [plan.samples_of(dp_rank) for dp_rank in range(plan.layout.dp)] == samples and unsupported(plan) == []
    proof = prove(plan, transport="memory", steps=1)
    assert proof.findings == () and proof.changes == () and proof.report["bits_different"] == 0


def test_over_gloo_too() -> None:
    assert prove(tiny(Layout(pp=2, dp=2), 5), steps=1).ok


def test_the_shorter_schedule_is_proved_without_running_it() -> None:
    plan = tiny(Layout(pp=2, dp=2), 5)
    assert plan.microbatch_counts == (3, 2) and plan.num_microbatches == 3
    shorter = schedule_for(plan, 2)
    assert shorter.num_microbatches == 2 and prove_schedule(plan, shorter).errors == ()
    row = shorter.row(0)
    broken = replace(shorter, actions=shorter.actions[:-1], offsets=shorter.offsets - [0, 0, 1])
    assert len(row) == 4 and prove_schedule(plan, broken).errors


def test_a_schedule_that_fewer_microbatches_do_not_have_is_refused() -> None:
    with pytest.raises(PlanError, match=r"gives each direction half of the microbatches .* got 5"):
        tiny(Layout(pp=2, dp=2), 11, schedule="DualPipe")


def test_experts_across_data_parallel_ranks_need_equal_counts() -> None:
    with pytest.raises(
        PlanError, match=r"global=5 gives some of the dp=2 ranks 3 and others 2 microbatches. Use global = 4 or 6"
    ):
        tiny(Layout(dp=2, ep=2), 5, model="tiny-moe")


def test_reductions_of_one_rank_in_two_orders_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny(Layout(pp=2, vpp=2, dp=2), 7, schedule="ZBVZeroBubble")
    vee = schedule_for(plan, 3)
    other = schedule_for(replace(plan, schedule=ScheduleChoice("Interleaved1F1B")), 4)
    asked = unsupported_module._common_order.__wrapped__  # without what it remembers
    monkeypatch.setattr(unsupported_module, "_common_order", asked)
    monkeypatch.setattr(
        unsupported_module,
        "named_schedule",
        lambda choice, *, num_microbatches, **_: vee if num_microbatches == 3 else other,
    )
    (problem,) = unsupported(plan)
    assert "in one order with 4 microbatches and in another with 3" in problem and "Use global = 6 or 8" in problem


def test_verify_says_that_it_proved_both_schedules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(tiny(Layout(pp=2, dp=2), 5).to_toml())
    assert main(["verify", str(path)]) == 0
    assert "The schedule of ranks with 2 microbatches is right, too." in capsys.readouterr().out
