"""The assertions of the pytest plugin: what they take, what they say, and where in the user's files it belongs."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof import Plan, Schedule, assert_bitwise, assert_fits, assert_schedule
from shardproof.core.base.errors import PlanError
from shardproof.core.base.findings import Finding, Location, ProofFailed
from shardproof.core.schedule import build, lower
from shardproof.verify.schedule.locations import location_of

TEXT = """
[model]
preset = "tiny-gpt-6h"
[cluster]
preset = "this-host"
num_devices = 6
[layout]
tp = 3
pp = 2
[batch]
global = 4
micro = 1
sequence = 24
[precision]
dtype = "fp32"
[schedule]
name = "1F1B"
[numerics]
mode = "exact"
"""
RIGHT = build("1F1B", pp=2, num_microbatches=4).to_csv()
WITHOUT_BACKWARD = RIGHT.replace("1B2,", "")


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_right_ones_pass_in_every_form(tmp_path: Path) -> None:
    plan, path = Plan.from_toml(TEXT), written(tmp_path / "plan.toml", TEXT)
    for form in (plan, path, str(path), TEXT):
        assert_fits(form)
        assert_schedule(form)
    for form in (Schedule.from_csv(RIGHT), written(tmp_path / "right.csv", RIGHT), RIGHT):
        assert_schedule(form)


def test_a_schedule_that_leaves_out_a_backward_fails_at_its_row(tmp_path: Path) -> None:
    path = written(tmp_path / "wrong.csv", WITHOUT_BACKWARD)
    for form, location in (
        (path, Location(str(path), 2)),
        (WITHOUT_BACKWARD, Location()),
        (Schedule.from_csv(WITHOUT_BACKWARD), Location()),
    ):
        with pytest.raises(ProofFailed, match="missing-backward at rank 1") as caught:
            assert_schedule(form)
        ((finding, place),) = caught.value.findings
        assert (finding.rule, place) == ("missing-backward", location)


def test_the_schedule_file_of_a_plan_is_named_and_no_rank_is_started_for_it(tmp_path: Path) -> None:
    """Hidden sends: rank 1 waits for what rank 0 never sends."""
    lowered = lower(build("1F1B", pp=2, num_microbatches=4)).to_csv()
    path = written(tmp_path / "wrong.csv", lowered.replace("0SEND_F2,", ""))
    plan = written(tmp_path / "plan.toml", TEXT.replace('name = "1F1B"', f'file = "{path}"'))
    for check in (assert_schedule, assert_bitwise):
        with pytest.raises(ProofFailed, match="receive-without-send") as caught:
            check(plan)
        assert caught.value.findings[0][1] == Location(str(path), 2)


def test_a_plan_that_does_not_fit_fails_at_the_memory_of_its_device(tmp_path: Path) -> None:
    with pytest.raises(ProofFailed, match=r"rank 0, .* it needs .* and 0 B of the device are usable") as caught:
        assert_fits(
            written(
                tmp_path / "plan.toml",
                TEXT.replace("num_devices = 6", "num_devices = 6\ndevice_memory_bytes = 1048576"),
            )
        )
    ((finding, location),) = caught.value.findings
    assert (finding.rule, location.line) == ("out-of-memory", 7)


def test_a_schedule_where_only_a_plan_makes_sense_and_a_wrong_plan_are_refused() -> None:
    with pytest.raises(TypeError, match="only a schedule"):
        assert_bitwise(RIGHT)
    with pytest.raises(TypeError, match="takes a plan"):
        assert_fits(RIGHT)
    with pytest.raises(PlanError, match=r"plan:6: num_devices=6 is no multiple"):
        assert_schedule(TEXT.replace("tp = 3", "tp = 5"))


def test_rows_of_a_schedule_are_those_of_findings_about_it_alone(tmp_path: Path) -> None:
    plan = str(written(tmp_path / "plan.toml", TEXT.replace('name = "1F1B"', 'file = "own.csv"')))
    row, copies, other = (
        Finding("a-rule", "error", "ranks 1, 2", "x.", rank=1, axis=axis, key=key)
        for axis, key in ((None, "schedule.name"), ("pp", "schedule.name"), ("tp", "layout.tp"))
    )
    assert location_of(row, plan) == Location(str(tmp_path / "own.csv"), 2)
    assert location_of(copies, plan) == Location(plan, 17) and location_of(other, plan) == Location(plan, 8)
    assert location_of(other, "own.csv") == Location("own.csv", 2)


@pytest.mark.parametrize(
    ("finding", "line"),
    [
        (Finding("a-rule", "error", "rank 3", "x."), 8),
        (Finding("a-rule", "error", "rank 3", "x.", key="layout.dp"), 8),
        (Finding("a-rule", "error", "rank 3", "x.", key="layout.pp"), 9),
        (Finding("a-rule", "error", "rank 3", "x.", key="layout.stages"), 9),
        (Finding("a-rule", "error", "rank 3", "x.", key="schedule.name"), 17),
        (Finding("a-rule", "error", "rank 3", "x.", key="numerics.mode"), 19),
        (Finding("a-rule", "error", "rank 3", "x.", key="cluster.device_memory_bytes"), 5),
        (Finding("a-rule", "error", "rank 3", "x.", key="batch.sequence"), 13),
        (Finding("a-rule", "error", "rank 3", "x.", key="batch.nothing"), 11),
    ],
)
def test_findings_belong_to_the_key_they_are_about(tmp_path: Path, finding: Finding, line: int) -> None:
    plan = str(written(tmp_path / "plan.toml", TEXT))
    assert location_of(finding, plan) == Location(plan, line)
    assert location_of(finding, None) == location_of(finding, str(tmp_path)) == Location()
