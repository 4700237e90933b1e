"""The verbs as a user calls them: exit codes, JSON, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardproof.core.commands.cli import main
from shardproof.core.plan.plan import Plan

EIGHT_B = ["--model", "llama3-8b", "--cluster", "dgx-h100", "--devices", "8"]


def test_simulate_prints_a_table_and_json_of_the_same_step(capsys):
    assert main(["simulate", *EIGHT_B, "--tp", "4", "--pp", "2"]) == 0
    text = capsys.readouterr().out
    assert "llama3-8b (8.03 B parameters) on 8 devices of dgx-h100" in text and "pipeline bubble" in text
    assert main(["simulate", *EIGHT_B, "--tp", "4", "--pp", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_devices"] == 8
    assert f"{report['mfu']:.1%}" in text


def test_a_step_of_hours_is_written_in_whole_seconds_and_one_device_has_no_bubble(capsys):
    assert (
        main(["simulate", "--model", "gpt3-175b", "--cluster", "dgx-h100", "--devices", "1", "--global-batch", "4096"])
        == 0
    )
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["step", "15,455", "s"] in words and ["bubble", "0.0%"] in [line[:2] for line in words]


def test_sums_that_round_make_no_bubble_below_zero(capsys):
    assert main(["simulate", "--model", "gpt3-175b", "--json"]) == 0  # -2e-16 of the step, with the rates of two cores
    assert json.loads(capsys.readouterr().out)["bubble_fraction"] >= 0


def test_simulate_says_when_the_step_does_not_fit(capsys):
    main(["simulate", "--model", "llama3-70b", "--cluster", "dgx-h100", "--devices", "8", "--tp", "8"])
    assert "which does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "code", "verdict"), [("llama3-8b", 0, "to spare"), ("llama3-70b", 1, "too much")])
def test_fit_exits_with_1_when_it_does_not_fit(capsys, model, code, verdict):
    assert main(["fit", "--model", model, "--cluster", "dgx-h100", "--devices", "8", "--tp", "4", "--pp", "2"]) == code
    assert verdict in capsys.readouterr().out
    assert (
        main(["fit", "--model", model, "--cluster", "dgx-h100", "--devices", "8", "--tp", "4", "--pp", "2", "--json"])
        == code
    )
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] is (code == 0)
    assert [entry["pp_rank"] for entry in report["per_rank"]] == [0, 1]


SEARCH = ["plan", *EIGHT_B, "--global-batch", "16", "--sequence", "2048", "--tp", "2", "--micro-batch", "1"]


def test_plan_writes_the_best_as_a_plan_that_simulates(tmp_path: Path, capsys):
    best = tmp_path / "best.toml"
    assert main([*SEARCH, "-o", str(best), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["candidates"][0]
    plan = Plan.from_toml(best.read_text())
    assert (plan.layout.tp, plan.layout.pp, plan.layout.dp) == (2, first["layout"]["pp"], first["layout"]["dp"])
    assert main(["simulate", str(best), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] == first["step_time_s"]
    assert [path.name for path in tmp_path.iterdir()] == ["best.toml"]


def test_plan_reports_why_the_others_lost(capsys):
    assert main(SEARCH) == 0
    text = capsys.readouterr().out
    assert "The others lost because:" in text and "bound-above-best" in text


def test_plan_that_fits_nowhere_writes_nothing(tmp_path: Path, capsys):
    best = tmp_path / "best.toml"
    assert main([*SEARCH, "--set", "cluster.device_memory_bytes=1e8", "-o", str(best)]) == 1
    captured = capsys.readouterr()
    assert "no layout fits" in captured.out and "out-of-memory" in captured.out
    assert not best.exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--sequence", "1" + "0" * 30), "at most 1,073,741,824"),
        (("--global-batch", "1" + "0" * 12), "at most"),
        (("--set", "cluster.node_link_bytes_per_s=1e-307"), "must be 0 or at least 1"),
    ],
)
def test_a_number_too_large_to_count_is_bad_input_and_no_traceback(option, message, capsys):
    model = ["--model", "tiny-llama", "--cluster", "dgx-h100", "--tp", "2", "--pp", "2"]
    assert main(["simulate", *model, *option]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_plan_says_so_when_no_degrees_were_left_to_decide(capsys):
    assert main([*SEARCH, "--devices", "7", "--tp", "3"]) == 2
    assert "tp=3 does not divide 7 devices" in capsys.readouterr().err


ON_GPUS = ["--model", "llama3-8b", "--cluster", "dgx-h100", "--devices", "8", "--sequence", "4096", "--fix", "pp=1"]


def test_plan_says_what_nobody_said_and_how_to_say_otherwise(capsys):
    assert main(["plan", *ON_GPUS, "--batch-tokens", "64K", "--fix", "micro=1"]) == 0
    text = capsys.readouterr().out
    assert "not said, so runtime.profile=megatron-te: --set runtime.profile=... for others" in text
    assert "16 x 4096 tokens" in text
    assert main(["plan", *ON_GPUS, "--batch-tokens", "64K", "--fix", "micro=1", "--profile", "shardproof"]) == 0
    assert "not said" not in capsys.readouterr().out


def test_plan_says_why_in_words_that_name_key_share_and_cause(capsys):
    assert (
        main(["plan", *ON_GPUS, "--global-batch", "16", "--fix", "tp=8", "--fix", "micro=1", "--json", "--top", "1"])
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert len(report["candidates"]) == 1
    best, why = report["candidates"][0], {each["change"]: each for each in report["why"]}
    assert why["tp=4"]["step_time_s"] < best["step_time_s"]
    assert "% of the step" in why["tp=4"]["text"] and "in TP" in why["tp=4"]["text"]
    assert why["recompute=full"]["text"].startswith("+") and "in recomputing" in why["recompute=full"]["text"]
    assert main(["plan", *ON_GPUS, "--global-batch", "16", "--fix", "tp=1", "--fix", "zero=2", "--json"]) == 0
    why = {each["change"]: each for each in json.loads(capsys.readouterr().out)["why"]}
    assert not why["zero=1"]["fits"] and "GiB over on rank 0: gradients" in why["zero=1"]["text"]


def test_tensor_parallelism_that_leaves_the_node_is_said_to(capsys):
    options = ["--model", "llama2-7b", "--cluster", "dgx-h100", "--devices", "32", "--sequence", "4096"]
    fixed = [each for key in ("tp=8", "pp=1", "cp=1", "micro=1", "zero=3") for each in ("--fix", key)]
    assert main(["plan", *options, "--global-batch", "16", *fixed, "--top", "1", "--json"]) == 0
    why = {each["change"]: each["text"] for each in json.loads(capsys.readouterr().out)["why"]}
    assert why["tp=16"].startswith("tp leaves the node (16 ranks, 8 on its links), +")


def test_parts_merge_to_the_whole(tmp_path: Path, capsys):
    given = ["plan", *ON_GPUS, "--global-batch", "16", "--top", "4"]
    assert main([*given, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    files = [tmp_path / f"{number}.json" for number in (1, 2)]
    for number, file in enumerate(files, start=1):
        assert main([*given, "--part", f"{number}/2", "--json"]) == 0
        file.write_text(capsys.readouterr().out)
    best = tmp_path / "best.toml"
    assert main(["plan", "--merge", *map(str, files), "--json", "-o", str(best)]) == 0
    merged = json.loads(capsys.readouterr().out)
    assert merged["candidates"] == whole["candidates"]
    assert merged["evaluated"] == whole["evaluated"] == 4 + sum(merged["rejected"].values())
    assert Plan.from_toml(best.read_text()).layout.tp == whole["candidates"][0]["layout"]["tp"]
    assert main(["plan", "--merge", str(files[0])]) == 2
    assert "not each of 1 to 2 once" in capsys.readouterr().err
    files[1].write_text(json.dumps({**json.loads(files[1].read_text()), "candidates": [{"plan": "x"}]}))
    assert main(["plan", "--merge", *map(str, files)]) == 2
    assert "is no part of a search" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--objective", "money"), "cluster.device_price_per_hour, which is not given"),
        (("--batch-tokens", "5000"), "not whole sequences of 4096"),
        (("--batch-tokens", "much"), "write a whole number"),
        (("--max-memory", "much"), "--max-memory much"),
        (("--part", "3/2"), "write number/of"),
        (("--part", "1/2", "--pareto"), "--part ranks by the step's time"),
        (("--top", "0"), "at least one row"),
        (("--fix", "tp"), "--fix tp"),
        (("--fix", "tq=2"), "tq"),
    ],
)
def test_options_of_a_search_that_say_nothing_are_bad_input(options, message, capsys):
    batch = () if "--batch-tokens" in options else ("--global-batch", "16")
    assert main(["plan", *ON_GPUS, *batch, *options]) == 2
    assert message in capsys.readouterr().err
