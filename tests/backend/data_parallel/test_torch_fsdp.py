"""torch's `fully_shard` in place of our ZeRO: the same training, parameters in parts, checkpoints that
any layout goes on from."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from helpers.plans import product_plan
from shardproof import Trainer
from shardproof.backend.base.libraries import libraries_of
from shardproof.backend.launching.launch import preload, run_ranks
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.unsupported import unsupported
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.sections import DataParallel
from shardproof.core.plan.train import Checkpoint
from shardproof.verify.dynamic.proof import prove

STEPS = 3
TORCH = DataParallel(library="torch")

# 20 and 10 rows of a weight do not divide by 3.
SIZES = {"num_layers": 2, "hidden_size": 20, "num_heads": 2, "num_kv_heads": 2, "ffn_hidden_size": 10, "head_dim": 10}
tiny = partial(product_plan, **SIZES, samples=6, sequence=16, dtype="fp32", steps=STEPS, learning_rate=1e-2)


def trained(transport, plan):
    """Losses and norms of all steps, held-out loss, whole weights, and the bytes of the stage's weights that lie on
    this rank between steps: what it keeps, and what is still gathered."""
    rank = TrainingRank(transport, plan)
    steps = [rank.step(step)[0] for step in range(plan.train.steps)]
    evaluated = rank.evaluate()
    rank.refresh()
    gathered = sum(shard.storage.untyped_storage().nbytes() for shard in rank.shards)
    retained = sum(piece.tensor.nbytes for stage in rank.data_parallel.values() for piece in stage.pieces)
    with rank.whole_masters():
        weights = {shard.parameter.name: (shard.slices, shard.tensor.clone()) for shard in rank.shards}
    return [(step.loss, step.grad_norm) for step in steps], evaluated, weights, retained, gathered


@pytest.mark.parametrize(
    ("plan", "one"),
    [
        (tiny(Layout(dp=3, zero=3), data_parallel=TORCH), tiny(Layout())),
        (
            tiny(
                Layout(tp=2, dp=2, zero=2, sequence_parallel=True),
                model="tiny-llama",
                schedule="GPipe",
                data_parallel=TORCH,
                recompute=Recompute("full"),
            ),
            tiny(Layout(), model="tiny-llama"),
        ),
    ],
    ids=["zero3 dp3, a tied table", "zero2 tp2 dp2 sp, recomputed"],
)
def test_fully_shard_trains_as_one_device_does_and_keeps_parts_only(plan, one):
    assert unsupported(plan) == []
    ((losses, evaluated, weights, total, _),) = run_ranks(trained, one, world_size=1, transport="memory")
    preload(*libraries_of(plan, saves=False))
    ranks = run_ranks(trained, plan, world_size=plan.layout.world_size, transport="gloo")
    for own_losses, own_evaluated, own_weights, retained, gathered in ranks:
        assert torch.allclose(torch.tensor(own_losses), torch.tensor(losses), rtol=1e-5)
        assert own_evaluated == pytest.approx(evaluated, rel=1e-5)
        for name, (slices, weight) in own_weights.items():
            torch.testing.assert_close(weight, weights[name][1][slices], rtol=1e-3, atol=1e-4)
        assert retained < 1.4 / plan.layout.dp * total and gathered == 0
    by_tp = plan.layout.tp
    assert sum(retained for *_, retained, _ in ranks[::by_tp]) == sum(
        weight.nbytes for _, weight in ranks[0][2].values()
    )


def test_every_tensor_of_its_steps_is_within_the_bounds_of_fast_numerics():
    proof = prove(tiny(Layout(dp=3, zero=3), data_parallel=TORCH), steps=2)
    assert proof.ok and proof.report["fast"]["tensors"] > 500 and proof.report["fast"]["tensors_outside"] == 0
    assert 0 < proof.report["fast"]["nearest"]["share"] < 0.1
    assert any("fully_shard adds in its collectives' order" in change for change in proof.changes)


def test_a_checkpoint_of_it_goes_on_under_another_layout(tmp_path):
    saved = Checkpoint(str(tmp_path / "saved"))
    first = replace(tiny(Layout(dp=3, zero=3), data_parallel=TORCH), checkpoint=saved)
    Trainer(replace(first, train=replace(first.train, steps=2))).fit()
    resumed = Trainer(replace(tiny(Layout(tp=2)), checkpoint=saved), transport="memory", resume=True).fit()
    undisturbed = Trainer(tiny(Layout()), transport="memory").fit()
    assert resumed.first_step == 2
    assert resumed.losses[0] == pytest.approx(undisturbed.losses[2], rel=1e-5)


def test_ranks_that_are_threads_are_refused():
    with pytest.raises(PlanError, match="wants ranks that are processes"):
        Trainer(tiny(Layout(dp=2, zero=3), data_parallel=TORCH), transport="memory").fit()


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"layout": Layout(dp=2, zero=1)}, r"zero=1 keeps them whole on every rank\. Set layout\.zero = 3"),
        ({"mode": "exact"}, r'Set numerics\.mode = "fast", or leave library out\.'),
        (
            {"data_parallel": replace(TORCH, bucket_bytes=64, overlap_grad_reduce=True)},
            r"overlap_grad_reduce=True, bucket_bytes=64\.",
        ),
    ],
    ids=["whole parameters", "exact", "our buckets"],
)
def test_plans_that_torch_has_no_use_for_are_refused(choices, words):
    with pytest.raises(PlanError, match=words):
        tiny(**{"layout": Layout(dp=2, zero=3), "data_parallel": TORCH, **choices})


def test_what_it_does_not_run_is_said_with_what_does():
    plan = tiny(Layout(pp=2, dp=2, zero=3), data_parallel=TORCH, dtype="bf16", samples=7)
    assert [problem.partition("Use ")[2] for problem in unsupported(plan)] == [
        'layout.pp=1 or data_parallel.library="shardproof".',
        'batch.global=6 or data_parallel.library="shardproof".',
        'precision.dtype="fp32" or data_parallel.library="shardproof".',
    ]
