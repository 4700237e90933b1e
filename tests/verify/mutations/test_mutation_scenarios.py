"""What mutants are judged in: a resumed run has the ledger of one that was not interrupted, an export reads back as it
was trained, and nothing that was broken stays so."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from shardproof import Plan
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.layout.layout import Layout
from shardproof.verify.ledger.compare import whole_summary
from shardproof.verify.ledger.ledger import HELD_OUT, WEIGHT, RunLedger
from shardproof.verify.mutations.catalog import MUTANTS
from shardproof.verify.mutations.patches import Broken, Patches
from shardproof.verify.mutations.plans import EXPERTS, tiny
from shardproof.verify.mutations.scenarios import Resumed, exported
from shardproof.verify.run.proof_run import ProofJob, one_device, prove_rank


def run(plan: Plan, scenario: Callable | None = None, steps: int = 2) -> dict:
    """The digests of every tensor of a run, whole, by key."""
    job = ProofJob(plan, steps, scenario=scenario, core=min(os.sched_getaffinity(0)))
    ledger = RunLedger.merge(run_threads(MemoryWorld(plan.world_size, timeout_s=60), prove_rank, job))
    return {key: whole_summary(pieces).digest for key, pieces in ledger.pieces.items()}


@pytest.mark.parametrize(
    ("plan", "layout"),
    [
        (tiny(tp=3, dp=2, samples=6, zero=1), Layout(dp=3, pp=2)),
        (tiny(dp=2, ep=2, model=EXPERTS, dtype="bf16"), Layout(tp=2)),
    ],
    ids=["tp3-zero1-to-pp2", "experts-bf16-to-tp2"],
)
def test_a_run_resumed_in_another_layout_goes_on_from_the_ledger_of_one_device(plan: Plan, layout: Layout) -> None:
    whole, resumed = run(one_device(plan)), run(plan, Resumed(layout))
    before = {key for key in whole if key.step < 0 or (key.step == 0 and key not in resumed)}
    assert resumed == {key: digest for key, digest in whole.items() if key not in before}
    assert {key.phase for key in resumed if key.step == 0} == {"optimizer state", WEIGHT}


def test_an_export_of_parts_reads_back_as_the_weights_that_were_trained() -> None:
    found = run(tiny(tp=2, pp=2, model={"tied_embeddings": True}), exported, steps=1)
    trained = {key.tensor: digest for key, digest in found.items() if (key.step, key.phase) == (0, WEIGHT)}
    assert trained == {key.tensor: digest for key, digest in found.items() if key.step == 1} != {}


def test_a_held_out_pass_stands_between_the_first_two_steps() -> None:
    found = run(tiny(dp=3, samples=3), steps=3)
    held_out = [(key.step, key.sample) for key in found if (key.phase, key.tensor) == (HELD_OUT, "embedding.output")]
    assert sorted(held_out) == [(0, 0), (0, 1), (0, 2)]
    assert [key.step for key in found if key.tensor == "validation_loss"] == [0]
    assert "validation_loss" not in {key.tensor for key in run(tiny(), steps=1)}


class Noted(Patches):
    """Patches that remember what they replaced, and what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self.replaced.append((owner, name, inspect.getattr_static(owner, name)))
        super().replace(owner, name, make)


def test_what_mutants_replace_is_there_and_comes_back_and_they_are_sent_to_ranks() -> None:
    for each in MUTANTS:
        wraps_rank = pickle.loads(pickle.dumps((Broken(each.breaks), each.scenario)))[0]
        with Noted() as patches:
            wraps_rank.breaks(patches)
            assert patches.replaced, each.id
            assert all(inspect.getattr_static(owner, name) is not was for owner, name, was in patches.replaced), each.id
        assert all(inspect.getattr_static(owner, name) is was for owner, name, was in patches.replaced), each.id
