"""Cross-entropy over a cut vocabulary: against plain torch in fp64, equal bits on any number of ranks,
and what a plan may choose.

Bound. Every term of a loss is a sum of at most v fp32 numbers of the size of the largest logit (a tree or the library's
order: off by at most v u of the sum of their sizes, u = 2^-24) after a handful of roundings, so 2 (v + 8) u relative to
|log Z| + |largest logit| + 1.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from helpers.plans import plan
from shardproof.backend.numerics import OwnedLeaves
from shardproof.backend.numerics.exact import ExactNumerics
from shardproof.backend.numerics.fast import FastNumerics
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.tensor_parallel.cross_entropy import IGNORE_INDEX, LossChoice, vocab_parallel_cross_entropy
from shardproof.backend.trainer import TrainJob, train_rank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.backend.unsupported import unsupported
from shardproof.core.base.errors import ModelError, PlanError, RankFailure
from shardproof.core.layout.leaves import LeafSizes, Leaves
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.program import operations
from shardproof.core.schedule import lower
from shardproof.core.schedule.action import Kind
from shardproof.simulator.simulation.simulate import simulate
from shardproof.verify.symbolic.symbolic import prove

CPU = torch.device("cpu")
VOCABULARY = Leaves(101, 7)
NUMERICS = {
    "exact": ExactNumerics(LeafSizes(Leaves(1, 1), Leaves(1, 1), VOCABULARY, 8, 4), CPU),
    "fast": FastNumerics(CPU),
}
CHOICES = {
    "plain": LossChoice(),
    "smoothed": LossChoice(label_smoothing=0.1),
    "z": LossChoice(z_loss=0.02),
    "padded": LossChoice(padding_rows=9),
    "padded by whole ranks": LossChoice(padding_rows=60),
    "all": LossChoice(label_smoothing=0.3, z_loss=0.01, padding_rows=9),
}


def problem(dtype=torch.float32, padding_rows=0, ignore_index=IGNORE_INDEX):
    """Logits [3, 5, 101], targets with two tokens that do not count, and a gradient of the losses."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 5, 101, generator=generator) * 4
    logits[..., 101 - padding_rows :] += 30  # padding that would win
    targets = torch.randint(0, 101 - padding_rows, (3, 5), generator=generator)
    targets[0, 0] = targets[2, 3] = ignore_index
    return logits.to(dtype), targets, torch.rand(3, 5, generator=generator)


def oracle(logits, targets, dlosses, choice):
    """Losses and gradient by plain torch in fp64."""
    leaf = logits.double().requires_grad_()
    ids = leaf[..., : 101 - choice.padding_rows]
    losses = F.cross_entropy(
        ids.flatten(0, 1),
        targets.flatten(),
        reduction="none",
        label_smoothing=choice.label_smoothing,
        ignore_index=choice.ignore_index,
    ).view(targets.shape)
    losses = losses + choice.z_loss * ids.logsumexp(-1) ** 2 * (targets != choice.ignore_index)
    (losses * dlosses).sum().backward()
    return losses.detach(), leaf.grad


def cross_entropy_rank(transport, payload):
    """Losses, and the gradient of this rank's logits."""
    mode, choice, (logits, targets, dlosses) = payload
    group = transport.group("tp", "tp", range(transport.world_size))
    leaves = OwnedLeaves(VOCABULARY, 1, group.size, group.rank)
    own = logits[..., slice(*leaves.items)].contiguous().requires_grad_()
    losses = vocab_parallel_cross_entropy(
        own, targets, leaves=leaves, group=group, numerics=NUMERICS[mode], choice=choice
    )
    (losses * dlosses).sum().backward()
    return losses.detach(), own.grad


def run(tp, mode, choice, inputs):
    """Losses, the same on every rank, and the whole gradient."""
    ranks = run_threads(MemoryWorld(tp, timeout_s=60), cross_entropy_rank, (mode, choice, inputs))
    assert all(torch.equal(losses, ranks[0][0]) for losses, _ in ranks)
    return ranks[0][0], torch.cat([gradient for _, gradient in ranks], -1)


@pytest.mark.parametrize("mode", NUMERICS)
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("tp", [1, 2, 3, 5, 6])
def test_losses_and_gradients_agree_with_plain_torch_in_fp64(tp, name, mode):
    choice = CHOICES[name]
    inputs = problem(padding_rows=choice.padding_rows)
    expected, expected_gradient = oracle(*inputs, choice)
    losses, gradient = run(tp, mode, choice, inputs)
    size = inputs[0].abs().max().item() + inputs[0].double().logsumexp(-1).abs().max().item() + 1
    bound = 2 * (101 + 8) * 2**-24 * size * (1 + 2 * choice.z_loss * size)
    assert (losses - expected).abs().max() < bound
    assert (gradient - expected_gradient).abs().max() < bound
    assert losses[0, 0] == losses[2, 3] == 0 and not gradient[0, 0].any() and not gradient[2, 3].any()
    if choice.padding_rows:
        assert not gradient[..., -choice.padding_rows :].any()


@pytest.mark.parametrize("name", CHOICES)
def test_exact_bits_do_not_depend_on_the_number_of_ranks(name):
    choice = CHOICES[name]
    inputs = problem(padding_rows=choice.padding_rows)
    losses, gradient = run(1, "exact", choice, inputs)
    for tp in (2, 3, 5, 6, 15):
        others = run(tp, "exact", choice, inputs)
        assert torch.equal(others[0], losses) and torch.equal(others[1], gradient), tp


def test_gloo_ranks_give_the_bits_of_threads(workers):
    job = ("exact", CHOICES["all"], problem(padding_rows=9))
    threads = run_threads(MemoryWorld(3, timeout_s=60), cross_entropy_rank, job)
    for ours, theirs in zip(threads, workers(3, "gloo").run(cross_entropy_rank, job), strict=True):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@settings(max_examples=30)
@given(
    tp=st.integers(2, 6),
    label_smoothing=st.sampled_from([0.0, 0.05, 0.9]),
    z_loss=st.sampled_from([0.0, 1e-4, 0.5]),
    padding_rows=st.integers(0, 100),
    ignore_index=st.sampled_from([-100, -1, 0]),
)
def test_any_choice_on_any_cut_equals_one_rank(tp, label_smoothing, z_loss, padding_rows, ignore_index):
    choice = LossChoice(label_smoothing, z_loss, ignore_index, padding_rows)
    inputs = problem(padding_rows=padding_rows, ignore_index=ignore_index)
    one, many = run(1, "exact", choice, inputs), run(tp, "exact", choice, inputs)
    assert torch.equal(one[0], many[0]) and torch.equal(one[1], many[1])


def test_smoothing_by_the_local_vocabulary_would_be_another_loss():
    """Megatron-Core takes the size and the mean log-probability of the rank's own slice (its issues 737 and 7452)."""
    inputs, choice = problem(), CHOICES["smoothed"]
    expected, _ = oracle(*inputs, choice)
    logits, targets, _ = inputs
    own = logits.double().log_softmax(-1)[..., :51]
    local = 0.9 * F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none").view(
        3, 5
    ) - 0.1 * own.mean(-1)
    losses, _ = run(2, "fast", choice, inputs)
    counted = targets != IGNORE_INDEX
    assert (losses - expected)[counted].abs().max() < 1e-4 < 0.01 < (local - expected)[counted].abs().max()


def test_bf16_logits_are_widened_and_their_gradient_narrowed_once():
    logits, targets, dlosses = problem(torch.bfloat16, padding_rows=9)
    losses, gradient = run(3, "exact", CHOICES["all"], (logits, targets, dlosses))
    wide, wide_gradient = run(3, "exact", CHOICES["all"], (logits.float(), targets, dlosses))
    assert losses.dtype == torch.float32 and torch.equal(losses, wide)
    assert gradient.dtype == torch.bfloat16 and torch.equal(gradient, wide_gradient.bfloat16())


def test_what_is_no_choice_and_no_target_is_refused_with_what_would_do():
    with pytest.raises(ValueError, match="label_smoothing=1 must be at least 0 and below 1"):
        LossChoice(label_smoothing=1)
    with pytest.raises(ValueError, match="padding_rows=-3 must be at least 0"):
        LossChoice(padding_rows=-3)
    logits, targets, dlosses = problem(padding_rows=9)
    for choice, wrong in ((LossChoice(padding_rows=9), 92), (LossChoice(), -1), (LossChoice(), 101)):
        targets[1, 1] = wrong
        with pytest.raises(
            RankFailure, match=(f"target {wrong} is no id of a vocabulary of {101 - choice.padding_rows}. Use 0 to")
        ):
            run(2, "fast", choice, (logits, targets, dlosses))
    with pytest.raises(RankFailure, match="padding_rows=101 leave no id of a vocabulary of 101 rows"):
        run(1, "fast", LossChoice(padding_rows=101), (logits, targets, dlosses))


# --- as keys of a plan
# -----------------------------------------------------------------------------------------------------------------


def plan_of(mode="exact", *, padding_rows=0, steps=1, tp=1, dp=1, **train) -> Plan:
    return plan(
        model="tiny-gpt-6h",
        num_layers=1,
        vocab_size=260,
        padding_rows=padding_rows,
        samples=6,
        sequence=16,
        mode=mode,
        steps=steps,
        data=__file__,
        **train,
        tp=tp,
        dp=dp,
    )


CHOSEN = {"padding_rows": 4, "label_smoothing": 0.1, "z_loss": 1e-3, "ignore_token": ord(" ")}


def fit(plan):
    """(losses, gradient norms, held-out losses) of a run, its ranks as threads of this process."""
    result = run_threads(MemoryWorld(plan.layout.world_size, timeout_s=60), train_rank, TrainJob(plan))[0]
    return (
        [step.loss for step in result.steps],
        [step.grad_norm for step in result.steps],
        list(result.validation_losses.values()),
    )


@pytest.fixture(scope="module")
def one_device():
    """What one device reports of a plan with these choices; each is run once."""
    return functools.cache(lambda **choices: fit(plan_of(**choices)))


def test_a_smoothed_padded_run_with_z_loss_has_the_bits_of_one_device(one_device):
    assert one_device(**CHOSEN) == fit(plan_of(tp=3, dp=2, **CHOSEN))


def test_what_is_minimised_changes_the_step_but_held_out_losses_stay_plain(one_device):
    losses, norms, held_out = one_device(**CHOSEN)
    plain_losses, plain_norms, plain_held_out = one_device(padding_rows=4, ignore_token=ord(" "))
    assert losses[0] > plain_losses[0] + 1e-2 and norms != plain_norms  # (log 256)^2 / 1000 = 0.03
    assert held_out[0] == plain_held_out[0]


def test_padding_lowers_the_loss_of_a_fresh_model_by_the_rows_that_cannot_win(one_device):
    """Before training all rows are about equally likely: log(260) against log(256)."""
    whole, padded = one_device()[0][0], one_device(padding_rows=4)[0][0]
    assert whole - padded == pytest.approx(math.log(260 / 256), abs=2e-3)


def counting_job(transport, plan):
    """Per microbatch of the first step how many targets count, the sum of its losses, and by how
    much the step divides."""
    rank = TrainingRank(transport, plan)
    microbatches = rank.batches.training(0, 1.0)
    counts = [int((each.targets != plan.train.ignore_token).sum()) for each in microbatches]
    losses = [float(rank.stages[0](each, None).detach().double().sum()) for each in microbatches]
    return counts, losses, rank.batches.num_counted, rank.step(0)[0].loss


def test_tokens_that_are_not_learned_leave_the_mean_and_uneven_counts_add_up():
    plan = plan_of(tp=3, dp=2, ignore_token=ord(" "))
    ranks = run_threads(MemoryWorld(6, timeout_s=60), counting_job, plan)
    counts, losses = ([*ranks[0][part], *ranks[3][part]] for part in (0, 1))  # tp rank 0 of both data-parallel ranks
    assert len(set(counts)) > 1 and sum(ranks[0][0]) != sum(ranks[3][0]) and sum(counts) < 6 * 16
    for _, _, divisor, loss in ranks:
        assert divisor == sum(counts) and loss == pytest.approx(sum(losses) / sum(counts), rel=1e-6)


def test_a_batch_in_which_nothing_counts_has_loss_0_and_moves_nothing(tmp_path):
    (tmp_path / "zeros.txt").write_text("0" * 400)
    plan = plan_of(ignore_token=ord("0"))
    losses, norms, _ = fit(replace(plan, train=replace(plan.train, data=str(tmp_path))))
    assert losses == norms == [0.0]


def recorded(transport, plan):
    transport.recorder.enabled = True
    TrainingRank(transport, plan).step(0)
    return [
        operation for action, operation in transport.recorder.events if action is not None and action.kind is Kind.F
    ]


@pytest.mark.parametrize("mode", NUMERICS)
def test_label_smoothing_sends_what_the_program_says(mode):
    plan = plan_of(mode, tp=3, label_smoothing=0.1, z_loss=0.1)
    assert lower(schedule_for(plan)).num_stages == 1
    for tp_rank, found in enumerate(run_threads(MemoryWorld(3, timeout_s=60), recorded, plan)):
        assert sorted(map(str, found)) == sorted(map(str, 6 * [*operations(plan, Kind.F, 0, tp_rank)]))


@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_the_memory_model_knows_what_the_loss_keeps(z_loss):
    plan = plan_of("fast", steps=2, z_loss=z_loss, label_smoothing=0.1)
    timeline = run_threads(MemoryWorld(1), train_rank, TrainJob(plan))[0].timeline
    measured = max(sample.num_bytes for sample in timeline.memory)
    # 16 tokens: a mask of a byte, a number in fp32
    assert simulate(plan).memory[0].lasting_bytes == pytest.approx(measured, abs=80)


def test_the_symbolic_proof_walks_the_sum_of_logits_too():
    plan = plan_of(tp=3, label_smoothing=0.1)
    proof = prove(plan, lower(schedule_for(plan)))
    assert proof.findings == ()


def test_a_plan_says_what_padding_leaves():
    with pytest.raises(ModelError, match=r"padding_rows=260 leaves no id of vocab_size=260\. Use 259 at most"):
        plan_of(padding_rows=260)
    (sentence,) = unsupported(plan_of(padding_rows=160))
    assert (
        "model.vocab_size=260 with model.padding_rows=160 of tiny-gpt-6h has ids up to 99. Use model.vocab_size="
    ) in sentence
    with pytest.raises(PlanError, match=r"plan\.toml:7: label_smoothing = 1\.0 must be below 1"):
        Plan.from_toml(
            '[model]\npreset = "tiny-gpt"\n[batch]\nglobal = 1\nsequence = 8\n[train]\nlabel_smoothing = 1.0\n'
        )
