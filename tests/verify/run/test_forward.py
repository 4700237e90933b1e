"""The forward by formulas: held against values worked out by hand, against right runs, and against mistakes that both
sides of a proof share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from shardproof.backend.model import attention, attention_core, mlp, rotary
from shardproof.backend.model.router import Router
from shardproof.backend.tensor_parallel import cross_entropy
from shardproof.backend.tensor_parallel.norm import Norm
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.model.parameters import parameters
from shardproof.core.plan.plan import Plan
from shardproof.verify.matrix.problems import BLOOM
from shardproof.verify.mutations.patches import Broken, Patches
from shardproof.verify.mutations.plans import tiny
from shardproof.verify.run import proof_run
from shardproof.verify.run.decoder import Inputs
from shardproof.verify.run.forward import Made, Recorded, activation_names, made, samples_checked
from shardproof.verify.run.proof_run import ProofJob, one_device
from shardproof.verify.run.reference import checked_ledger

Function = Callable[..., Any]

LATENT = {
    "kv_lora_rank": 12,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "head_dim": 6,
}
EXPERTS = {
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 8,
    "num_shared_experts": 1,
    "expert_bias": True,
}
GROUPS = {"num_router_groups": 2, "router_groups_per_token": 1, "router_group_scores": "top_two"}
DEEPSEEK = {**EXPERTS, **GROUPS, "router_scores": "sigmoid"}


def plan(*, samples: int = 2, sequence: int = 12, **choices: Any) -> Plan:
    return one_device(tiny(samples=samples, sequence=sequence, **choices))


def findings(plan: Plan, breaks: Callable[[Patches], None] | None = None) -> list[tuple[str, str]]:
    """Rule and place of what is found on one device."""
    job = ProofJob(plan, 1, wraps_rank=None if breaks is None else Broken(breaks))
    found = checked_ledger(job)[1]
    assert found is not None and found.report["activations"] > 0
    return [(each.rule, each.where) for each in found.findings]


@pytest.fixture(autouse=True)
def _ranks_are_threads_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_here(job: Function, payload: Any = None, *, world_size: int, **_: Any) -> list[Any]:
        return run_threads(MemoryWorld(world_size, timeout_s=60), job, payload)

    monkeypatch.setattr(proof_run, "run_ranks", run_here)


# Right runs of what the tests of the reference do not have

RIGHT: Mapping[str, Plan] = {
    "grouped queries, window, normed heads": plan(
        model={"num_kv_heads": 2, "sliding_window": 5, "qk_norm": True, "activation": "geglu"}
    ),
    "ALiBi of six heads": plan(model={**BLOOM, "num_heads": 6, "num_kv_heads": 3, "alibi_multiplier": 2.0}),
    "latent attention": plan(model={**LATENT, "norm": "layernorm", "bias": True, "activation": "gelu_tanh"}),
    "yarn": plan(
        model={
            **LATENT,
            "rope_scaling": "yarn",
            "rope_factor": 2.0,
            "rope_original_positions": 6,
            "rope_mscale_all_dim": 0.8,
        }
    ),
    "DeepSeek's router": plan(model={**DEEPSEEK, "activation": "relu_squared"}, dtype="bf16"),
    "packed": plan(train={"packed": True}, model={"position": "learned", "activation": "gelu", "padding_rows": 3}),
    "dropout": plan(model={"hidden_dropout": 0.1, "num_mtp_layers": 1}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_forward_has_no_finding(name: str) -> None:
    assert findings(RIGHT[name]) == []


# Both sides


def forgets_the_scale(patches: Patches) -> None:
    patches.replace(
        F,
        "scaled_dot_product_attention",
        lambda original: lambda *given, **named: original(*given, **{**named, "scale": 1.0}),
    )
    patches.replace(attention_core, "FusedKernel", lambda original: lambda scale: original(1.0))


def turns_the_other_way(patches: Patches) -> None:
    patches.replace(attention, "rotate", lambda original: lambda x, cos, sin: original(x, cos, -sin))


def halves_the_slopes(patches: Patches) -> None:
    patches.replace(attention_core, "own_slopes", lambda original: lambda context: [x / 2 for x in original(context)])


def shifts_positions(patches: Patches) -> None:
    def shifted(original: Function) -> Function:
        return lambda *given, **named: tuple(each.roll(-1, 0) for each in original(*given, **named))

    patches.replace(rotary, "rope_table", shifted)


def takes_up_for_gate(patches: Patches) -> None:
    patches.replace(mlp, "split_fused", lambda original: lambda *given: original(*given)[::-1])


def forgets_epsilon(patches: Patches) -> None:
    def init(original: Function) -> Function:
        def made(self: Norm, *given: Any) -> None:
            original(self, *given)
            self.eps, self.epsilon = 0.0, torch.zeros(())

        return made

    patches.replace(Norm, "__init__", init)


def forgets_the_smoothing(patches: Patches) -> None:
    plain = cross_entropy.PLAIN
    make = cross_entropy.vocab_parallel_cross_entropy
    patches.replace(
        cross_entropy,
        make.__name__,
        lambda original: lambda *given, **named: original(*given, **{**named, "choice": plain}),
    )


def takes_the_worst_experts(patches: Patches) -> None:
    from shardproof.backend.model import router

    patches.replace(router, "choose", lambda original: lambda scores, *rest, **named: original(-scores, *rest, **named))


def weighs_a_little_more(patches: Patches) -> None:
    def forward(original: Function) -> Function:
        def routed(self: Router, *given: Any) -> Any:
            routing = original(self, *given)
            return type(routing)(routing.experts_BSK, routing.weights_BSK * 1.001)

        return routed

    patches.replace(Router, "forward", forward)


ATTENTION, MLP = "layers.0.attention", "layers.0.mlp"
MISTAKES: Mapping[str, tuple[Callable[[Patches], None], dict[str, Any], str]] = {
    "no scale of scores": (forgets_the_scale, {}, ATTENTION),
    "rotary positions backwards": (turns_the_other_way, {}, ATTENTION),
    "rotary positions shifted around": (shifts_positions, {}, ATTENTION),
    "slopes of twice as many heads": (halves_the_slopes, {"model": BLOOM}, ATTENTION),
    "gate and up-projection exchanged": (takes_up_for_gate, {}, MLP),
    "no epsilon in norms": (forgets_epsilon, {}, "layers.0.attention.norm"),
    "no label smoothing": (forgets_the_smoothing, {"train": {"label_smoothing": 0.1}}, "head.losses"),
    "experts with the lowest scores": (takes_the_worst_experts, {"model": DEEPSEEK}, MLP),
    "weights of experts a thousandth too large": (weighs_a_little_more, {"model": DEEPSEEK}, MLP),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_forward_that_both_sides_have_wrong_is_found_where_it_is(name: str) -> None:
    breaks, choices, where = MISTAKES[name]
    assert findings(plan(**choices), breaks)[:1] == [("reference-forward", f"step 1, one device, {where} of sample 0")]


# By hand


def test_attention_of_equal_keys_is_the_mean_of_the_values_seen() -> None:
    sizes = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4, "hidden_size": 4}
    small = plan(sequence=4, model={**sizes, "sliding_window": 2})
    weights = {each.name: np.zeros(each.shape) for each in parameters(small.model)}
    weights["layers.0.attention.qkv.weight"] = np.concatenate([np.zeros((8, 4)), np.eye(4)])
    weights["layers.0.attention.output.weight"] = np.eye(4)
    x_SH, tokens = np.arange(16.0).reshape(4, 4), np.zeros(4, np.int64)
    layer = ("attention.norm", "attention", "mlp.norm", "mlp")
    values = dict.fromkeys(["embedding.output", *(f"layers.0.{part}" for part in layer)], x_SH)
    recorded = Recorded(Inputs(tokens, tokens), values, weights.__getitem__)
    found = {each.name: each.values for each in made(small, recorded, own_block=False)}
    assert found["layers.0.attention"][:, 0].tolist() == [0.0, 2.0, 6.0, 10.0]
    assert not found["embedding.output"].any() and not found["layers.0.mlp.norm"].any()
    assert [each.name for each in made(small, recorded, own_block=True)] == ["embedding.output"]


def test_how_far_a_token_is_off_is_a_share_of_its_norm_and_of_the_usual_one() -> None:
    right = Made("x", np.array([[3.0, 4.0], [np.nan, 0.0], [0.0, 5.0]]), "fp32")
    found = right.off(np.array([[3.0, 4.0], [7.0, 7.0], [0.0, 6.0]]))
    assert found.tolist() == [0.0, 0.0, 0.1]
    assert Made("x", np.zeros((2, 1)), "fp32").off(np.array([[0.0], [1.0]])).tolist() == [0.0, math.inf]


def test_sequences_and_names_of_a_plan() -> None:
    assert samples_checked(plan(samples=5)) == [0, 4] and samples_checked(plan(samples=1)) == [0]
    names = activation_names(plan(model={"num_mtp_layers": 1}))
    assert len(set(names)) == len(names) and {
        "embedding.output",
        "layers.2.mlp.norm",
        "mtp.0.losses",
        "head.losses",
    } <= set(names)
