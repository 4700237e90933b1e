"""The single device of a proof is checked itself: a mistake that both sides make is found under its name, and
right runs have no finding.

The formulas of an update are held against what is computed by hand; runs are those of the real backend,
broken where a test says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from shardproof.backend.model import router, transformer
from shardproof.backend.optimizers import updates
from shardproof.backend.optimizers.sharded import ShardedOptimizer
from shardproof.backend.ranks import batches, training_rank
from shardproof.backend.ranks.gradient_sums import GradientSums
from shardproof.backend.ranks.totals import Totals
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.plan.optimizer import Optimizer, Update
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Precision
from shardproof.verify.dynamic import proof as dynamic
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.mutations.mutants_loss import multiplies_later_losses
from shardproof.verify.mutations.mutants_router import scales_router_losses
from shardproof.verify.mutations.patches import Broken, Patches
from shardproof.verify.mutations.plans import tiny
from shardproof.verify.run import adamw, proof_run
from shardproof.verify.run.proof_run import ProofJob, one_device
from shardproof.verify.run.reference import Reference, checked_ledger

STEPS = 2
SMALL = {"num_layers": 1, "hidden_size": 12, "ffn_hidden_size": 16, "num_heads": 3, "num_kv_heads": 3}
EXPERTS = {
    **SMALL,
    "num_experts": 3,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 8,
    "num_shared_experts": 1,
    "expert_bias": True,
}


def small(**choices: Any) -> Plan:
    return one_device(tiny(**{"samples": 2, "sequence": 8, "model": SMALL, **choices}))


@pytest.fixture(autouse=True)
def _ranks_are_threads_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs take place in this process, which has torch already."""

    def run_here(job: Callable, payload: Any = None, *, world_size: int, **_: Any) -> list[Any]:
        return run_threads(MemoryWorld(world_size, timeout_s=60), job, payload)

    monkeypatch.setattr(proof_run, "run_ranks", run_here)


def checked(plan: Plan, breaks: Callable[[Patches], None] | None = None) -> Reference:
    found = checked_ledger(ProofJob(plan, STEPS, wraps_rank=None if breaks is None else Broken(breaks)))[1]
    assert found is not None
    return found


# Right runs

RIGHT = {
    "dense": small(),
    "tied": small(model={**SMALL, "tied_embeddings": True, "position": "learned", "norm": "layernorm", "bias": True}),
    "experts": small(model=EXPERTS, train={"router_aux_loss": 0.01, "router_z_loss": 0.001}),
    "bf16": small(dtype="bf16"),
    "multi-token prediction": small(model={**SMALL, "num_mtp_layers": 2}),
    "label smoothing": small(train={"label_smoothing": 0.1, "z_loss": 1e-3}),
    "ignored": small(train={"ignore_token": 32}),
    "padded": small(train={"ignore_token": 0, "padded": True}),
    "decay": replace(small(), optimizer=Optimizer(weight_decay=0.9, clip_grad_norm=0.0)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_run_has_no_finding(name: str) -> None:
    found = checked(RIGHT[name])
    assert found.findings == () and found.report["ok"]
    derivative, of = found.report["derivative"], found.report["derivative"]["of"]
    assert derivative["step"] == STEPS and derivative["parameters"] == of
    assert found.report["norms"] == STEPS and found.report["updates"] == STEPS * of
    assert found.report["losses"] == STEPS * (2 if name == "multi-token prediction" else 1)


def test_skipped_steps_of_fp16_change_no_weight_and_do_not_count() -> None:
    scaled = Precision("fp16", initial_loss_scale=2.0**15, loss_scale_hysteresis=1)
    found = checked(replace(small(), precision=scaled))
    assert found.findings == () and 0 < found.report["norms"] < STEPS


# Both sides


def takes_the_larger(patches: Patches) -> None:
    larger = lambda norm, max_norm: (max_norm / (norm + 1e-6)).clamp(min=1.0)  # noqa: E731
    patches.replace(training_rank, "clip_coefficient", lambda original: larger)


def forgets_bias_correction(patches: Patches) -> None:
    def late(original: Callable) -> Callable:
        return lambda *given, **options: original(*given[:5], [torch.tensor(1e6) for _ in given[5]], **options)

    patches.replace(updates, "UPDATES", lambda original: {"adamw": late(original["adamw"])})


def decays_everything(patches: Patches) -> None:
    patches.replace(Update, "weight_decay", lambda original: lambda self, of_step: of_step)


def updates_twice(patches: Patches) -> None:
    def twice(original: Callable) -> Callable:
        def step(self: ShardedOptimizer, gradients: Sequence[torch.Tensor], *given: torch.Tensor) -> None:
            original(self, [each.clone() for each in gradients], *given)
            original(self, gradients, *given)

        return step

    patches.replace(ShardedOptimizer, "step", twice)


def counts_only_some(patches: Patches) -> None:
    patches.replace(
        Totals, "norm", lambda original: lambda self, held, gradients: original(self, held[1:], gradients[1:])
    )


def divides_by_all_tokens(patches: Patches) -> None:
    patches.replace(
        Totals, "mean_loss", lambda original: lambda self, losses, num_counted: original(self, losses, self._num_tokens)
    )


def counts_losses_twice(patches: Patches) -> None:
    twice = lambda original: lambda self, *given: transformer._ScaledBackward.apply(original(self, *given), 2.0)  # noqa: E731
    patches.replace(transformer.Head, "losses", twice)


def _finishes(change: Callable[[GradientSums, list[torch.Tensor]], list[torch.Tensor]], patches: Patches) -> None:
    patches.replace(GradientSums, "finished", lambda original: lambda self: change(self, original(self)))


def _undivided(sums: GradientSums, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return [gradient * (sums.plan.batch.global_size * sums.plan.batch.sequence) for gradient in gradients]


def _retained(sums: GradientSums, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    sums.retained = [own + old for own, old in zip(gradients, getattr(sums, "retained", gradients), strict=True)]  # type: ignore[attr-defined]
    return [each.clone() for each in sums.retained]  # type: ignore[attr-defined]


def _without_qkv(sums: GradientSums, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        gradient * (not parameter.name.endswith("qkv.weight"))
        for parameter, gradient in zip(sums.parameters, gradients, strict=True)
    ]


UPDATE, GRADIENT = (
    ("reference-update", "step 1, one device, "),
    ("reference-gradient", (f"step {STEPS}, one device, gradient ")),
)
MISTAKES: dict[str, tuple[Callable[[Patches], None], str, str, str]] = {
    "max for min": (
        takes_the_larger,
        *UPDATE[:1],
        UPDATE[1] + ("optimizer state embedding.tokens.weight.exp_avg"),
        "times what is due",
    ),
    "no bias correction": (
        forgets_bias_correction,
        *UPDATE[:1],
        UPDATE[1] + "weight embedding.tokens.weight",
        "times what is due",
    ),
    "norms decay": (
        decays_everything,
        *UPDATE[:1],
        UPDATE[1] + "weight layers.0.attention.norm.weight",
        "12 of 12 elements",
    ),
    "twice": (
        updates_twice,
        *UPDATE[:1],
        UPDATE[1] + ("optimizer state embedding.tokens.weight.exp_avg"),
        "1.9 times what is due",
    ),
    "norm of some": (counts_only_some, "reference-norm", "step 1, one device, grad_norm", "times that"),
    "mean over all": (divides_by_all_tokens, "reference-loss", "step 1, one device, loss", "times that"),
    "twice in what is minimised": (
        counts_losses_twice,
        "reference-gradient",
        "step 1, one device, activation gradient head.losses",
        "counts 2 times in what is minimised, and ought to 1 times",
    ),
    "undivided": (partial(_finishes, _undivided), *GRADIENT[:1], GRADIENT[1] + "head.output.weight", "times that"),
    "step before": (partial(_finishes, _retained), *GRADIENT[:1], GRADIENT[1] + "head.output.weight", "times that"),
    "no gradient": (
        partial(_finishes, _without_qkv),
        *GRADIENT[:1],
        GRADIENT[1] + "layers.0.attention.qkv.weight",
        "gradients say 0",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_both_sides_is_found_under_its_name(name: str) -> None:
    breaks, rule, where, words = MISTAKES[name]
    found = checked(RIGHT["ignored"], breaks)
    assert [(each.rule, each.where) for each in found.findings] == [(rule, where)]
    assert words in found.findings[0].what and not found.report["ok"]


def test_losses_of_later_tokens_that_count_with_another_weight_are_named() -> None:
    found = checked(RIGHT["multi-token prediction"], partial(multiplies_later_losses, factor_of=lambda _: 3.0)).findings
    assert [(each.rule, each.where) for each in found] == [
        ("reference-gradient", ("step 1, one device, activation gradient mtp.0.losses"))
    ]
    assert ("counts 0.15 times in what is minimised, and ought to 0.05 times; so it is with 8 of 8 tokens") in found[
        0
    ].what


def reads_further_ahead(patches: Patches) -> None:
    def later(original: Callable) -> Callable:
        return lambda targets, number, *given: original(targets, number + 1, *given)[..., 1:].contiguous()

    patches.replace(batches, "later_targets", later)


def predicts_itself(patches: Patches) -> None:
    def batch(original: Callable) -> Callable:
        return lambda self, *given: (found := original(self, *given)) | {"targets": found["tokens"]}

    patches.replace(batches.Batches, "_batch", batch)


@pytest.mark.parametrize(("breaks", "what"), [(reads_further_ahead, "target of mtp.0"), (predicts_itself, "target")])
def test_targets_that_are_those_of_other_tokens_are_named(breaks: Callable, what: str) -> None:
    found = checked(RIGHT["multi-token prediction"], breaks).findings[0]
    assert (found.rule, found.where) == ("reference-data", f"step {STEPS}, one device, {what} in sample 0")


@pytest.mark.parametrize("factor", [-1.0, 2.0])
def test_biases_of_experts_move_as_their_counts_say(factor: float) -> None:
    def moves(patches: Patches) -> None:
        patches.replace(router.Router, "update_bias", lambda original: lambda self, rate: original(self, factor * rate))

    (found,) = checked(RIGHT["experts"], moves).findings
    assert (found.rule, found.where) == (
        "reference-update",
        f"step {STEPS}, one device, weight layers.0.mlp.router.expert_bias",
    )
    assert "so its bias must become" in found.what


ROUTED = {"router_aux_loss": 0.01, "router_z_loss": 0.001}
ROUTERS = {
    "softmax": {},
    "sigmoid": {"router_scores": "sigmoid", "normalized_router_weights": True, "router_scaling": 2.5}
    | {"pre_norms": False, "post_norms": True, "num_mtp_layers": 1},
    "groups": {"num_experts": 8, "num_router_groups": 4, "router_groups_per_token": 2, "router_scores": "sigmoid"},
    "multi-token prediction": {"num_mtp_layers": 1},
}


@pytest.mark.parametrize("name", ROUTERS)
def test_the_gradients_of_routers_follow_from_those_of_their_layers(name: str) -> None:
    plan = small(model={**EXPERTS, **ROUTERS[name]}, train={**ROUTED, "ignore_token": 32})
    assert checked(plan).findings == ()
    for breaks in (partial(scales_router_losses, factor=1.01), weights_of_experts_count_more):
        found = checked(plan, breaks).findings
        assert [(each.rule, each.where) for each in found[-1:]] == [
            ("reference-gradient", f"step {STEPS}, one device, gradient of layers.0.mlp.router of sample 0")
        ]


def weights_of_experts_count_more(patches: Patches) -> None:
    patches.replace(
        router._WithLosses, "backward", lambda original: lambda ctx, dweights: original(ctx, 1.01 * dweights)
    )


def test_a_proof_whose_sides_are_equal_and_wrong_fails_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic, "ProofJob", partial(ProofJob, wraps_rank=Broken(takes_the_larger)))
    proof = prove(tiny(samples=2, sequence=8, model=SMALL, dp=2), transport="memory", steps=1)
    assert proof.report["tensors_different"] == 0 and not proof.ok
    assert proof.findings[0].rule == "reference-update" and not proof.report["reference"]["ok"]
    assert "DO NOT all follow" in proof.text() and "0 different bits" in proof.text()


# The formulas


def test_the_first_update_of_adamw_by_hand() -> None:
    choice = adamw.Choice(learning_rate=0.1, betas=(0.9, 0.99), eps=0.0, decay=0.5, max_norm=0.0)
    first = adamw.moment(np.array([0.0]), np.array([4.0]), 0.9, 1)
    second = adamw.moment(np.array([0.0]), np.array([4.0]), 0.99, 2)
    assert first.values == pytest.approx([0.4]) and second.values == pytest.approx([0.16])
    moved = adamw.weight(np.array([2.0]), first.values, second.values, choice, 1)  # 2 - 0.1 * sign(4) - 0.1 * 0.5 * 2
    assert moved.values == pytest.approx([1.8]) and 0 < moved.bound[0] < 1e-5
    assert adamw.ratio_added(moved, np.array([1.6])) == pytest.approx(2.0)
