"""The validation command: errors in groups, parts of a step, tables, refits; on rows typed in here and
on the published ones."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from helpers.paths import ROOT
from shardproof.benchmarks.published.row import DEFAULT_DATA, Measured, Row, read_rows
from shardproof.benchmarks.published.validation import Prediction, predict_row
from shardproof.benchmarks.published.validation.causes import CAUSES, causes_of, outliers
from shardproof.benchmarks.published.validation.choices import bloom_group, regrets, vtrain_group
from shardproof.benchmarks.published.validation.command import main
from shardproof.benchmarks.published.validation.parts import predict_parts
from shardproof.benchmarks.published.validation.refit import COEFFICIENTS, refit
from shardproof.benchmarks.published.validation.statistics import (
    Spread,
    is_calibration,
    leave_one_model_out,
    noise_floors,
    spread_of_errors,
)
from shardproof.benchmarks.published.validation.table import Table, to_markdown, to_text
from shardproof.benchmarks.published.validation.tables import validation_tables
from shardproof.benchmarks.published.validation.targets import TARGETS

ROW = {
    "id": "x",
    "source": "Korthikanti 2022",
    "family": "korthikanti_t5",
    "kind": "train_step",
    "tier": "A",
    "model": {
        "name": "GPT 22B",
        "layers": 48,
        "hidden": 6144,
        "ffn": 24576,
        "heads": 64,
        "kv_heads": 64,
        "vocab": 51200,
        "seq": 2048,
    },
    "hardware": {"gpu": "A100-80GB SXM", "count": 8, "inter": "8x200 Gb/s HDR InfiniBand per node"},
    "parallel": {"tp": 8, "pp": 1, "vpp": 1, "dp": 1, "cp": 1, "sp": False, "sharding": "none"},
    "batch": {"micro": 4, "num_microbatches": 1, "global": 4},
    "precision": "fp16",
    "recompute": "full",
    "schedule": "none",
    "flags": None,
    "measured": {"step_s": 1.42},
}
"""The first row of Korthikanti et al. 2022, table 5."""


def predicted(measured_s: float, predicted_s: float, *, layout: str = "", **fields) -> Prediction:
    row = Row({**ROW, **fields})
    return Prediction(row, Measured(measured_s, "step_s", None, "", oom=False), layout=layout, predicted_s=predicted_s)


def test_korthikanti_22b_with_full_recompute_is_predicted_within_5_percent():
    found = predict_row(Row(ROW))
    assert found.refused == "" and found.error == pytest.approx(0.0, abs=0.05)
    assert sum(found.time_s.values()) == pytest.approx(found.predicted_s)
    assert json.loads(json.dumps(found.to_json()))["predicted_s"] == found.predicted_s


def test_row_without_a_plan_has_a_reason_and_no_prediction():
    found = predict_row(Row({**ROW, "precision": None}))
    assert (found.refused, found.predicted_s, found.error) == ("precision is not published", None, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "GPT 22B"}, "model='GPT 22B' must be an object."),
        ({"batch": {**ROW["batch"], "micro": "4"}}, "batch.micro='4' must be a whole number above 0."),
        ({"batch": {**ROW["batch"], "micro": 0}}, "batch.micro=0 must be a whole number above 0."),
        ({"measured": {"step_s": "1.42 s"}}, "measured.step_s='1.42 s' must be a number of at least 0."),
        ({"source": None}, "source is missing."),
        ({"id": "a\n::error::b"}, "id='a\\n::error::b' must be a text of one line."),
    ],
)
def test_a_malformed_row_ends_the_validation_with_its_line_and_field(changes, said, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(ROW)}\n\n{json.dumps({**ROW, **changes})}\n")
    assert main(["--data", str(tmp_path)]) == 2
    assert capsys.readouterr() == ("", f"validate: {file}:3: {said}\n")


def test_a_row_of_experts_that_says_not_how_many_a_token_takes_is_refused():
    found = predict_row(Row({**ROW, "model": {**ROW["model"], "moe": {"experts": 8, "topk": None}}}))
    assert (found.refused, found.error) == ("model.moe.topk is not published", None)


def test_spread_of_minus_10_and_plus_20_percent_is_15_percent_with_bias_5():
    assert spread_of_errors([-0.1, 0.2]) == Spread(2, pytest.approx(0.15), pytest.approx(0.05), 0.2)
    assert spread_of_errors([]) is None


def test_near_duplicates_fall_into_one_half():
    rows = [
        Row({**ROW, "parallel": {**ROW["parallel"], "dp": dp}, "batch": {**ROW["batch"], "global": 4 * dp}})
        for dp in (1, 2, 4, 8)
    ]
    assert len({is_calibration(row) for row in rows}) == 1


def test_noise_is_the_spread_of_rows_that_are_equal_in_every_published_field():
    rows = [Row({**ROW, "measured": {"step_s": seconds}}) for seconds in (1.0, 1.06, 1.02)] + [
        Row({**ROW, "precision": "bf16"})
    ]
    floors = noise_floors(rows, lambda row: row["measured.step_s"])
    assert floors == {"Korthikanti 2022": (1, pytest.approx(0.06), pytest.approx(0.06))}


def test_a_model_left_out_is_scaled_by_the_others_only():
    # Model a is predicted 10% too fast twice, model b right: a scaled by b's 1 stays at -10%, b
    # scaled by 1/0.9 becomes +11%.
    a, b = {"model": {**ROW["model"], "name": "a"}}, {"model": {**ROW["model"], "name": "b"}}
    found = leave_one_model_out([predicted(1.0, 0.9, **a), predicted(2.0, 1.8, **a), predicted(1.0, 1.0, **b)])
    assert found.models == 2 and found.factors == (1.0, pytest.approx(1 / 0.9))
    assert found.spread.mape == pytest.approx((0.1 + 0.1 + 1 / 9) / 3)
    assert leave_one_model_out([predicted(1.0, 0.9, **a)]) is None


def test_regret_is_what_the_layout_predicted_best_takes_longer_than_the_best():
    group = [predicted(10.0, 9.0, layout="p"), predicted(9.6, 9.5, layout="q"), predicted(12.0, 11.0, layout="r")]
    (found,) = regrets(group, lambda row: {"model": "m"})
    assert (found.chosen, found.best, found.count) == ("p", "q", 3)
    assert found.regret == pytest.approx(10 / 9.6 - 1)
    assert found.agreement == pytest.approx((2 - 1) / 3)


def test_suspect_rows_have_a_named_cause_and_only_far_rows_are_outliers():
    far, near = predicted(1.0, 1.2, flags={"suspect": True}), predicted(1.0, 1.1)
    assert outliers([near, far]) == [far]
    assert [cause.name for cause in causes_of(far)] == ["suspect-row"] and causes_of(near) == []


def test_causes_are_named_once_and_carry_evidence():
    assert len({cause.name for cause in CAUSES}) == len(CAUSES)
    assert all(cause.why and cause.evidence for cause in CAUSES)


def part(kind: str, **fields) -> Row:
    return Row({**ROW, "kind": kind, "id": kind, **fields})


def test_bubbles_of_the_handcrafted_zero_bubble_schedules_equal_the_authors_to_a_tenth_of_a_point():
    # Qi et al. 2024, tables 5 and 6: 1.5B on 8 stages, 24 microbatches.
    shape = {
        "parallel": {**ROW["parallel"], "tp": 1, "pp": 8},
        "batch": {"micro": 6, "num_microbatches": 24, "global": 144},
    }
    times = part(
        "stage_time", **shape, measured={"T_F_ms": 18.522, "T_B_ms": 18.086, "T_W_ms": 9.337, "T_comm_ms": 0.601}
    )
    rates = {"1F1B": 0.2431, "ZB-H1": 0.1585, "ZB-H2": 0.1083, "ZB-1p": 0.1585, "ZB-2p": 0.0433}
    rows = [part("bubble", **shape, schedule=name, measured={"bubble_rate": rate}) for name, rate in rates.items()]
    found = [one for one in predict_parts([times, *rows]) if one.section == "bubbles"]
    assert len(found) == 5
    assert all(one.error == pytest.approx(0.0, abs=1e-3) for one in found)


@pytest.mark.parametrize(
    ("recompute", "sp", "fwd", "bwd"),
    [("none", False, 7.7, 11.9), ("full", False, 7.7, 19.5), ("none", True, 7.2, 11.8)],
)
def test_a_layer_of_22b_takes_what_korthikanti_table_4_says_within_6_percent(recompute, sp, fwd, bwd):
    row = part(
        "layer_time",
        model={**ROW["model"], "layers": 1},
        parallel={**ROW["parallel"], "sp": sp},
        recompute=recompute,
        measured={"fwd_ms": fwd, "bwd_ms": bwd},
    )
    found = predict_parts([row])
    assert [one.measured for one in found] == [fwd, bwd]
    assert all(one.error == pytest.approx(0.0, abs=0.06) for one in found)


def test_tables_print_as_text_and_as_markdown():
    table = Table("Name", "a note", ("a", "b"), (("1", "x|y"), ("long", "")))
    assert to_text(table) == "Name\na note\n  a     b\n  1     x|y\n  long"
    assert to_markdown(table) == "## Name\n\na note\n\n| a | b |\n| --- | --- |\n| 1 | x\\|y |\n| long |  |"


def test_tables_without_rows_are_left_out():
    titles = [table.title for table in validation_tables([Row(ROW)], [predict_row(Row(ROW))], [])]
    assert titles[:2] == ["Targets", "Step time by source and series"] and "Parts of a step" not in titles


def rows_file(tmp_path, *rows):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return ["--data", str(tmp_path)]


def test_command_prints_tables_and_rows(tmp_path, capsys):
    assert main([*rows_file(tmp_path, ROW, {**ROW, "id": "y", "precision": None}), "--rows"]) == 0
    text = capsys.readouterr().out
    assert (
        "Korthikanti Table 5" in text
        and "  x [tp8, micro 4 x 1] 1.42 s -> " in text
        and ("y: precision is not published") in text
    )


def test_command_writes_the_page_and_one_json_object(tmp_path, capsys):
    data = rows_file(tmp_path, ROW)
    assert main([*data, "--write", str(tmp_path / "validation.md")]) == 0
    page = (tmp_path / "validation.md").read_text()
    assert page.startswith("# Validation\n\nGenerated by") and "](pictures/validation.svg)" in page
    assert "Predicted and published: 1 training steps" in (tmp_path / "pictures" / "validation.svg").read_text()
    assert main([*data, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"][0]["id"] == "x"


@pytest.mark.parametrize(
    ("arguments", "what"), [([], "holds no published rows"), (["--source", "nobody"], "holds no published rows")]
)
def test_command_without_rows_says_so_with_code_2(tmp_path, capsys, arguments, what):
    assert main(["--data", str(tmp_path), *arguments]) == 2
    assert what in capsys.readouterr().err


def test_rows_of_the_repository_are_found_without_options():
    assert ROOT / "benchmarks" / "published" / "rows" == DEFAULT_DATA and len(read_rows()) == 2825
    call = [sys.executable, str(ROOT / "benchmarks" / "validate.py"), "--source", "Korthikanti", "--json"]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)["predictions"]) == 6


def test_without_the_repository_one_sentence_says_where_the_rows_are(tmp_path, capsys):
    assert main(["--data", str(tmp_path)]) == 2
    reported = capsys.readouterr().err
    assert (
        "they belong to shardproof's repository, in benchmarks/published/rows" in reported and reported.count("\n") == 1
    )


def test_command_names_a_source_that_is_not_there(tmp_path, capsys):
    assert main([*rows_file(tmp_path, ROW), "--source", "nobody"]) == 2
    assert "no source or series is called nobody" in capsys.readouterr().err


def test_refit_finds_the_host_time_that_made_the_data():
    # Rows of vTrain's small models whose seconds are those of a host 8% slower than today's.
    coefficient = next(one for one in COEFFICIENTS if one.field == "host_calls" and one.name.startswith("A100"))
    rows = []
    for hidden in range(256, 1025, 32):
        model = {
            **ROW["model"],
            "name": f"h{hidden}",
            "layers": 12,
            "hidden": hidden,
            "ffn": 4 * hidden,
            "heads": 16,
            "kv_heads": 16,
            "seq": 1024,
        }
        batch = {"micro": 1, "num_microbatches": 4, "global": 4}
        more = {
            "source": "vTrain (MICRO24)",
            "family": "vtrain_single",
            "model": model,
            "batch": batch,
            "recompute": "none",
        }
        row = Row({**ROW, **more, "hardware": {"gpu": "A100-80GB SXM", "count": 8}})
        seconds = predict_row(row).predicted_s
        rows.append(Row({**row.data, "measured": {"step_s": seconds * 1.0816}}))
    (fit,) = [one for one in refit(rows) if one.coefficient == coefficient]
    assert fit.count == sum(is_calibration(row) for row in rows) >= 5
    assert fit.fitted == pytest.approx(fit.value * 1.0816, rel=0.05)
    assert fit.fitted_error < fit.error


def test_every_target_has_rows_of_its_own():
    assert len({target.name for target in TARGETS}) == len(TARGETS) == 9


def test_layout_groups_hold_one_model_on_one_machine():
    for key, source in ((vtrain_group, "vTrain"), (bloom_group, "BLOOM")):
        groups = {}
        for row in read_rows():
            if row["kind"] == "train_step" and row.source.startswith(source) and (found := key(row)) is not None:
                groups.setdefault(tuple(found.values()), set()).add(
                    (row["model.hidden"], row["model.layers"], row["hardware.count"])
                )
        assert len(groups) > 5 and all(len(members) == 1 for members in groups.values())


def test_published_steps_of_sc21_and_korthikanti_are_met_within_what_is_asked():
    rows = [row for row in read_rows() if row.family in ("sc21_t1", "korthikanti_t5") and row["kind"] == "train_step"]
    predictions = [predict_row(row) for row in rows]
    for target in TARGETS[:2]:
        errors = target.errors(predictions)
        assert len(errors) in (7, 6) and sum(map(abs, errors)) / len(errors) <= target.mape
