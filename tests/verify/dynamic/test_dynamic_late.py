"""Weights that are gathered during the next forward (`overlap_param_gather`) are proved as they run: nobody
waits for an observer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from shardproof import Plan, Trainer
from shardproof.backend.data_parallel.late import LateGather
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.commands.cli import main
from shardproof.core.plan.sections import DataParallel
from shardproof.core.plan.train import Checkpoint
from shardproof.verify.causes.against import compare_saved
from shardproof.verify.dynamic import proof as dynamic
from shardproof.verify.ledger.file import read_ledger
from shardproof.verify.ledger.ledger import NO_STEP, WEIGHT, Key, LedgerWriter
from shardproof.verify.mutations.mutants_parameters import trains_before_the_gather
from shardproof.verify.mutations.patches import Broken
from shardproof.verify.mutations.plans import tiny
from shardproof.verify.run.proof_run import ProofJob
from shardproof.verify.run.record import ledger_observers

LATE = DataParallel(overlap_param_gather=True, bucket_bytes=2000)
PLAN = tiny(dp=3, samples=3, zero=1, sections={"data_parallel": LATE})
NO_WAIT = partial(trains_before_the_gather, ("layers.1",))


def waits(transport, given: tuple[Plan, bool]) -> list[str]:
    """What a rank of three steps and a held-out pass waits for, in order, with an observer or without."""
    plan, observes = given
    observer = LedgerWriter(transport.global_rank, plan.named_shapes) if observes else None
    rank = TrainingRank(transport, plan, observer=observer)
    rank.show_state(NO_STEP)
    found: list[str] = []
    for stage in rank.data_parallel.values():
        late = stage._late
        assert isinstance(late, LateGather)
        wait_for = late.wait_for

        def noted(part: str, wait_for: Callable[[str], None] = wait_for) -> None:
            found.append(f"{rank.transport.watch.phase}: {part}")
            wait_for(part)

        late.wait_for = noted
    for step in range(3):
        rank.step(step)
        if step == 1:
            rank.evaluate()
    return found


def test_a_rank_with_an_observer_waits_for_what_it_waits_for_without() -> None:
    plan = tiny(dp=2, pp=2, zero=2, sections={"data_parallel": LATE})
    alone, seen = (run_threads(MemoryWorld(4, timeout_s=60), waits, (plan, observes)) for observes in (False, True))
    assert alone == seen and "step 2: layers.0" in alone[0]


def test_all_weights_of_every_step_are_shown_where_they_are_used_or_at_the_end() -> None:
    """By the rank that updates a part with the step, by all three whole."""
    found = dynamic.run_ledger(ProofJob(PLAN, 3), "memory").pieces
    for step in range(3):
        for name, shape in PLAN.named_shapes.items():
            whole = tuple((0, size) for size in shape)
            pieces = found[Key(step, WEIGHT, name)]
            assert {piece.global_rank for piece in pieces if piece.region == whole} == {0, 1, 2}
            assert len(pieces) > 3
    assert dynamic.prove(PLAN, transport="memory").findings == ()


def test_a_forward_that_does_not_wait_is_found_with_the_weights_that_it_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", "--mutations", "--only", "XX32,SB01", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in report["mutants"] if not row["located"]] == []
    assert (report["injected"], report["missed"], report["false_alarms"]) == (3, 0, 0)


def test_a_proof_over_processes_finds_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dynamic.prove(PLAN).ok
    monkeypatch.setattr(dynamic, "ProofJob", partial(ProofJob, wraps_rank=Broken(NO_WAIT)))
    first = dynamic.prove(PLAN).report["first_divergence"]
    assert (first["step"], first["phase"], first["tensor"]) == (2, WEIGHT, "layers.1.attention.qkv.weight")
    assert first["class"] == "stale"


def trained(plan: Plan, folder: Path, **choices) -> None:
    Trainer(plan, transport="memory", observer=ledger_observers(plan, str(folder)), **choices).fit()


def test_saved_ledgers_of_such_runs_are_compared_and_so_is_one_that_goes_on(tmp_path: Path) -> None:
    one, saving = tiny(samples=3), replace(PLAN, checkpoint=Checkpoint(str(tmp_path / "checkpoints"), every=2))
    trained(one, tmp_path / "one")
    trained(PLAN, tmp_path / "late")
    Trainer(replace(saving, train=replace(PLAN.train, steps=2)), transport="memory").fit()
    trained(saving, tmp_path / "resumed", resume=True)
    right = read_ledger(tmp_path / "one")
    for name in ("late", "resumed"):
        found = compare_saved(read_ledger(tmp_path / name), right)
        assert found.ok and found.report["tensors_different"] == 0 and found.report["bitwise"], found.text
