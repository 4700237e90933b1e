"""Steps with a rate, a weight decay and a batch of their own: no layout changes a bit, and a run that is interrupted
goes on as if it had not been."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.gates import sampled
from helpers.plans import training_plan
from shardproof.backend.base.observe import Observer
from shardproof.backend.checkpoint.resume import resumption, saved_in
from shardproof.backend.dcp.index import INDEX_FILE
from shardproof.backend.trainer import TrainJob, train_rank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.backend.unsupported import unsupported
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.batch_sizes import batch_at, samples_before
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute, Runtime
from shardproof.core.plan.sections import DataParallel, Numerics, ScheduleChoice
from shardproof.core.plan.train import Checkpoint, Train
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.matrix.modules import plans

STEPS, SAVED = 4, 2
RATES = Optimizer(
    schedule="wsd",
    warmup_steps=6,
    decay_steps=20,
    wsd_decay_steps=10,
    wsd_decay="minus_sqrt",
    initial_learning_rate=1e-3,
    minimum_learning_rate=1e-4,
    weight_decay_schedule="cosine",
    end_weight_decay=0.3,
    weight_decay_steps=20,
    counted_in="samples",
    clip_grad_norm=0.1,
)
DENSE = replace(
    model_preset("tiny-gpt"), num_layers=2, hidden_size=16, ffn_hidden_size=32, head_dim=4, hidden_dropout=0.1
)
EXPERTS = ModelSpec(
    "moe", 2, 24, 48, 6, 6, 4, 256, 64, num_experts=6, experts_per_token=2, expert_ffn_hidden_size=12, expert_bias=True
)
RAMP = {"rampup": (4, 2, 12)}
LIST = {"schedule": "0:6 6:2 9:8"}


def tiny(layout: Layout | None = None, *, batch=RAMP, model: ModelSpec = DENSE, micro: int = 1, **options) -> Plan:
    """Batches of 4, 4, 6 and 8 sequences by the ramp, 6, 2, 2 and 8 by the list."""
    block, sequence = (3, 12) if model.is_moe else (2, 8)
    train = Train(STEPS, learning_rate=1e-2, router_jitter=0.1 * model.is_moe, router_aux_loss=0.1 * model.is_moe)
    exact = Numerics("exact", gradient_token_block=block, reduction_token_block=block)
    common = {
        "samples": 8,
        "micro": micro,
        "sequence": sequence,
        "train": train,
        "optimizer": RATES,
        "numerics": exact,
        "steps": STEPS,
    }
    made = training_plan(layout, model=model, **{**common, **options})
    return replace(made, batch=replace(made.batch, **batch))


class LastState(Observer):
    """Keeps what the last step left of weights and moments."""

    def __init__(self, pieces: list):
        self.pieces = pieces

    def begin_step(self, step):
        self.pieces.clear()

    def optimizer_state(self, name, slices, moments):
        self.pieces += [(f"{name}.{moment}", slices, values.clone()) for moment, values in moments.items()]

    def weight(self, name, slices, tensor, *, step=None):
        self.pieces.append((name, slices, tensor.clone()))


def train(plan: Plan, resume: Path | None = None, *, validate: bool = False):
    """The results of the steps of a run in this process, and every rank's last pieces."""
    pieces: dict[int, list] = {rank: [] for rank in range(plan.layout.world_size)}
    job = TrainJob(
        plan,
        observer=lambda rank: LastState(pieces[rank]),
        validate=validate,
        resume=None if resume is None else str(resume),
    )
    ranks = run_threads(MemoryWorld(plan.layout.world_size, timeout_s=60), train_rank, job)
    return ranks[0], [piece for of_rank in pieces.values() for piece in of_rank]


@pytest.fixture(scope="module")
def one_device():
    """`one_device(plan)`: the results of the same problem on one device, and every tensor it ends with."""
    known = {}

    def run(plan: Plan):
        key = plan.model, plan.batch.rampup, plan.batch.schedule
        if key not in known:
            one = replace(
                plan,
                layout=Layout(),
                cluster=cluster_preset("this-host", 1),
                checkpoint=Checkpoint(),
                schedule=ScheduleChoice("1F1B"),
                batch=replace(plan.batch, micro_size=1),
                recompute=Recompute(),
                data_parallel=DataParallel(),
                runtime=Runtime(),
            )
            result, pieces = train(one)
            known[key] = result.steps, {name: tensor for name, _, tensor in pieces}
        return known[key]

    return run


def numbers(steps) -> list:
    return [(step.step, step.loss, step.grad_norm, step.learning_rate, step.num_tokens) for step in steps]


def assert_same_end(pieces, whole) -> None:
    different = [name for name, slices, tensor in pieces if not torch.equal(whole[name][slices], tensor)]
    assert pieces and not different


LAYOUTS = {
    "tp2-dp2-zero1": tiny(Layout(tp=2, dp=2, zero=1)),
    "pp2-dp2-uneven": tiny(Layout(pp=2, dp=3), batch=LIST | {"schedule": "0:6 6:3 9:8"}),
    "experts-ep2": tiny(Layout(dp=2, ep=2), model=EXPERTS),
    "cp2-sp": tiny(Layout(cp=2, tp=2, sequence_parallel=True), batch=LIST),
    "interleaved-micro2": tiny(Layout(pp=2, vpp=2), micro=2, batch=LIST),
    "dualpipe": tiny(Layout(pp=2), schedule=ScheduleChoice("DualPipe"), batch={"rampup": (4, 2, 12)}),
    "zbv-zero2": tiny(Layout(pp=2, vpp=2, dp=2, zero=2), schedule=ScheduleChoice("ZBVZeroBubble"), batch=LIST),
    "zero3": tiny(Layout(dp=2, zero=3), schedule=ScheduleChoice(max_active_stages=1)),
    "overlapped": tiny(Layout(dp=2), data_parallel=DataParallel(True, bucket_bytes=5_000)),
    "experts-etp2-tp2-sp": tiny(Layout(tp=2, dp=2, ep=2, etp=2, sequence_parallel=True), model=EXPERTS, batch=LIST),
}


@sampled("name", LAYOUTS, on_push=2)
def test_no_layout_changes_a_bit_of_a_run_whose_batches_and_rates_change(name, one_device):
    plan = LAYOUTS[name]
    assert unsupported(plan) == []
    steps, whole = one_device(plan)
    result, pieces = train(plan)
    assert numbers(result.steps) == numbers(steps)
    assert_same_end(pieces, whole)


def test_every_step_has_its_own_rate_and_batch(one_device):
    plan = tiny()
    steps, _ = one_device(plan)
    assert [step.num_tokens // 8 for step in steps] == [4, 4, 6, 8]
    assert [step.num_microbatches for step in steps] == [4, 4, 6, 8]
    assert [step.learning_rate for step in steps] == [plan.rates.learning_rate(step) for step in range(STEPS)]
    assert len({step.learning_rate for step in steps}) == 4 and steps[0].learning_rate == 1e-3


def test_a_run_is_interrupted_inside_the_ramp_and_resumed_under_another_layout(one_device, tmp_path):
    first, second = tiny(Layout(tp=2)), tiny(Layout(pp=2, dp=2, zero=1))
    first, second = (replace(plan, checkpoint=Checkpoint(str(tmp_path))) for plan in (first, second))
    steps, whole = one_device(second)
    before, _ = train(replace(first, train=replace(first.train, steps=SAVED)))
    found = resumption(second, resume=True)
    assert found is not None and found.changes == ()
    assert found.saved.state["samples"] == samples_before(second.batch, SAVED) == 8
    after, pieces = train(second, found.saved.path, validate=True)
    assert numbers(before.steps) + numbers(after.steps) == numbers(steps)
    assert_same_end(pieces, whole)


def test_held_out_losses_are_over_the_whole_batch_at_every_step():
    changing, constant = tiny(), tiny(batch={})
    first = train(replace(changing, train=replace(changing.train, steps=1)), validate=True)[0]
    other = train(replace(constant, train=replace(constant.train, steps=1)), validate=True)[0]
    assert first.validation_losses[0] == other.validation_losses[0]


def test_other_batches_or_rates_than_those_of_a_checkpoint_are_refused_or_reported(tmp_path):
    plan = replace(tiny(), checkpoint=Checkpoint(str(tmp_path)))
    train(replace(plan, train=replace(plan.train, steps=SAVED)))
    with pytest.raises(PlanError, match=r"batch.rampup=\[2, 2, 12\], saved with \[4, 2, 12\]"):
        resumption(replace(plan, batch=replace(plan.batch, rampup=(2, 2, 12))), resume=True)
    other = replace(plan, optimizer=replace(plan.optimizer, wsd_decay="linear", warmup_steps=5))
    changes = resumption(other, resume=True).changes
    assert set(changes) == {
        'optimizer.wsd_decay="linear", saved with "minus_sqrt"',
        "optimizer.warmup_steps=5, saved with 6",
    }


def test_a_schedule_that_ends_with_the_run_is_another_one_in_a_longer_run(tmp_path):
    plan = replace(tiny(), checkpoint=Checkpoint(str(tmp_path)), optimizer=Optimizer(schedule="cosine"))
    train(replace(plan, train=replace(plan.train, steps=SAVED)))
    assert resumption(plan, resume=True).changes == (f"optimizer.decay_steps={STEPS}, saved with {SAVED}",)
    fixed = replace(plan, optimizer=Optimizer(schedule="cosine", decay_steps=SAVED))
    assert resumption(fixed, resume=True).changes == ()


def test_a_checkpoint_of_a_version_without_ramps_is_no_beginning_of_one(tmp_path):
    constant = replace(tiny(batch={}), checkpoint=Checkpoint(str(tmp_path)))
    train(replace(constant, train=replace(constant.train, steps=SAVED)))
    (saved,) = saved_in(tmp_path)
    state = dict(saved.state)
    assert state["samples"] == SAVED * 8
    state["problem"]["batch"] = {"global": 8, "sequence": 8}
    del state["format"]  # so that no index is missed
    (saved.path / INDEX_FILE).unlink()
    (saved.path / "state.json").write_text(json.dumps(state))
    assert resumption(constant, resume=True).changes == ()
    with pytest.raises(PlanError, match=r"was saved after 16 samples, but by this plan its 2 steps take 8"):
        resumption(replace(constant, batch=replace(constant.batch, **RAMP)), resume=True)


@pytest.mark.parametrize(
    "plan, what",
    [
        (
            tiny(Layout(dp=2, zero=2), numerics=Numerics("fast"), batch={"schedule": "0:5 5:8"}),
            "layout.zero=2 in fast numerics with batch.schedule, of which some batches",
        ),
    ],
    ids=("sharded-sums",),
)
def test_what_is_not_run_with_changing_batches_is_said(plan, what):
    assert any(what in problem for problem in unsupported(plan))


MODULES = {
    "one-tp2": "one -> tp2",
    "tp2-dp2": "tp2 -> dp2",
    "pp2-dp3": "pp2 -> dp3",
    "joined": "cp3-tp2-sp + one -> dp2-tp2-sp",
}


@sampled("name", MODULES, on_push=1)
def test_modules_whose_batches_change_have_the_bits_of_modules_that_are_not_cut(name):
    """Batches of 3, 5 and 7 sequences: what crosses a bridge, and between which ranks, differs."""
    plan = dict(plans())[MODULES[name]]
    changing = replace(plan, batch=replace(plan.batch, rampup=(3, 2, 6)), train=replace(plan.train, steps=3))
    assert [batch_at(changing.batch, step) for step in range(3)] == [3, 5, 7]
    proof = prove(changing, transport="memory", steps=3)
    assert proof.report["bits_different"] == 0 and not proof.findings


def test_the_list_is_followed_as_it_is_written():
    batch = tiny(batch=LIST).batch
    assert [batch_at(batch, step) for step in range(STEPS)] == [6, 2, 2, 8]
