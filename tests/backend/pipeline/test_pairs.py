"""The parts of OVERLAP_F_B pairs in turns: one computes while the other waits, with the same bits and
operations as one after the other."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import groupby, pairwise

import pytest
import torch

from helpers.plans import product_plan
from helpers.program import assert_every_action_records_the_program
from shardproof.backend.base.observe import Observer
from shardproof.backend.pipeline.overlap import PairRunner
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.trainer import Trainer
from shardproof.backend.transport.baton import Baton
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.backend.unsupported import unsupported
from shardproof.core.base.errors import DivergedError
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.plan.sections import DataParallel, ScheduleChoice
from shardproof.core.schedule.action import Kind
from shardproof.verify.dynamic.proof import prove

MOE = Recompute("selective", modules=("core_attn", "moe"))


def tiny(
    layout, *, schedule="Combined1F1B", model="tiny-moe", samples=6, mode="exact", recompute=MOE, turns=True, **choices
) -> Plan:
    return product_plan(
        layout,
        model=model,
        hidden_size=32,
        num_heads=6,
        num_kv_heads=3,
        **{"num_experts": 6, "experts_per_token": 2} if model == "tiny-moe" else {},
        samples=samples,
        ep_comm_overlap=turns or None,
        **choices,
        dtype="fp32",
        recompute=recompute,
        schedule=schedule,
        mode=mode,
        **{"gradient_token_block": 6, "reduction_token_block": 2} if mode == "exact" else {},
        clip_grad_norm=0.1,
        steps=2,
        learning_rate=0.01,
    )


EP3 = Layout(tp=3, ep=3, etp=1, sequence_parallel=True)
EP2_CP2 = Layout(pp=2, cp=2, ep=2)


# bits and operations


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(tiny(EP3, tp_comm_overlap=True), id="tp3-ep3-sp"),
        pytest.param(tiny(EP2_CP2, schedule="DualPipe", samples=4), id="dualpipe-pp2-cp2-ep2"),
    ],
)
def test_no_bit_differs_between_turns_and_one_device(plan):
    proof = prove(plan, transport="memory", steps=1)
    assert proof.changes == () and proof.findings == () and proof.report["bits_different"] == 0


def test_no_bit_differs_over_gloo():
    proof = prove(tiny(Layout(dp=2, ep=2)), steps=1)
    assert proof.ok and proof.changes == ()


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_every_part_records_what_it_would_by_itself(mode):
    plan = tiny(Layout(tp=2, pp=2, etp=2, sequence_parallel=True), mode=mode)
    sent = assert_every_action_records_the_program(plan)
    assert sum(sent.values()) > 100


def spans_of_a_step(transport, plan):
    """The parts of this rank's pairs, the actions of its operations in the order in which they ran, and
    the spans of one step."""
    transport.recorder.enabled = True
    _, spans = TrainingRank(transport, plan).step(0)
    pairs = [span.action.parts for span in spans if span.action.kind is Kind.OVERLAP_F_B]
    return pairs, [action for action, _ in transport.recorder.events], spans


def test_parts_compute_in_turns_only_where_the_plan_asks_for_it():
    for turns in (True, False):
        plan = tiny(EP3, turns=turns, mode="fast")
        for pairs, actions, spans in run_threads(MemoryWorld(3, timeout_s=60), spans_of_a_step, plan):
            assert len(pairs) == plan.num_microbatches - 1
            for pair in pairs:
                changes = [action for action, _ in groupby(action for action in actions if action in pair)]
                assert len(changes) > 2 if turns else changes == list(pair)
            lanes = {span.lane for span in spans}
            assert lanes == ({"compute", "dp", "F:tp", "F:ep", "B:tp", "B:ep"} if turns else {"compute", "dp"}), lanes


def test_turns_are_measured_on_lanes_that_do_not_overlap_themselves():
    plan = tiny(EP3, mode="fast")
    timeline = Trainer(plan, transport="memory").fit().timeline
    pairs = [span for span in timeline.select(0) if span.action.kind is Kind.OVERLAP_F_B]
    for lane in ("F:ep", "B:ep"):
        spans = timeline.select(0, lane)
        assert all(one.end_s <= other.start_s for one, other in pairwise(spans))
        for span in spans:
            assert any(
                pair.start_s <= span.start_s <= span.end_s <= pair.end_s and span.action in pair.action.parts
                for pair in pairs
            )


class Poison(Observer):
    """Makes one gradient of microbatch 1, whose backward is part of a pair, no number."""

    def activation(self, name, microbatch, slices, tensor):
        if microbatch.index == 1 and name == "layers.0.attention.norm" and tensor.requires_grad:
            tensor.register_hook(lambda gradient: gradient * torch.nan)


def poisoned_step(transport, plan):
    with pytest.raises(DivergedError) as caught:
        TrainingRank(transport, plan, observer=Poison() if transport.global_rank == 1 else None).step(0)
    return str(caught.value)


def test_a_gradient_of_a_pair_that_is_no_number_is_reported_by_all_ranks():
    reported = run_threads(
        MemoryWorld(2, timeout_s=60), poisoned_step, tiny(Layout(dp=2, ep=2), mode="fast", recompute=Recompute())
    )
    assert reported[0] == reported[1] and "no finite numbers" in reported[0] and "rank 1" in reported[0], reported


# turns


@pytest.fixture
def runner():
    return PairRunner(0, Baton(), torch.device("cpu"))


def test_each_part_computes_while_the_other_waits_and_never_both_at_once(runner):
    baton, reported, computing = runner.baton, [], []

    def compute(name):
        assert not computing, f"{name} during {computing}"
        computing.append(name)
        reported.append(name)
        computing.clear()

    data = {name: threading.Semaphore(0) for name in ("forward", "backward")}

    def part(name, other):
        for _ in range(3):
            compute(name)
            data[other].release()
            with baton.lent():
                assert data[name].acquire(timeout=600), f"nothing runs while {name} waits"
        compute(name)

    runner.run(lambda: part("forward", "backward"), lambda: part("backward", "forward"))
    assert reported[:2] == ["forward", "backward"] and reported.count("forward") == reported.count("backward") == 4


def test_a_part_without_the_other_is_idle_while_it_waits_and_a_thread_without_the_baton_lends_nothing(runner):
    baton, wait = runner.baton, threading.Event()

    def forward():
        with baton.lent():
            wait.wait(0.2)

    runner.run(forward, lambda: None)
    assert baton.idle_s > 0.1
    before = baton.idle_s
    with baton.lent():
        pass
    assert baton.idle_s == before


@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_a_part_that_fails_ends_the_other_at_its_next_turn(runner, failing):
    turns = []

    def part(name):
        for turn in range(100):
            turns.append(name)
            if name == failing and turn == 3:
                raise FloatingPointError(f"{name} has failed")
            with runner.baton.lent():
                threading.Event().wait(0.001)

    with pytest.raises(FloatingPointError, match=f"{failing} has failed"):
        runner.run(lambda: part("forward"), lambda: part("backward"))
    assert turns.count(failing) == 4 and len(turns) < 100


def test_a_runner_nobody_has_any_more_ends_its_thread():
    runner = PairRunner(77, Baton(), torch.device("cpu"))
    runner.run(lambda: None, lambda: None)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "rank 77 lane backward")
    del runner
    thread.join(10)
    assert not thread.is_alive()


# plans


def test_a_schedule_without_pairs_is_refused():
    plan = tiny(Layout(dp=2, ep=2), schedule="1F1B")
    (problem,) = unsupported(plan)
    assert (
        problem.startswith("runtime.ep_comm_overlap=true")
        and ("1F1B with 3 microbatches has no pairs. Use Combined1F1B") in problem
    )
    paired = replace(plan, schedule=ScheduleChoice("Combined1F1B"))
    assert unsupported(paired) == [] and Kind.OVERLAP_F_B in schedule_for(paired).actions.kind


def test_torchs_fully_shard_whose_hooks_expect_one_thread_is_refused_with_turns():
    plan = tiny(Layout(dp=2, zero=3), model="tiny-gpt", mode="fast", recompute=Recompute())
    (problem,) = unsupported(replace(plan, data_parallel=DataParallel(library="torch")))
    assert (
        'data_parallel.library="torch" with runtime.ep_comm_overlap=true' in problem
        and "Use ep_comm_overlap=false" in problem
    )
