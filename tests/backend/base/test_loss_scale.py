"""fp16: losses are scaled by a power of two that adapts itself; an overflow makes all ranks skip the step;
no bit depends on cuts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from helpers.gates import sampled
from helpers.plans import product_plan
from shardproof import Plan, Trainer
from shardproof.backend.base.loss_scale import LossScale
from shardproof.backend.launching.launch import run_ranks
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.core.base.errors import DivergedError, PlanError
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.sections import DataParallel, Precision
from shardproof.verify.dynamic.proof import prove

TOO_MUCH = 2.0**20
"""A scale that overflows at once: fp16 ends at 65504."""


ONE = Layout()

ALL_AT_ONCE, EARLY = DataParallel(), DataParallel(bucket_bytes=2000, overlap_grad_reduce=True)
"""Gradients of a stage reduced together, and in buckets under the last backward."""


def tiny(layout=ONE, *, dtype="fp16", mode="exact", schedule="1F1B", steps=3, model=None, **precision) -> Plan:
    return product_plan(
        layout,
        model=model
        or replace(
            model_preset("tiny-gpt"), num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=2, ffn_hidden_size=32
        ),
        samples=4,
        sequence=16,
        dtype=dtype,
        **precision,
        mode=mode,
        **{"gradient_token_block": 4, "reduction_token_block": 4} if mode == "exact" else {},
        schedule=schedule,
        steps=steps,
        learning_rate=0.01,
    )


@pytest.mark.parametrize("seed", range(3))
def test_without_hysteresis_the_scale_goes_as_torchs(seed):
    """Oracle: the update of `torch.amp.GradScaler`."""
    draw = random.Random(seed)
    scale = LossScale(2.0**10, 2.0**-30, window=4, hysteresis=1, num_good=0, patience=1)
    theirs, tracker = torch.tensor(2.0**10), torch.tensor(0, dtype=torch.int32)
    for _ in range(60):
        overflow = draw.random() < 0.2
        scale = scale.after(overflow=overflow)
        torch._amp_update_scale_(theirs, tracker, torch.tensor(float(overflow)), 2.0, 0.5, 4)
        assert (scale.value, scale.num_good) == (theirs.item(), tracker.item())


def test_hysteresis_bears_overflows_until_the_scale_has_grown_again():
    """Megatron-LM's `DynamicGradScaler`: once the patience is used up every overflow counts, until
    `window` good steps renew it."""
    scale = LossScale(64.0, 1.0, window=2, hysteresis=3, num_good=0, patience=3)
    values = []
    for overflow in (True, True, True, True, False, False, True, True, True):
        scale = scale.after(overflow=overflow)
        values.append(scale.value)
    assert values == [64, 64, 32, 16, 16, 32, 32, 32, 16]


def test_at_the_smallest_scale_no_further_overflow_is_borne():
    scale = LossScale(2.0, 1.0, window=5, hysteresis=1, num_good=0, patience=1)
    assert scale.bears_overflow
    smallest = scale.after(overflow=True)
    assert smallest.value == 1.0 and not smallest.bears_overflow
    constant = LossScale.of(Precision("fp16", loss_scale=8.0))
    assert constant.bears_overflow and not constant.after(overflow=True).bears_overflow
    assert constant.after(overflow=False).after(overflow=True).value == 8.0
    assert not LossScale.of(Precision("bf16")).bears_overflow


def test_what_a_checkpoint_keeps_is_all_that_changes():
    scale = LossScale.of(Precision("fp16")).after(overflow=True).after(overflow=False)
    assert LossScale.of(Precision("fp16")).restored(scale.state) == scale != LossScale.of(Precision("fp16"))


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ({"loss_scale": 1000.0}, r"loss_scale=1000 is no power of two\. Use 1024\."),
        ({"initial_loss_scale": 3.0}, r"initial_loss_scale=3 is no power of two\."),
        (
            {"loss_scale": 8.0, "loss_scale_window": 5},
            r"loss_scale=8 is a constant, so loss_scale_window=5 is about nothing\.",
        ),
        ({"min_loss_scale": 8192.0}, r"min_loss_scale=8192 is above initial_loss_scale=4096\."),
        ({"dtype": "bf16", "loss_scale": 8.0}, r'loss_scale=8\.0 scales losses for fp16, but dtype="bf16"\.'),
    ],
)
def test_scales_that_make_no_sense_are_refused(precision, words):
    with pytest.raises(PlanError, match=words):
        tiny(**precision)


def test_loss_scales_survive_a_plan_file():
    plan = tiny(initial_loss_scale=256.0, loss_scale_hysteresis=1)
    assert Plan.from_toml(plan.to_toml()) == plan


def steps_of(transport, plan):
    """What the rank knows of each step, and whether its weights changed in it."""
    rank, found = TrainingRank(transport, plan), []
    for step in range(plan.train.steps):
        before = [one.tensor.clone() for one in rank.optimizer.held]
        result, _ = rank.step(step)
        changed = any(not torch.equal(a, one.tensor) for a, one in zip(before, rank.optimizer.held, strict=True))
        found.append((result.loss, result.loss_scale, result.skipped, changed))
    return found


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_an_overflow_makes_every_rank_skip_the_step_and_halve_the_scale(mode):
    plan = tiny(Layout(tp=2, pp=2), mode=mode, initial_loss_scale=TOO_MUCH, loss_scale_hysteresis=1, steps=8)
    ranks = run_ranks(steps_of, plan, world_size=4, transport="memory")
    assert all(rank == ranks[0] for rank in ranks[1:])
    skipped = [skipped for _, _, skipped, _ in ranks[0]]
    assert skipped[:4] == [True] * 4 and not all(skipped)
    assert [scale for _, scale, _, _ in ranks[0]] == [TOO_MUCH / 2 ** sum(skipped[:step]) for step in range(8)]
    assert [changed for *_, changed in ranks[0]] == [not each for each in skipped]


def test_losses_follow_those_of_fp32_whatever_the_scale():
    """Scaling changes only what fp16 could not hold: after three steps losses are within its 2^-11 of fp32's,
    times a few roundings."""
    fp32 = Trainer(tiny(dtype="fp32", mode="fast"), transport="memory").fit().losses
    for scale in (1.0, 64.0, 1024.0):
        fp16 = Trainer(tiny(mode="exact", loss_scale=scale), transport="memory").fit().losses
        assert max(abs(a - b) / b for a, b in zip(fp16, fp32, strict=True)) < 4e-3
        assert fp16 != fp32


EXPERTS = replace(
    model_preset("tiny-llama"),
    num_layers=2,
    num_experts=4,
    experts_per_token=2,
    expert_ffn_hidden_size=16,
    first_dense_layers=0,
)


@sampled(
    "plan",
    [
        tiny(Layout(tp=2, pp=2)),
        tiny(Layout(tp=2, dp=3, sequence_parallel=True), initial_loss_scale=2.0**17, loss_scale_hysteresis=1, steps=5),
        tiny(Layout(pp=2, cp=2), schedule="ZBH1"),
        tiny(Layout(tp=2, ep=2, etp=1), model=EXPERTS),
        tiny(Layout(dp=2, zero=1), initial_loss_scale=2.0**17, loss_scale_hysteresis=1, steps=4),
        replace(tiny(Layout(dp=3), initial_loss_scale=2.0**17, loss_scale_hysteresis=1, steps=4), data_parallel=EARLY),
    ],
    ids=[
        "tp2 pp2",
        "sp2 dp3, with overflows",
        "cp2, split backward",
        "experts",
        "zero, with overflows",
        "early buckets, with overflows",
    ],
    on_push=3,
)
def test_no_bit_depends_on_the_layout(plan):
    if plan.model.is_moe:
        plan = replace(plan, train=replace(plan.train, router_aux_loss=0.01, router_z_loss=0.001))
    proof = prove(plan, transport="memory", steps=plan.train.steps)
    assert proof.report["bits_different"] == 0 and proof.ok, proof.text()
    assert len(proof.report["losses"]) == plan.train.steps


def test_a_run_reports_which_steps_it_skipped():
    result = Trainer(tiny(initial_loss_scale=2.0**15, loss_scale_hysteresis=1, steps=4), transport="memory").fit()
    assert result.skipped_steps == (0,) and result.report["skipped_steps"] == [0]
    assert result.report["grad_norms"][0] is None and all(result.report["grad_norms"][1:])


def test_an_overflow_that_no_scale_avoids_ends_training():
    with pytest.raises(DivergedError, match=r"step 1: .* gradient norm (nan|inf) with losses scaled by 1.04858e\+06"):
        Trainer(tiny(loss_scale=TOO_MUCH), transport="memory").fit()


# a gradient that is no number


def poisoned_rank(transport, payload):
    """Training in which one rank's first contribution to a gradient in step 1 has a NaN."""
    plan, global_rank, name = payload
    rank = TrainingRank(transport, plan)
    for stage in rank.stages.values():
        if transport.global_rank == global_rank and name in stage.shards:
            plain, poisoned = stage.gradients.add, []

            def add(usage, first_sample, contribution, plain=plain, poisoned=poisoned):
                if transport.watch.phase == "step 2" and usage.parameter.name == name and not poisoned:
                    poisoned.append(name)
                    whole = isinstance(contribution, torch.Tensor)
                    contribution = contribution if whole else list(contribution)
                    first = contribution if whole else contribution[0]
                    first.reshape(-1)[3] = float("nan")
                plain(usage, first_sample, contribution)

            stage.gradients.add = add
    try:
        for step in range(3):
            rank.step(step)
    except DivergedError as error:
        return str(error)
    return "no rank has seen it"


@sampled(
    ("layout", "mode", "global_rank", "name", "data_parallel"),
    [
        (Layout(tp=2, pp=2), "exact", 3, "layers.1.mlp.up.weight", ALL_AT_ONCE),
        (Layout(pp=2, dp=2), "fast", 1, "layers.0.attention.norm.weight", ALL_AT_ONCE),
        (Layout(dp=3), "exact", 2, "embedding.tokens.weight", ALL_AT_ONCE),
        (Layout(dp=2, pp=2, zero=1), "exact", 1, "layers.0.mlp.up.weight", ALL_AT_ONCE),
        (Layout(tp=2, dp=2, sequence_parallel=True), "fast", 2, "layers.0.mlp.up.bias", ALL_AT_ONCE),
        (Layout(dp=2), "exact", 1, "layers.1.mlp.up.weight", EARLY),
        (Layout(tp=2, dp=2, sequence_parallel=True, zero=1), "fast", 3, "layers.0.attention.norm.weight", EARLY),
        (Layout(dp=2, zero=2), "exact", 1, "layers.0.mlp.up.weight", ALL_AT_ONCE),
        (Layout(tp=2, dp=2, sequence_parallel=True, zero=2), "fast", 2, "layers.1.attention.norm.weight", ALL_AT_ONCE),
        (Layout(dp=3, pp=2, zero=2), "exact", 4, "layers.1.mlp.down.weight", ALL_AT_ONCE),
    ],
    on_push=5,
)
def test_a_nan_on_one_rank_is_seen_by_all_and_the_rank_and_tensor_are_named(
    layout, mode, global_rank, name, data_parallel
):
    plan = replace(tiny(layout, dtype="fp32", mode=mode), data_parallel=data_parallel)
    found = run_ranks(poisoned_rank, (plan, global_rank, name), world_size=layout.world_size, transport="memory")
    assert len(set(found)) == 1
    assert "step 1: " in found[0] and "the gradient norm nan" in found[0], found[0]
    assert (
        f"The gradient of {name} has 1 such elements of " in found[0] and (f"on rank {global_rank}, before") in found[0]
    ), found[0]


def poisoned_sum(transport, plan):
    """What rank 2 brings to its sums over the copies is spoilt behind its back, in the second step."""
    rank = TrainingRank(transport, plan)
    plain = rank.mesh.dp._tree_sum

    def tree_sum(parts, rows, merges):
        total = plain(parts, rows, merges)
        if rank.transport.watch.phase == "step 2" and transport.global_rank == 2:
            total.view(-1)[5] = float("inf")
        return total

    rank.mesh.dp._tree_sum = tree_sum
    try:
        for step in range(3):
            rank.step(step)
    except DivergedError as error:
        return str(error)
    return "no rank has seen it"


def test_a_sum_over_ranks_that_is_not_finite_although_its_parts_were_is_named_too():
    plan = tiny(Layout(dp=3), dtype="fp32", mode="exact")
    found = run_ranks(poisoned_sum, plan, world_size=3, transport="memory")
    assert len(set(found)) == 1 and "step 1: " in found[0], found
    assert (
        "has 1 such elements of " in found[0]
        and ("on ranks 0, 1, 2, after it was added up; each rank's own part has none") in found[0]
    )
