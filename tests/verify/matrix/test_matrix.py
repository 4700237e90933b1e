"""The matrix of layouts: what it covers, what it refuses, and 16 of its layouts against one device.
`.ci/full` runs all of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from helpers.gates import sampled
from shardproof.core.plan.plan import Plan
from shardproof.core.schedule import CATALOG
from shardproof.verify.matrix import matrix as command
from shardproof.verify.matrix.covering import Row
from shardproof.verify.matrix.kinds import FAMILIES, KINDS, kind_of
from shardproof.verify.matrix.kinds import sample as kinds
from shardproof.verify.matrix.layouts import FACTORS, expected_cost, features, matrix, num_ranks, plan_of, refusals
from shardproof.verify.matrix.matrix import chosen_rows, main, run_row
from shardproof.verify.matrix.portions import Part, smallest_cover
from shardproof.verify.pretended.layouts import NUM_LAYOUTS, layouts
from shardproof.verify.pretended.layouts import main as pretended_layouts
from shardproof.verify.run.proof_run import ProofJob
from shardproof.verify.run.references import Checked, References

NUM_SAMPLES = 18

KNOWN = {axis: {value for values in kinds.values() for value in values} for axis, kinds in KINDS.items()}


@cache
def small() -> list[Row]:
    """The layouts that eight ranks can run. Finding all takes seconds, which only the worker that runs
    this file should spend."""
    return [row for row in matrix().rows if num_ranks(row) <= 8]


@cache
def sample() -> list[Row]:
    return smallest_cover(small(), features, expected_cost)


@cache
def references() -> References:
    return References(most=NUM_SAMPLES)


def smallest() -> Row:
    """The layout with the fewest ranks."""
    return min(small(), key=num_ranks)


def values_of(name: str) -> set[str | int]:
    return {value for row in matrix().rows for other, value in features(row) if other == name}


def test_at_least_120_layouts_show_every_schedule_degree_precision_and_kind_of_layer() -> None:
    assert len(matrix().rows) >= 120
    assert values_of("schedule") == set(CATALOG)
    assert (
        values_of("tp") >= {1, 2, 3, 4, 5, 6, 8}
        and values_of("pp") >= {1, 2, 3, 4, 5, 6, 8}
        and values_of("dp") >= {1, 2, 3, 4, 5, 6}
    )
    assert values_of("dtype") == {"fp32", "bf16"} and values_of("attention") == {"mha", "gqa", "mla"}
    assert (
        values_of("mlp") == {"dense", "experts"}
        and values_of("mtp") == {"no", "yes"}
        and values_of("dropout") == {"no", "yes"}
    )
    assert values_of("micro") == {1, 2, 3} and values_of("recompute") == set(FACTORS["recompute"])


def met(rows: Sequence[Row]) -> set[frozenset[tuple[str, str | int]]]:
    """The pairs of kinds in rows, one after the other."""
    return {
        frozenset((kind_of(a), kind_of(b))) for row in rows for a, b in product(features(row), repeat=2) if a[0] != b[0]
    }


def test_the_sample_is_of_the_matrix_and_every_pair_of_kinds_meets_in_it() -> None:
    rows, sample = matrix().rows, chosen_rows(matrix().rows, sampled=True)
    assert all(row in rows for row in sample)
    assert met(sample) == met(rows) and len(met(rows)) > 2000
    assert 35 <= len(sample) <= 80
    assert sum(map(expected_cost, sample)) < 0.33 * sum(map(expected_cost, rows))


def test_every_value_of_an_axis_with_kinds_has_one_kind() -> None:
    values = {axis: {value for row in matrix().rows for name, value in features(row) if name == axis} for axis in KINDS}
    assert values == KNOWN
    assert sum(map(len, FAMILIES.values())) == len(values["schedule"])


@pytest.mark.parametrize("number", range(1, 8))
def test_parts_are_disjoint_together_whole_and_cost_the_same(number: int) -> None:
    rows = matrix().rows
    parts = [chosen_rows(rows, part=Part(i, number)) for i in range(1, number + 1)]
    assert sorted(rows.index(row) for part in parts for row in part) == list(range(len(rows)))
    costs = [sum(map(expected_cost, part)) for part in parts]
    assert max(costs) < 1.1 * min(costs)


def test_twenty_layouts_on_pretended_cuda_show_all_that_eight_ranks_can(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = layouts()
    assert len(chosen) == NUM_LAYOUTS and len({str(row) for row in chosen}) == NUM_LAYOUTS
    assert {each for row in chosen for each in features(row)} == {each for row in small() for each in features(row)}
    assert pretended_layouts(["no-such-plan.toml"]) == 2 and "no-such-plan.toml" in capsys.readouterr().err


def test_every_refusal_says_what_would_be_admitted() -> None:
    for _, refusal in refusals():
        assert all(
            any(word in problem for word in ("Use ", "Choose ", "Set ", "Leave ")) for problem in refusal.problems
        ), refusal
    assert len(refusals()) < 10


@sampled("number", range(NUM_SAMPLES), on_push=3)
def test_a_layout_has_the_bits_of_one_device(number: int) -> None:
    outcome = run_row(sample()[number], references(), steps=1)
    assert outcome.ok, outcome.line
    assert outcome.tensors_compared > 100 and "0 different bits" in outcome.line


def test_the_sample_shows_every_value_that_eight_ranks_can() -> None:
    shown = {feature for row in sample() for feature in features(row)}
    assert shown == {feature for row in small() for feature in features(row)}
    assert len(sample()) == NUM_SAMPLES


class OtherSeed(References):
    """One device with other weights."""

    def of(self, job: ProofJob) -> Checked:
        return super().of(replace(job, plan=replace(job.plan, train=replace(job.plan.train, seed=99))))


def test_other_bits_fail_and_name_the_first_tensor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = smallest()
    only = [
        option for name in ("problem", "pipeline", "tp", "dp", "cp") for option in ("--only", f"{name}={row[name]}")
    ]
    monkeypatch.setattr(command, "References", OtherSeed)
    assert main([*only, "--steps", "1", "--jobs", "1"]) == 1
    text = capsys.readouterr().out
    assert "FAILED" in text and "DIFFER" in text and "at the start of training" in text
    assert "0 of 1 layouts at 0 different bits" in text


def test_a_step_that_is_not_clipped_fails() -> None:
    row = smallest()
    plan = plan_of(row)
    assert isinstance(plan, Plan)
    lenient = replace(plan, optimizer=replace(plan.optimizer, clip_grad_norm=1e6))
    outcome = command.prove_plan(lenient, row, References(most=1), steps=1)
    assert outcome.tensors_different == 0 and not outcome.ok and "not clipped" in outcome.line


def test_the_list_reports_layouts_coverage_and_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "schedule=DualPipe", "--only", "tp=2"]) == 0
    text = capsys.readouterr().out
    assert "DualPipe" in text and "Layouts with each value:" in text and "pairs need more than 16 ranks" in text
    assert main(["--list", "--json", "--sample"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["num_layouts"] == len(report["layouts"]) == len(kinds(matrix().rows)) and report["num_pairs"] > 1000


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("schedul=1F1B", "did you mean 'schedule'"),
        ("schedule=Dualpipe", "did you mean 'DualPipe'"),
        ("tp=7", "Use one of 1, 2, 3, 4, 5, 6, 8"),
    ],
)
def test_an_axis_or_value_that_no_layout_has_is_refused(
    option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--only", option]) == 2
    assert message in capsys.readouterr().err
