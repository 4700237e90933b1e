"""Gradients that both sides of a proof have wrong: each is held to that of formulas, part by part, with routing
as the run chose it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from helpers.gates import sampled
from shardproof.backend.model import experts
from shardproof.backend.model.block import TransformerBlock
from shardproof.backend.numerics.dropout import dropout_mask, uniform
from shardproof.backend.ranks.gradient_sums import GradientSums
from shardproof.backend.tensor_parallel import dropout
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Precision
from shardproof.verify.matrix.problems import BIASED, BLOOM, DEEPSEEK, GROUPS, LATENT, PROBLEMS, TOKENS
from shardproof.verify.mutations.patches import Broken, Patches
from shardproof.verify.mutations.plans import tiny
from shardproof.verify.run import derivative, draws, proof_run
from shardproof.verify.run.gradient_parts import OFF, Measured, parts_of, whole
from shardproof.verify.run.proof_run import ProofJob, one_device
from shardproof.verify.run.reference import Reference, checked_ledger

Function = Callable[..., Any]

SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 12, "ffn_hidden_size": 16, "num_heads": 3, "num_kv_heads": 3}
MIXTURE = {**SMALL, "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 8, "num_shared_experts": 1}
MLA = {**SMALL, **LATENT, "q_lora_rank": 8}
ROUTED = {"router_aux_loss": 0.01, "router_z_loss": 1e-3}


@pytest.fixture(autouse=True)
def _ranks_are_threads_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_here(job: Function, payload: Any = None, *, world_size: int, **_: Any) -> list[Any]:
        return run_threads(MemoryWorld(world_size, timeout_s=60), job, payload)

    monkeypatch.setattr(proof_run, "run_ranks", run_here)


def small(*, sequence: int = 8, gradient_dtype: str | None = None, **choices: Any) -> Plan:
    plan = one_device(tiny(**{"samples": 2, "sequence": sequence, "model": SMALL, **choices}))
    return replace(plan, precision=replace(plan.precision, gradient_dtype=gradient_dtype)) if gradient_dtype else plan


def checked(plan: Plan, breaks: Callable[[Patches], None] | None = None, *, block: Any = None) -> Reference:
    found = checked_ledger(ProofJob(plan, 1, wraps_rank=None if breaks is None else Broken(breaks), block=block))[1]
    assert found is not None
    return found


@cache
def right(plan: Plan) -> Reference:
    """`checked` of a run that nothing breaks: many mistakes are made in the same few plans."""
    return checked(plan)


# Right runs


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@sampled("name", PROBLEMS, on_push=4)
def test_right_gradients_of_the_matrix_are_those_of_formulas_with_room_to_spare(name: str, dtype: str) -> None:
    plan = PROBLEMS[name].plan(Layout(), TOKENS[0], Batch(2, 1, TOKENS[0].sequence))
    found = checked(one_device(replace(plan, precision=Precision(dtype))))
    reported = found.report["derivative"]
    assert found.findings == () and reported["parameters"] == reported["of"]
    assert reported["used"] <= 1 / 3
    assert reported["said"] == pytest.approx(reported["found"], rel=OFF[dtype] / 4)


RIGHT: Mapping[str, Plan] = {
    "one expert, whose weight is always 1": small(model={**MIXTURE, "experts_per_token": 1}),
    "one expert and losses": small(model={**MIXTURE, "experts_per_token": 1, "router_scores": "sigmoid"}, train=ROUTED),
    "almost no room": small(model={**MIXTURE, "expert_capacity_factor": 0.3}, train={"router_jitter": 0.1, **ROUTED}),
    "no room, groups, biases": small(
        model={**MIXTURE, **GROUPS, **DEEPSEEK, "expert_capacity_factor": 0.6}, dtype="bf16"
    ),
    "padding": small(model=MIXTURE, train={"ignore_token": 0, "padded": True, **ROUTED}),
    "heads normed without rotary positions": small(model={**SMALL, **BIASED, "qk_norm": True}),
    "the same in bf16": small(model={**SMALL, **BIASED, "qk_norm": True}, dtype="bf16"),
    "latent attention with biases": small(
        model={**MLA, "norm": "layernorm", "bias": True, "activation": "gelu"}, dtype="bf16"
    ),
    "gradients in bf16": small(dtype="bf16", gradient_dtype="bf16"),
    "fp16": small(model={**MIXTURE, "hidden_dropout": 0.2, "attention_dropout": 0.3}, dtype="fp16"),
    "ALiBi, embeddings normed": small(model={**SMALL, **BLOOM, "attention_dropout": 0.1}),
    "window": small(model={**SMALL, "sliding_window": 3, "qk_norm": True, "activation": "geglu"}),
    "later tokens and documents": small(model={**MIXTURE, "num_mtp_layers": 2}, train={"packed": True, **ROUTED}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_run_has_no_finding(name: str) -> None:
    found = checked(RIGHT[name])
    assert found.findings == () and found.report["derivative"]["used"] <= 1 / 3


def test_a_graph_that_is_too_large_is_made_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small(model={**MIXTURE, "num_mtp_layers": 1, "hidden_dropout": 0.1}, train=ROUTED)
    whole_graph = checked(plan)
    monkeypatch.setattr(derivative, "GRAPH_VALUES", 0)
    again = checked(plan)
    assert again.findings == () and again.report == whole_graph.report


@pytest.mark.parametrize("num_later", [0, 1])
def test_behind_somebodys_own_layers_gradients_are_checked_too(num_later: int) -> None:
    plan = small(model={**MIXTURE, "num_mtp_layers": num_later}, train=ROUTED)
    norm = "mtp.0.norm.weight" if num_later else "head.norm.weight"
    reported = checked(plan, block=TransformerBlock)
    assert reported.findings == () and reported.report["derivative"]["parameters"] == 2
    for name in (norm, "head.output.weight"):
        found = checked(plan, partial(scales, name=name, factor=1.01), block=TransformerBlock).findings
        assert [each.where for each in found] == [f"step 1, one device, gradient {name}"]


def test_draws_by_their_definition_are_those_of_the_backend() -> None:
    index = np.array([0, 1, 77, 2**40 + 5])
    places, drawn = torch.from_numpy(index), (1234, "layers.1.mlp", 3)
    assert draws.uniform(*drawn, index).tolist() == uniform(*drawn, places).tolist()
    many = np.arange(1000)
    retained = dropout_mask(*drawn, torch.from_numpy(many), 0.3) > 0
    assert ((draws.dropout_factor(*drawn, many, 0.3) > 0) == retained.numpy()).all()


# Both sides


def scales(patches: Patches, *, name: str, factor: float, part: str | None = None) -> None:
    """Gradients of the parameters whose names end so, or of a part of them, are multiplied once more."""

    def finished(original: Function) -> Function:
        def scaled(sums: GradientSums) -> list[torch.Tensor]:
            gradients = original(sums)
            for parameter, gradient in zip(sums.parameters, gradients, strict=True):
                if parameter.name.endswith(name):
                    parts = dict(parts_of(sums.plan, parameter.name, tuple(gradient.shape)))
                    gradient[... if part is None else parts[part]] *= factor
            return gradients

        return scaled

    patches.replace(GradientSums, "finished", finished)


def forgets_the_weights_of_experts(patches: Patches) -> None:
    def unweighted(original: Function) -> Function:
        def backward(ctx: Any, dy_TH: torch.Tensor) -> tuple[Any, ...]:
            dresults, dweights_TK, *rest = original(ctx, dy_TH)
            return dy_TH[ctx.of[0].tokens].to(dresults.dtype), dweights_TK, *rest

        return backward

    patches.replace(experts._Combined, "backward", unweighted)


QK_NORM = {**SMALL, "qk_norm": True}
BIASES = {**SMALL, **BIASED}
TIED = {**SMALL, "tied_embeddings": True}
EXPERTS_OF_1 = "layers.1.mlp.experts"
MISTAKES: dict[str, tuple[dict[str, Any], Callable[[Patches], None], str]] = {
    "no gradient of a layer's experts": (
        MIXTURE,
        partial(scales, name=f"{EXPERTS_OF_1}.up.weight", factor=0),
        f"{EXPERTS_OF_1}.up.weight",
    ),
    "none of their last product": (
        MIXTURE,
        partial(scales, name=f"{EXPERTS_OF_1}.down.weight", factor=0),
        f"{EXPERTS_OF_1}.down.weight",
    ),
    "none of one expert": (
        MIXTURE,
        partial(scales, name=f"{EXPERTS_OF_1}.down.weight", factor=0, part="expert 2"),
        f"{EXPERTS_OF_1}.down.weight of expert 2",
    ),
    "experts without the router's weight": (MIXTURE, forgets_the_weights_of_experts, f"{EXPERTS_OF_1}.down.weight"),
    "first layer's experts halved": (
        MIXTURE,
        partial(scales, name="layers.0.mlp.experts.up.weight", factor=0.5),
        "layers.0.mlp.experts.up.weight",
    ),
    "router times 1.3": (
        MIXTURE,
        partial(scales, name="layers.1.mlp.router.weight", factor=1.3),
        "layers.1.mlp.router.weight",
    ),
    "shared expert halved": (
        MIXTURE,
        partial(scales, name="1.mlp.shared.down.weight", factor=0.5),
        "layers.1.mlp.shared.down.weight",
    ),
    "all values halved": (
        SMALL,
        partial(scales, name="qkv.weight", factor=0.5, part="values"),
        "layers.1.attention.qkv.weight of values",
    ),
    "keys times 1.3": (
        SMALL,
        partial(scales, name="0.attention.qkv.weight", factor=1.3, part="keys"),
        "layers.0.attention.qkv.weight of keys",
    ),
    "gates halved": (
        SMALL,
        partial(scales, name="0.mlp.up.weight", factor=0.5, part="gates"),
        "layers.0.mlp.up.weight of gates",
    ),
    "key norm times 1.3": (
        QK_NORM,
        partial(scales, name="1.attention.key_norm.weight", factor=1.3),
        "layers.1.attention.key_norm.weight",
    ),
    "latent projection times 0.7": (
        MLA,
        partial(scales, name="1.attention.kv_down.weight", factor=0.7, part="latent"),
        "layers.1.attention.kv_down.weight of latent",
    ),
    "norm of latent queries times 1.5": (
        MLA,
        partial(scales, name="1.attention.q_norm.weight", factor=1.5),
        "layers.1.attention.q_norm.weight",
    ),
    "embedding halved": (SMALL, partial(scales, name="embedding.tokens.weight", factor=0.5), "embedding.tokens.weight"),
    "tied table halved": (TIED, partial(scales, name="embedding.tokens.weight", factor=0.5), "embedding.tokens.weight"),
    "positions not trained": (
        BIASES,
        partial(scales, name="embedding.positions.weight", factor=0),
        "embedding.positions.weight",
    ),
    "bias of values dropped": (
        BIASES,
        partial(scales, name="1.attention.qkv.bias", factor=0, part="values"),
        "layers.1.attention.qkv.bias of values",
    ),
    "bias of the last product dropped": (
        BIASES,
        partial(scales, name="1.mlp.down.bias", factor=0),
        "layers.1.mlp.down.bias",
    ),
    "later token's projection halved": (
        {**SMALL, "num_mtp_layers": 1},
        partial(scales, name="mtp.0.projection.weight", factor=0.5),
        "mtp.0.projection.weight",
    ),
    "later token's experts not trained": (
        {**MIXTURE, "num_mtp_layers": 1},
        partial(scales, name="layers.2.mlp.experts.up.weight", factor=0),
        "layers.2.mlp.experts.up.weight",
    ),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_gradient_that_both_sides_have_wrong_is_found_and_named(name: str, dtype: str) -> None:
    model, breaks, where = MISTAKES[name]
    plan = small(model=model, dtype=dtype, train=ROUTED if "num_experts" in model else {})
    assert right(plan).findings == ()
    found = checked(plan, breaks)
    assert [(each.rule, each.where) for each in found.findings] == [
        ("reference-gradient", (f"step 1, one device, gradient {where}"))
    ]
    assert not found.report["ok"]


@pytest.mark.parametrize(("dtype", "factor"), [("fp32", 1.001), ("fp16", 1.1), ("bf16", 1.3)])
def test_so_small_a_factor_is_found(dtype: str, factor: float) -> None:
    found = checked(small(dtype=dtype), partial(scales, name="0.mlp.down.weight", factor=factor))
    assert [each.where for each in found.findings] == ["step 1, one device, gradient layers.0.mlp.down.weight"]


# What is zero, and what is rounding alone

MANY = {**SMALL, "num_experts": 32, "experts_per_token": 1, "expert_ffn_hidden_size": 8}


def test_experts_without_tokens_are_reported_and_have_no_gradient() -> None:
    plan = small(model=MANY)
    reported = checked(plan).report["derivative"]
    name = f"{EXPERTS_OF_1}.down.weight"
    experts_left = sorted(int(each.rsplit(" ", 1)[1]) for each in reported["zero"] if each.startswith(name))
    assert 16 <= len(experts_left) < 32  # 16 tokens choose one each
    left = experts_left[0]

    def adds(original: Function) -> Function:
        def finished(sums: GradientSums) -> list[torch.Tensor]:
            gradients = original(sums)
            for parameter, gradient in zip(sums.parameters, gradients, strict=True):
                if parameter.name == name:
                    gradient[left] += 1e-3
            return gradients

        return finished

    found = checked(plan, lambda patches: patches.replace(GradientSums, "finished", adds)).findings
    assert [each.where for each in found] == [f"step 1, one device, gradient {name} of expert {left}"]
    assert "the loss changes by 0" in found[0].what


def test_biases_of_keys_without_rotary_positions_are_reported_as_rounding_alone() -> None:
    reported = checked(small(model=BIASES)).report["derivative"]
    assert reported["untested"] == [f"layers.{layer}.attention.qkv.bias of keys" for layer in range(2)]
    assert checked(small(model={**SMALL, "qkv_bias": True})).report["derivative"]["untested"] == []


def test_a_forward_that_drops_without_scaling_is_a_wrong_forward_and_no_wrong_gradient() -> None:
    def unscaled(original: Function) -> Function:
        return lambda *given: (original(*given) > 0).float()

    plan = small(model={**SMALL, "hidden_dropout": 0.2})
    found = checked(plan, lambda patches: patches.replace(dropout, "dropout_mask", unscaled)).findings
    assert [(each.rule, each.where) for each in found] == [
        ("reference-forward", "step 1, one device, embedding.output of sample 0"),
    ]


def test_parts_make_a_whole() -> None:
    plan = small(model=MLA)
    parts = dict(parts_of(plan, "layers.0.attention.kv_up.weight", (3 * 8, 12)))
    assert [each.tolist()[:5] for each in parts.values()] == [[0, 1, 2, 3, 8], [4, 5, 6, 7, 12]]
    first, second = Measured("x", "a", 3.0, 3.0, 0.0, 0.0), Measured("x", "b", 2.0, 4.0, 2.0, 0.0)
    assert whole([first, second]) == Measured("x", "", pytest.approx(17 / 5), 5.0, 2.0, 0.0)
