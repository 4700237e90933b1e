"""Parts and samples of what the gates run: parts are disjoint and together all, samples show what all shows."""

from __future__ import annotations

import pytest

from shardproof.core.base.errors import PlanError
from shardproof.core.commands.cli import main
from shardproof.verify.matrix import matrix, modules
from shardproof.verify.matrix.modules import LAYOUTS, chosen_plans
from shardproof.verify.matrix.portions import WHOLE, Part, part_of
from shardproof.verify.mutations.catalog import MUTANTS, SUBJECTS, TABLES, chosen
from shardproof.verify.mutations.mutant import Stops


@pytest.mark.parametrize("number", range(1, 8))
def test_parts_of_the_mutants_are_disjoint_and_together_whole(number: int) -> None:
    cut = [part_of(MUTANTS, Part(i, number), lambda _: 1.0, lambda each: each.bug) for i in range(1, number + 1)]
    assert sorted(mutant.id for part in cut for mutant in part) == sorted(mutant.id for mutant in MUTANTS)


def test_every_mutant_and_every_plan_of_modules_is_in_exactly_one_of_three_parts() -> None:
    parts = [chosen(None, part=Part(i, 3)) for i in (1, 2, 3)]
    assert sorted(mutant.id for part in parts for mutant in part) == sorted(mutant.id for mutant in MUTANTS)
    assert all(30 < len(part) < 70 for part in parts)
    names = [name for i in (1, 2, 3) for name, _ in chosen_plans(part=Part(i, 3))]
    assert sorted(names) == sorted(name for name, _ in chosen_plans())
    assert chosen(None, part=WHOLE) == MUTANTS


def test_the_sample_of_mutants_shows_every_class_phase_scenario_and_subject() -> None:
    sample = chosen(None, sampled=True)
    assert len(sample) <= 27 and set(sample) <= set(MUTANTS)
    assert {each.scenario for each in sample} == {each.scenario for each in MUTANTS}
    assert {
        subject for subject, table in zip(SUBJECTS, TABLES, strict=True) if not {*table.MUTANTS} & {*sample}
    } == set()
    for seen in (lambda each: each.expected.phase, lambda each: each.expected.kinds[0]):
        of_all, of_sample = (
            {seen(each) for each in some if not isinstance(each.expected, Stops)} for some in (MUTANTS, sample)
        )
        assert of_sample == of_all
    assert any(isinstance(each.expected, Stops) for each in sample)


def test_the_sample_of_modules_has_every_layout_on_both_sides_of_a_bridge() -> None:
    names = [name for name, _ in chosen_plans(sampled=True)]
    pairs = [name.split(" -> ") for name in names if "+" not in name]
    assert {first for first, _ in pairs} == {second for _, second in pairs} == set(LAYOUTS)
    assert len(names) == 17


@pytest.mark.parametrize("part", ["0/3", "4/3", "x", "1/0", "-1/3", "1/3/3", "1.5/3"])
def test_a_part_that_there_is_not_is_refused_with_what_to_do(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = f"--part={part}"
    assert main(["verify", "--mutations", option]) == 2
    assert matrix.main(["--list", option]) == 2
    assert capsys.readouterr().err.count("Use 1/3, 2/3 and 3/3 for three parts") == 2
    with pytest.raises(PlanError, match="1 <= I <= N"):
        modules.main([option])
