"""The `verify` verb: what it prints, its JSON, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardproof.core.commands.cli import main
from shardproof.core.schedule import build, lower
from shardproof.core.schedule.schedule import Schedule
from shardproof.verify.schedule.grid import grid
from shardproof.verify.schedule.rules import RULES

RIGHT = "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0STEP\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1STEP\n"
WITHOUT_RECEIVE = RIGHT.replace("1RECV_F0,", "")
SMALL = [
    "--model",
    "llama3-8b",
    "--cluster",
    "dgx-h100",
    "--devices",
    "8",
    "--pp",
    "4",
    "--tp",
    "2",
    "--global-batch",
    "8",
]


def written(folder: Path, text: str) -> str:
    path = folder / "schedule.csv"
    path.write_text(text)
    return str(path)


def test_a_right_schedule_says_what_was_checked_and_ends_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", written(tmp_path, RIGHT)]) == 0
    text = capsys.readouterr().out
    assert "12 actions on 2 pipeline ranks, 2 stages, 1 microbatches" in text
    assert "no rule is broken" in text


def test_a_missing_receive_ends_with_1_and_marks_the_send(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", written(tmp_path, WITHOUT_RECEIVE)]) == 1
    text = capsys.readouterr().out
    assert "send-without-receive at rank 0, step 1, 0SEND_F0" in text
    assert "1RECV_F0 on rank 1 is not there" in text
    assert ">0SEND_F0<" in text and "step 1" in text


def test_malformed_cells_end_with_2_and_are_all_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", written(tmp_path, "0F0,nonsense,0B0\n1F0,1B0,1Z0\n")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "'nonsense'" in captured.err and "'1Z0'" in captured.err


def test_a_file_that_is_no_text_or_not_there_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\xff\xfe")
    assert main(["verify", str(tmp_path / "picture.csv")]) == 2
    assert main(["verify", str(tmp_path / "absent.csv")]) == 2
    assert main(["verify", *SMALL, "--schedule", str(tmp_path / "picture.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_json_is_one_object_with_the_promised_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", written(tmp_path, WITHOUT_RECEIVE), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    keys = {"rule", "severity", "where", "what", "hint", "rank", "action", "axis", "tensor", "microbatch", "key"}
    assert [set(finding) for finding in report["findings"]] == [keys]
    assert report["checked"]["num_actions"] == 11


def test_a_plan_is_checked_from_options_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """8 microbatches on 4 ranks: 64 compute actions; 3 hops x 8 x 2 directions of send and receive, 4
    reductions and 4 steps."""
    assert main(["verify", *SMALL]) == 0
    assert "1F1B: 168 actions (64 given, 104 added by lowering) on 4 pipeline ranks" in capsys.readouterr().out


def test_a_plan_with_a_schedule_file_checks_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lowered = lower(build("GPipe", pp=4, num_microbatches=8)).to_csv()
    assert main(["verify", *SMALL, "--schedule", written(tmp_path, lowered)]) == 0
    assert main(["verify", *SMALL, "--schedule", written(tmp_path, lowered.replace("2RECV_B5,", ""))]) == 1
    assert "3SEND_B5" in capsys.readouterr().out


def test_a_schedule_file_of_another_size_than_the_plan_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, build("GPipe", pp=3, num_microbatches=6).to_csv())
    assert main(["verify", *SMALL, "--schedule", path]) == 2
    error = capsys.readouterr().err
    assert "3 rows (pipeline ranks), but the plan has 4" in error and "6 microbatches, but the plan has 8" in error


def test_list_prints_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--list"]) == 0
    text = capsys.readouterr().out
    assert all(rule.name in text and rule.doc in text for rule in RULES)


@pytest.mark.parametrize(
    "options", [["--dynamic"], ["--inject", "drop-reduction:1:x"], ["--tp", "2"], ["--set", "layout.tp=2"]]
)
def test_options_that_a_schedule_alone_cannot_use_are_refused(tmp_path: Path, options: list[str]) -> None:
    assert main(["verify", written(tmp_path, RIGHT), *options]) == 2


def test_a_large_schedule_is_shown_as_a_window_around_the_fault() -> None:
    lowered = lower(build("1F1B", pp=32, num_microbatches=64))
    index = int(lowered.offsets[20]) + 200
    text = grid(lowered, [index])
    assert f">{lowered.actions[index]}<" in text
    assert len(text.splitlines()) == 1 + 32 + 1
    assert text.splitlines()[-1] == "(ranks 17-22 of 32, steps 184-215 of 386)"


def test_the_grid_of_one_rank_has_its_steps_below_each_other() -> None:
    assert grid(Schedule.from_csv("0F0,0B0"), []).splitlines()[1] == "step 0   0F0"
