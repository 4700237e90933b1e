"""The proofs of several modules: static over every way through them, dynamic against modules that are not cut."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from helpers.modules import modular, module
from helpers.paths import EXAMPLES
from shardproof.core.base.errors import PlanError
from shardproof.core.commands.cli import main
from shardproof.core.plan.schedule_of import modular_schedule
from shardproof.core.plan.sections import Numerics
from shardproof.core.schedule.action import Action
from shardproof.core.schedule.schedule import Schedule
from shardproof.verify.causes.describe import describe
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.ledger.compare import Difference, Values
from shardproof.verify.ledger.ledger import ACTIVATION, GRADIENT, Key, Piece, RunLedger
from shardproof.verify.ledger.relations import Relation
from shardproof.verify.mutations import parse_fault
from shardproof.verify.schedule.joined import HALTS, examine_joined, halts, ways
from shardproof.verify.symbolic.static import prove_static

EXAMPLE = EXAMPLES / "encoder_decoder.toml"
JOINING = modular(
    module("slow", tp=2, pp=2),
    module("fast", dp=1),
    module("last", ["slow", "fast"], tp=3, model="tiny-moe"),
    samples=5,
)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_every_way_from_tokens_to_the_loss_is_right_and_the_whole_does_not_halt(schedule: str) -> None:
    plan = replace(JOINING, schedule=replace(JOINING.schedule, name=schedule))
    assert list(ways(plan)) == [(0, 1, 3), (2, 3)]
    proof = examine_joined(plan)
    assert proof.ok and proof.num_ways == 2 and HALTS in proof.rules and "rendezvous-cycle" in proof.rules
    text = prove_static(plan).text
    assert "slow tp2 pp2 + fast one device -> last tp3" in text and "no rank waits in a circle" in text


def test_modules_that_cut_the_batch_differently_are_right_for_every_number_of_microbatches() -> None:
    plan = modular(module("a", dp=3), module("b", ["a"], dp=5), samples=7, schedule="GPipe")
    assert {count for part in plan.parts for count in part.microbatch_counts} == {1, 2, 3} and examine_joined(plan).ok


def rearranged(schedule: Schedule, stage: int, first: str, second: str) -> Schedule:
    """The schedule with two actions of a row exchanged."""
    rows = [[str(action) for action in row] for row in schedule.rows()]
    one, other = rows[stage].index(first), rows[stage].index(second)
    rows[stage][one], rows[stage][other] = second, first
    return Schedule.from_rows(
        schedule.name, schedule.placement, [[Action.from_str(token) for token in row] for row in rows]
    )


def test_ranks_that_wait_for_each_other_where_branches_join_are_found() -> None:
    schedule = modular_schedule(JOINING, 5)
    assert halts(schedule) == []
    found = halts(rearranged(schedule, 2, "2SEND_F0", "2RECV_B0"))
    assert {finding.rule for finding in found} == {HALTS} and any("2RECV_B0" in finding.where for finding in found)


def test_the_first_divergence_is_reported_by_module_and_rank() -> None:
    key = Key(1, ACTIVATION, "last.layers.0.output", 3)
    values = Values(1, 8, 2, (0, 0), 1.0, 2.0)
    difference = Difference(key, "differs", (6,), values, Relation("doubled", "the right values times 2", 1.0, 1.0))
    pieces = {key: tuple(Piece(rank, (2, 4), ((0, 2), (0, 4)), ()) for rank in (5, 6, 7))}
    (finding,) = describe(JOINING, RunLedger(pieces), [difference])
    assert finding.where == "step 2, rank 6, 3F3, last.layers.0.output of sample 3"
    assert (finding.rank, finding.action, finding.microbatch) == (6, "3F3", 3)
    assert (finding.tensor, finding.axis, finding.key) == ("last.layers.0.output", "tp", "layout.tp")
    assert finding.hint == (
        "Replicas on ranks 5, 7 are right: look at the tensor-parallel reduction of last.layers.0.output on rank 6."
    )
    key = Key(0, GRADIENT, "slow.layers.1.mlp.up.weight")
    (finding,) = describe(JOINING, RunLedger({key: ()}), [Difference(key, "incomplete", (3,))])
    assert "rank 3, 1REDUCE_GRAD, gradient slow.layers.1.mlp.up.weight" in finding.where


def test_the_example_is_proved_bit_for_bit_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """tp=4 to tp=2, the encoder and the decoder of the documentation."""
    assert main(["verify", str(EXAMPLE), "--dynamic", "--steps", "1", "--transport", "memory", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["bits_different"] == 0 and report["world_size"] == 6 and report["num_modules"] == 2
    assert report["checked"]["num_ways"] == 1 and report["tensors_compared"] > 300


def test_what_the_proofs_of_modules_do_not_take_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(EXAMPLE), "--write-collectives", "calls.csv"]) == 2
    assert "--write-collectives is about one model, and this plan has 2 [[modules]]" in capsys.readouterr().err
    with pytest.raises(PlanError, match="--inject is about one model"):
        prove(JOINING, fault=parse_fault("drop-reduction:0:layers.0.mlp.down"), transport="memory")
    with pytest.raises(PlanError, match="the modules have 24 ranks, and the dynamic proof runs at most 16"):
        prove(modular(module("a", tp=4, dp=3), module("b", ["a"], tp=4, dp=3), samples=3), transport="memory")


def test_a_plan_in_fast_numerics_is_proved_in_exact_ones() -> None:
    plan = modular(module("a", tp=2), module("b", ["a"]), samples=2, mode="fast")
    plan = replace(plan, numerics=Numerics("fast"))
    proof = prove(plan, transport="memory", steps=1)
    assert (
        proof.ok
        and "numerics.mode fast -> exact" in proof.text()
        and ("against one device for each of 2 modules") in proof.text()
    )
