"""A proof whose ranks wait for each other ends like training: after the plan's own limit, and with the circle named."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import pytest

from helpers.gates import sampled
from shardproof import Plan
from shardproof.core.base.errors import RankFailure
from shardproof.verify.dynamic import proof as dynamic
from shardproof.verify.mutations.mutants_hangs import sends_the_last_first
from shardproof.verify.mutations.patches import Broken
from shardproof.verify.mutations.plans import tiny
from shardproof.verify.run.proof_run import ProofJob, run_ledger, train_steps

LIMIT_S = 3.0


def limited(**degrees) -> Plan:
    plan = tiny(**degrees)
    return replace(plan, train=replace(plan.train, timeout_s=LIMIT_S))


@sampled("transport", ["gloo", "memory"], on_push=1)
def test_sends_in_the_wrong_order_end_the_proof_after_the_plans_limit_and_name_the_circle(
    transport, monkeypatch
) -> None:
    monkeypatch.setattr(dynamic, "ProofJob", partial(ProofJob, wraps_rank=Broken(sends_the_last_first)))
    with pytest.raises(RankFailure) as caught:
        dynamic.prove(limited(pp=2), transport=transport, steps=1)
    text = str(caught.value)
    assert text.startswith("no rank has come further for 3 s: ranks 0, 1 wait for each other; all ranks were ended.")
    assert "rank 0 waits for 1B0 from rank 1 to run 0B0 (step 1, action" in text, text
    assert "rank 1 waits for 0F0 from rank 0 to run 1F0 (step 1, action" in text, text
    assert caught.value.report is not None and caught.value.report["circle"]


def pauses(transport, job):
    """One device that has something else to do after its step, for longer than the plan's limit."""
    ledger = train_steps(transport, job)
    threading.Event().wait(1.0)
    return ledger


def test_one_device_waits_for_nobody_and_has_no_limit() -> None:
    plan = tiny()
    plan = replace(plan, train=replace(plan.train, timeout_s=0.2))
    assert run_ledger(ProofJob(plan, 1, scenario=pauses), "memory").scalars("loss")
