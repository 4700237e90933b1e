"""The mutation score: what is counted when a bug is seen, seen in the wrong place, or not seen, and
when nothing is broken."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest

from shardproof import Plan
from shardproof.core.base.errors import RankFailure
from shardproof.core.commands.cli import main
from shardproof.verify.ledger.ledger import GRADIENT, RankLedger
from shardproof.verify.mutations import run
from shardproof.verify.mutations.catalog import MUTANTS, chosen
from shardproof.verify.mutations.mutant import Expected, Mutant, Stops
from shardproof.verify.mutations.not_here import NOT_HERE
from shardproof.verify.mutations.patches import Broken, Patches, rank_here
from shardproof.verify.mutations.plans import tiny
from shardproof.verify.mutations.report import report_of, text_of
from shardproof.verify.mutations.run import judge_mutants
from shardproof.verify.run.proof_run import ProofJob, train_steps

FIRST = {"step": 1, "phase": GRADIENT, "tensor": "layers.0.mlp.up.weight", "action": "0REDUCE_GRAD", "ranks": [0, 1]}
EXPECTED = Expected(GRADIENT, "layers.0.*", ("missing",), ("REDUCE_GRAD",), ranks=(0, 1))


def nothing(patches: Patches) -> None:
    """Breaks nothing."""


def multiplies_the_norm(patches: Patches) -> None:
    """The norm of all gradients is twice what it is."""
    from shardproof.backend.ranks.totals import Totals

    patches.replace(Totals, "norm", lambda original: lambda self, *given: 2 * original(self, *given))


def stops_rank_1(patches: Patches) -> None:
    """Rank 1 fails at its first optimizer step."""
    from shardproof.backend.optimizers.sharded import ShardedOptimizer

    def step(original: Any) -> Any:
        def failing(self: Any, *given: Any) -> None:
            if rank_here() == 1:
                raise ValueError("out of ideas")
            original(self, *given)

        return failing

    patches.replace(ShardedOptimizer, "step", step)


def other_data_on_several_ranks(transport: Any, job: ProofJob) -> RankLedger:
    """Training, of other data where there is more than one rank."""
    assert isinstance(job.plan, Plan)
    seed = job.plan.train.seed + (job.plan.world_size > 1)
    return train_steps(transport, replace(job, plan=replace(job.plan, train=replace(job.plan.train, seed=seed))))


def mutant(breaks: Any, expected: Expected | Stops, **fields: Any) -> Mutant:
    return Mutant(
        "X1-b", "a bug", "nobody/nothing#1", lambda: tiny(dp=3, samples=3), breaks, expected, steps=1, **fields
    )


class Owner:
    """Something of every kind that can be replaced."""

    def method(self) -> str:
        return "method"

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    @property
    def size(self) -> int:
        return 3

    @cached_property
    def unused(self) -> int:
        return 0


class Heir(Owner):
    """Has nothing of its own."""


def test_patches_replace_methods_of_every_kind_and_put_them_back() -> None:
    before = dict(vars(Owner))
    with Patches() as patches:
        patches.replace(Owner, "method", lambda original: lambda self: original(self) + "!")
        patches.replace(Owner, "static", lambda original: lambda: original() + "!")
        patches.replace(Owner, "of_class", lambda original: lambda cls: original(cls) + "!")
        patches.replace(Owner, "size", lambda original: lambda self: original(self) + 1)
        patches.replace(Heir, "method", lambda original: lambda self: original(self) + "?")
        owner = Owner()
        assert (owner.method(), Owner.static(), Heir.of_class()) == ("method!", "static!", "Heir!")
        assert (owner.size, Heir().method()) == (4, "method!?")
    assert dict(vars(Owner)) == before and "method" not in vars(Heir)


def test_patching_what_is_not_there_is_an_error() -> None:
    with Patches() as patches, pytest.raises(AttributeError, match="vanished"):
        patches.replace(Owner, "vanished", lambda original: original)


def test_ranks_of_one_process_are_broken_together_and_know_their_numbers() -> None:
    calls: list[str] = []
    met, found = threading.Barrier(5), {}

    def breaks(patches: Patches) -> None:
        calls.append("broken")
        patches.replace(Owner, "method", lambda original: lambda self: f"{original(self)} of rank {rank_here()}")

    broken = Broken(breaks)

    def run(global_rank: int) -> None:
        with broken(global_rank):
            met.wait(10)
            found[global_rank] = Owner().method()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {rank: f"method of rank {rank}" for rank in range(5)}
    assert calls == ["broken"] and Owner().method() == "method"


@pytest.mark.parametrize(
    ("change", "placed"),
    [
        ({}, True),
        ({"tensor": "layers.1.mlp.up.weight"}, False),
        ({"action": "0STEP"}, False),
        ({"action": None}, False),
        ({"phase": "weight"}, False),
        ({"ranks": [0]}, False),
        ({"step": 2}, False),
    ],
)
def test_a_difference_is_placed_when_everything_is_as_expected(change: dict[str, Any], placed: bool) -> None:
    assert EXPECTED.is_placed({**FIRST, **change}) is placed


def replaces_what_nobody_calls(patches: Patches) -> None:
    """A function that no rank of this plan comes to."""
    patches.replace(Owner, "method", lambda original: original)


def test_a_mutant_that_nobody_reaches_is_a_failure_of_the_catalog() -> None:
    (verdict,) = judge_mutants([mutant(replaces_what_nobody_calls, EXPECTED)]).verdicts
    assert verdict.failed and not verdict.caught and "nothing that the mutant replaces was called" in verdict.words


def test_a_mutant_that_changes_nothing_is_missed_and_one_that_stops_is_located_by_its_rank() -> None:
    stops, others = Stops(r"rank 1 failed.*out of ideas", ranks=(1,)), Stops("rank 2 failed")
    score = judge_mutants([mutant(nothing, EXPECTED), mutant(stops_rank_1, stops), mutant(stops_rank_1, others)])
    report = report_of(score)
    counts = {
        name: report[name] for name in ("ok", "injected", "caught", "located", "false_alarms", "missed", "clean_runs")
    }
    assert counts == {
        "ok": False,
        "injected": 3,
        "caught": 2,
        "located": 1,
        "false_alarms": 0,
        "missed": 1,
        "clean_runs": 1,
    }
    assert report["practice"] == {"loss_of_step_1": 2, "allclose_of_step_1": 2}
    assert [finding["rule"] for finding in report["findings"]] == ["mutant-missed"]
    assert "MISSED" in text_of(report)


def test_a_mutant_that_stops_a_run_which_its_bug_does_not_stop_is_a_failure_of_the_catalog() -> None:
    (verdict,) = judge_mutants([mutant(stops_rank_1, EXPECTED)]).verdicts
    assert verdict.failed and not verdict.caught
    assert "the run stopped, which this bug does not: rank 1 failed" in verdict.words


def test_a_finding_in_a_plan_that_nobody_broke_is_a_false_alarm() -> None:
    score = judge_mutants([mutant(nothing, EXPECTED, scenario=other_data_on_several_ranks)])
    report = report_of(score)
    assert report["false_alarms"] == 1 and not report["ok"]
    assert [finding["rule"] for finding in report["findings"]] == ["false-alarm"]


def test_an_error_of_the_verifier_loses_the_score_of_one_mutant_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def divergence(plan: Plan, difference: Any) -> dict[str, Any]:
        raise KeyError("layers.0.mlp")

    monkeypatch.setattr(run, "divergence", divergence)
    broken = mutant(multiplies_the_norm, EXPECTED)
    report = report_of(judge_mutants([broken, mutant(stops_rank_1, Stops("out of ideas", ranks=(1,)))]))
    assert [(row["caught"], row["located"], row["failed"]) for row in report["mutants"]] == [
        (False, False, True),
        (True, True, False),
    ]
    assert (report["ok"], report["missed"], report["caught"]) == (False, 1, 1)
    (finding,) = report["findings"]
    assert finding["rule"] == "verifier-failed" and "KeyError: 'layers.0.mlp'" in finding["what"]
    assert "FAILED" in text_of(report)


def test_stops_need_the_words_and_the_rank() -> None:
    failure = RankFailure("rank 2 holds up the others at 0STEP", 2)
    assert Stops("0STEP", (2,)).is_placed(failure) and Stops("holds up").is_placed(failure)
    assert not Stops("0STEP", (1,)).is_placed(failure) and not Stops("0F1", (2,)).is_placed(failure)


def test_what_goes_wrong_between_copies_is_located_and_the_loss_of_step_1_does_not_see_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", "--mutations", "--only", "AL10, AL12, XX07", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in report["mutants"] if not row["located"]] == []
    assert (report["injected"], report["caught"], report["located"], report["missed"], report["false_alarms"]) == (
        3,
        3,
        3,
        0,
        0,
    )
    assert report["practice"]["loss_of_step_1"] == 0
    classes = {row["id"]: row["first_divergence"]["class"] for row in report["mutants"]}
    assert classes == {"AL10": "missing", "AL12": "order only", "XX07": "scaled"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mutations", "--only", "GN77"], "GN07"),
        (["--only", "GN07"], "--mutations"),
        (["plan.toml", "--mutations"], "PLAN"),
    ],
)
def test_wrong_usage_says_what_to_do(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_every_mutant_has_its_own_name_and_no_bug_is_both_here_and_not() -> None:
    assert len({each.id for each in MUTANTS}) == len(MUTANTS)
    listed = {each.bug for each in MUTANTS if each.is_listed}
    assert not listed & set(NOT_HERE) and len(listed) + len(NOT_HERE) == 100
    assert chosen("GS07") == tuple(each for each in MUTANTS if each.bug == "GS07") != ()


def test_plans_of_mutants_are_exact_and_clip() -> None:
    plans = {each.id: each.plan() for each in MUTANTS}
    assert [
        name for name, plan in plans.items() if plan.numerics.mode != "exact" or plan.optimizer.clip_grad_norm <= 0
    ] == []
