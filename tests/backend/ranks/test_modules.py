"""Several modules trained as one: no bit differs from modules that are not cut, and those are the models
called one after the other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers.gates import sampled
from helpers.modules import modular, module
from shardproof import ModularPlan, Trainer
from shardproof.backend.base.microbatch import Microbatch
from shardproof.backend.base.recorder import Recorder
from shardproof.backend.data.corpus import Corpus
from shardproof.backend.model.transformer import Stage
from shardproof.backend.numerics import make_numerics
from shardproof.backend.ranks.rank_of_plan import training_rank
from shardproof.backend.trainer import TrainJob, train_rank
from shardproof.backend.transport.base import SoloGroup
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.backend.unsupported import unsupported
from shardproof.core.base.errors import DivergedError, PlanError
from shardproof.core.plan.schedule_of import modular_schedule
from shardproof.core.plan.train import Checkpoint
from shardproof.core.schedule.action import SENDS, Kind
from shardproof.simulator.network.bridge_bytes import bridge_bytes
from shardproof.verify.ledger.compare import compare
from shardproof.verify.ledger.ledger import WEIGHT, RunLedger
from shardproof.verify.run.proof_run import ProofJob, one_device, prove_rank

SIX = "tiny-gpt-6h"

PLANS = {
    "tp4 to tp2 pp2": modular(module("encoder", tp=4), module("decoder", ["encoder"], tp=2, pp=2), samples=4),
    "dp2 to dp3, uneven": modular(module("a", dp=2), module("b", ["a"], dp=3), samples=7, schedule="GPipe"),
    "two encoders of 6 heads, bf16": modular(
        module("right", model=SIX, tp=3),
        module("left", model=SIX, pp=2),
        module("last", ["left", "right"], model=SIX, tp=6),
        samples=3,
        dtype="bf16",
    ),
    "cp2 to sequence parallelism, dp2": modular(
        module("a", cp=2, dp=2), module("b", ["a"], tp=2, dp=2, sequence_parallel=True), samples=4, micro=2
    ),
    "experts, ZeRO 1 and 2, dp2 to dp5 to dp1": modular(
        module("a", model="tiny-moe", dp=2, ep=2, zero=1),
        module("b", ["a"], dp=5, zero=2),
        module("c", ["b"], dp=1),
        samples=6,
        schedule="GPipe",
    ),
}


def ledger_of(plan: ModularPlan, steps: int = 2) -> RunLedger:
    return RunLedger.merge(run_threads(MemoryWorld(plan.world_size, timeout_s=60), prove_rank, ProofJob(plan, steps)))


@sampled("plan", PLANS.values(), ids=PLANS.keys(), on_push=3)
def test_no_bit_differs_from_modules_that_are_not_cut(plan: ModularPlan) -> None:
    assert unsupported(plan) == []
    reference, run = ledger_of(one_device(plan)), ledger_of(plan)
    assert compare(reference, run, plan.named_shapes) == []
    names = {key.tensor for key in reference.pieces if key.phase == WEIGHT}
    assert names == {name for part in plan.parts for name in part.named_shapes}
    assert len(reference.scalars("loss")) == 2 and reference.scalars("loss")[1] < reference.scalars("loss")[0]


class Gradients:
    """An observer that keeps gradients and scalars of a step."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.scalars: dict[str, float] = {}

    def begin_step(self, step: int) -> None:
        pass

    def activation(self, *_: object) -> None:
        pass

    def scalar(self, name: str, value: float) -> None:
        self.scalars[name] = value

    def gradient(self, name: str, slices: object, tensor: Tensor) -> None:
        self.gradients[name] = tensor.clone()

    def optimizer_state(self, *_: object) -> None:
        pass

    def weight(self, *_: object, step: int | None = None) -> None:
        pass


def one_step(transport, plan: ModularPlan) -> Gradients:
    seen = Gradients()
    training_rank(transport, plan, observer=seen).step(0)
    return seen


def test_modules_that_are_not_cut_are_the_models_called_one_after_the_other() -> None:
    """No schedule, no bridge, no ranks: plain calls in one graph of autograd, the inputs of the last added
    in the order written."""
    plan = one_device(modular(module("x"), module("y"), module("z", ["x"]), module("last", ["z", "y"]), samples=3))
    recorder, stages, numerics = Recorder(), {}, {}
    for part in plan.parts:
        numerics[part.name] = make_numerics(part, global_rank=part.first_rank)
        group = SoloGroup("tp", part.first_rank, recorder)
        stages[part.name] = Stage(part, part.stages[0], tp=group, numerics=numerics[part.name], recorder=recorder)
    tokens, targets = Corpus.load(plan.train.data).batch(0, 3, plan.batch.sequence, plan.train.seed)
    losses = []
    for sample in range(3):
        rows = slice(sample, sample + 1)
        microbatch = Microbatch(sample, sample, tokens[rows], targets[rows], 0)
        hidden = stages["z"](microbatch, stages["x"](microbatch, None)) + stages["y"](microbatch, None)
        losses.append(stages["last"](microbatch, hidden))
        torch.autograd.backward(losses[-1], torch.ones_like(losses[-1]))
        for stage in stages.values():
            stage.finish_gradients(microbatch)
    expected = {}
    for part in plan.parts:
        copies = SoloGroup("dp", part.first_rank, recorder)
        for name, total in stages[part.name].gradients.reduce(copies, part.samples_of).items():
            expected[f"{part.name}.{name}"] = total / tokens.numel()
    squares = numerics["x"].sum_of_squares(expected.values())

    ranks = run_threads(MemoryWorld(plan.world_size, timeout_s=60), one_step, plan)
    found = {name: gradient for rank in ranks for name, gradient in rank.gradients.items()}
    assert found.keys() == expected.keys() == {name for part in plan.parts for name in part.named_shapes}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(found["x.layers.0.mlp.up.weight"], found["y.layers.0.mlp.up.weight"])
    loss = float(numerics["x"].sum(each.detach() for each in losses)) / tokens.numel()
    assert {rank.scalars["loss"] for rank in ranks} == {loss}
    assert {rank.scalars["grad_norm"] for rank in ranks} == {math.sqrt(float(squares))}


def record(transport, plan: ModularPlan):
    rank = training_rank(transport, plan)
    transport.recorder.enabled = True
    rank.step(0)
    return [
        (action, operation.num_bytes)
        for action, operation in transport.recorder.events
        if action and action.kind in SENDS
    ]


@pytest.mark.parametrize("name", ["dp2 to dp3, uneven", "two encoders of 6 heads, bf16"])
def test_bridges_send_the_bytes_that_the_simulator_prices(name: str) -> None:
    plan = PLANS[name]
    sent = run_threads(MemoryWorld(plan.world_size, timeout_s=60), record, plan)
    for source, target in plan.joins:
        forward = bridge_bytes(plan, source, target, backward=False)
        for place in range(source.layout.tp * source.layout.dp):
            rank = source.layout.global_rank(pp=source.layout.pp - 1) + place
            measured = sum(
                num for action, num in sent[rank] if action.kind is Kind.SEND_F and action.stage == source.layout.pp - 1
            )
            assert measured == sum(num for (sender, _), num in forward.items() if sender == rank)
    for part in {target.name: target for _, target in plan.joins}.values():
        back = [bridge_bytes(plan, *join, backward=True) for join in plan.joins if join[1].name == part.name]
        for place in range(part.layout.tp * part.layout.dp):
            rank = part.first_rank + place
            measured = sum(num for action, num in sent[rank] if action.kind is Kind.SEND_B and action.stage == 0)
            assert measured == sum(num for each in back for (sender, _), num in each.items() if sender == rank)


def test_processes_over_gloo_train_modules_to_the_same_loss_and_record_the_whole_schedule(workers) -> None:
    plan = modular(module("a"), module("b", ["a"], dp=2), samples=3, schedule="GPipe")
    plan = replace(plan, train=replace(plan.train, steps=1))
    result = workers(3).run(train_rank, TrainJob(plan, validate=False))[0]
    assert [step.loss for step in result.steps] == ledger_of(plan, steps=1).scalars("loss")
    assert result.timeline.global_ranks == (0, 1, 2)
    for rank, (stage, count) in enumerate([(0, 3), (1, 2), (1, 1)]):
        row = modular_schedule(plan, count).row(stage)
        for kind in (Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.B, Kind.SEND_B, Kind.RECV_B, Kind.STEP):
            spans = [
                str(span.action)
                for span in result.timeline.spans
                if span.global_rank == rank and span.action.kind is kind
            ]
            assert spans == [str(action) for action in row if action.kind is kind], (rank, kind)


def test_a_run_of_modules_goes_on_with_the_same_bits_in_other_layouts(tmp_path) -> None:
    """Saved by tp2 and ZeRO over dp 2, gone on with by dp 3 and tp 3 in another schedule."""
    first = modular(module("a", tp=2, dp=2), module("b", ["a"], dp=2, zero=1), samples=6)
    second = modular(module("a", dp=3), module("b", ["a"], tp=3, pp=2), samples=6, schedule="GPipe")
    first, second = (
        replace(
            plan.replaced(lambda each: replace(each, model=replace(each.model, num_layers=2))),
            checkpoint=replace(plan.checkpoint, folder=str(tmp_path / "saved")),
            train=replace(plan.train, steps=steps),
        )
        for plan, steps in ((first, 1), (second, 3))
    )
    begun = Trainer(first, transport="memory").fit()
    resumed = Trainer(second, transport="memory", resume=True).fit()
    assert resumed.first_step == 1 and resumed.steps == 2
    undisturbed = ledger_of(replace(one_device(second), checkpoint=Checkpoint()), steps=3)
    assert [*begun.losses, *resumed.losses] == undisturbed.scalars("loss")
    assert list(begun.grad_norms + resumed.grad_norms) == undisturbed.scalars("grad_norm")
    other = second.replaced(lambda each: replace(each, model=replace(each.model, ffn_hidden_size=96)))
    with pytest.raises(PlanError, match=r"model.a.ffn_hidden_size=96, saved with 192"):
        Trainer(other, transport="memory", resume=True)


def test_what_modules_do_not_have_yet_is_refused_with_the_module_s_name() -> None:
    plan = PLANS["tp4 to tp2 pp2"]
    loading = replace(plan, train=replace(plan.train, load="folder"))
    with pytest.raises(
        PlanError, match=r"train.load='folder' is the folder of one model, and this plan has \[\[modules\]\]"
    ):
        Trainer(loading)
    with pytest.raises(PlanError, match="save_huggingface is about one model"):
        Trainer(plan, save_huggingface="folder")
    problems = unsupported(modular(module("a", dp=2, zero=3), module("b", ["a"], dp=2), samples=4))
    assert any(each.startswith('module "a": ') for each in problems)
    assert "the backend does not run layout.zero=3 with [[modules]] yet. Use layout.zero=2." in problems


def test_a_gradient_that_is_no_number_in_one_module_stops_all() -> None:
    """The norm is that of all modules, so ranks of every module see it in the same step."""
    plan = modular(module("a"), module("b", ["a"]), samples=2)
    seen = run_threads(MemoryWorld(plan.world_size, timeout_s=60), _spoiled, plan)
    assert all("gradient norm nan" in words for words in seen)
    assert "The gradient of layers.0.mlp.down.weight has" in seen[0]


def _spoiled(transport, plan: ModularPlan) -> str:
    rank = training_rank(transport, plan)
    if transport.global_rank == 0:
        gradients, finish = rank.stages[0].gradients, rank.stages[0].gradients.finish

        def spoil(first_sample: int) -> None:
            for name, held in gradients.held.items():
                for tensor in held:
                    if name == "layers.0.mlp.down.weight":
                        tensor.fill_(math.nan)
            finish(first_sample)

        gradients.finish = spoil  # type: ignore[method-assign]
    with pytest.raises(DivergedError) as caught:
        rank.step(0)
    return str(caught.value)
