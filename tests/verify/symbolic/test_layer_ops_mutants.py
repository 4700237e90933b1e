"""Wrong descriptions of layers: each mutant inside `core.model.operators` and `core.program` is found by the floor that
is named here.

Parameters, program, FLOPs and memory all follow from one description, so none of them can hold the others to it. What
does is written apart from it:

- `symbols`: the symbolic proof, which knows what an operator means;
- `records`: the backend's layers, which compute and send something else, or cannot be built from such parameters;
- `published`: parameters of published models, and the activations of Korthikanti et al. 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from helpers.plans import plan, product_plan
from helpers.program import assert_every_action_records_the_program
from shardproof.core.base.errors import RankFailure
from shardproof.core.layout.layout import Layout
from shardproof.core.model import operators
from shardproof.core.model.model_presets import model_preset
from shardproof.core.model.operators import Kind, Operator, Width
from shardproof.core.model.parameters import count_parameters
from shardproof.core.model.roles import Role
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.program import Operation, recompute
from shardproof.core.program.experts import _Sent
from shardproof.core.program.tensors import Tensors
from shardproof.core.schedule import lower
from shardproof.simulator.memory.sizes import layer_activation_bytes
from shardproof.verify.symbolic.symbolic import prove

COUNTS = {"gpt2-xl": 1_557_611_200, "llama3-8b": 8_030_261_248, "qwen3-8b": 8_190_735_360}
"""Parameters as the model cards' safetensors have them."""

Change = Callable[[Operator], Operator]


@dataclass(frozen=True)
class Mutant:
    """`change` of the operator with `role`, or another `value` for the attribute `name` of `owner`; `floor` finds it in
    a plan of `model` with `options`."""

    floor: str
    model: str = "tiny-llama"
    role: Role | None = None
    change: Change = lambda operator: operator
    patch: tuple[Any, str, Any] | None = None
    options: tuple[tuple[str, Any], ...] = (("tp", 2),)

    def plan(self, name: str) -> Plan:
        """The plan in which it is looked for. The model's name is its own: sizes are kept by model."""
        options = dict(self.options)
        norms = {key: options.pop(key, False) for key in ("qk_norm", "whole_qk_norm")}
        model = replace(model_preset(self.model), name=name, num_layers=2, **norms)
        return plan(model=model, **{"samples": 4, **options})


class Found(Exception):
    """A floor has found something."""


def of_symbols(plan: Plan) -> None:
    for finding in prove(plan, lower(schedule_for(plan))).findings:
        raise Found(finding.where)


def of_records(plan: Plan) -> None:
    try:
        assert_every_action_records_the_program(plan, only=not_routed)
    except (AssertionError, RankFailure) as error:
        raise Found from error


def not_routed(operation: Operation) -> bool:
    """False for what depends on which experts the tokens of this batch choose."""
    return not any(part in operation.layer for part in (".experts.", ".dispatch", ".combine"))


def of_published(plan: Plan) -> None:
    for name, count in COUNTS.items():
        if count_parameters(replace(model_preset(name), name=f"{name} {plan.model.name}")) != count:
            raise Found(name)
    gpt = replace(model_preset("gpt3-175b"), name=plan.model.name)
    tokens, tp = 2048, 8
    sharded = product_plan(Layout(tp=tp), model=gpt, samples=8, sequence=tokens, recompute="selective")
    statistics = 2 * 2 * 4 * tokens  # of the norms, which the paper leaves out
    sbh = tokens * gpt.hidden_size
    # table 2: sbh(10 + 24/t), of which two are masks of dropout
    if layer_activation_bytes(sharded) != sbh * 8 + sbh * 24 // tp + statistics:
        raise Found(gpt.name)


FLOORS = {"symbols": of_symbols, "records": of_records, "published": of_published}


def whole(side: str) -> Change:
    return lambda operator: replace(operator, **{side: Width(getattr(operator, side).size)})


def wider(side: str, by: int = 1, **changes: Any) -> Change:
    def change(operator: Operator) -> Operator:
        width: Width = getattr(operator, side)
        return replace(operator, **{side: replace(width, unit=width.unit + by, **changes)})

    return change


def along(side: str, axis: str) -> Change:
    return wider(side, 0, axis=axis)


def called(role: Role) -> Change:
    return lambda operator: replace(operator, role=role)


def nothing(*_: Any, **__: Any) -> tuple[()]:
    return ()


SPLIT = (("tp", 2), ("sequence_parallel", True))
CONTEXT = (("cp", 2), ("sequence", 32))
SPREAD = (("tp", 2), ("ep", 2), ("etp", 1), ("sequence_parallel", True))
AGAIN = (("tp", 2), ("recompute", Recompute("selective", modules=("core_attn", "mlp"))))
LATENT = {"model": "tiny-deepseek"}

CUT = {
    "qkv-whole": Mutant("records", role=Role.QKV, change=whole("makes")),
    "qkv-along-ffn": Mutant("records", role=Role.QKV, change=along("makes", "ffn")),
    "attention-output-whole": Mutant("records", role=Role.ATTENTION_OUTPUT, change=whole("takes")),
    "up-whole": Mutant("records", role=Role.UP, change=whole("makes")),
    "up-along-heads": Mutant("records", role=Role.UP, change=along("makes", "heads")),
    "down-whole": Mutant("records", role=Role.DOWN, change=whole("takes")),
    "down-along-vocabulary": Mutant("records", role=Role.DOWN, change=along("takes", "vocab")),
    "head-whole": Mutant("records", role=Role.HEAD, change=whole("makes")),
    "tokens-whole": Mutant("records", role=Role.TOKENS, change=whole("takes")),
    "queries-up-whole": Mutant("records", **LATENT, role=Role.QUERIES_UP, change=whole("makes")),
    "keys-down-cut": Mutant("symbols", **LATENT, role=Role.KEYS_DOWN, change=wider("makes", 0, axis="heads")),
    "experts-up-along-ffn": Mutant("records", **LATENT, role=Role.EXPERTS_UP, change=along("makes", "ffn")),
    "keys-norm-whole": Mutant(
        "records", role=Role.ALL_KEYS_NORM, change=whole("makes"), options=(*SPLIT, ("whole_qk_norm", True))
    ),
    "shared-down-whole": Mutant("records", **LATENT, role=Role.SHARED_DOWN, change=whole("takes")),
}
SHAPES = {
    "qkv-wider": Mutant("records", role=Role.QKV, change=wider("makes")),
    "qkv-wider-than-published": Mutant("published", role=Role.QKV, change=wider("makes")),
    "attention-output-wider": Mutant("records", role=Role.ATTENTION_OUTPUT, change=wider("takes")),
    "up-without-gate": Mutant("records", role=Role.UP, change=wider("makes", -1)),
    "down-of-both-halves": Mutant("records", role=Role.DOWN, change=wider("takes")),
    "keys-down-without-rotary": Mutant("records", **LATENT, role=Role.KEYS_DOWN, change=wider("makes", -8)),
    "queries-down-wider": Mutant("records", **LATENT, role=Role.QUERIES_DOWN, change=wider("makes")),
    "keys-norm-of-all": Mutant("records", **LATENT, role=Role.KEYS_NORM, change=wider("makes", 8)),
    "router-one-less": Mutant("records", **LATENT, role=Role.ROUTER, change=wider("makes", -1)),
    "projection-of-one": Mutant("records", **LATENT, role=Role.PROJECTION, change=wider("takes", -64)),
    "query-norm-wider": Mutant(
        "records", role=Role.QUERY_HEAD_NORM, change=wider("makes", 8), options=(*SPLIT, ("qk_norm", True))
    ),
    "no-bias": Mutant("published", role=Role.UP, change=lambda operator: replace(operator, bias=False)),
    "bias-too-many": Mutant("published", role=Role.ATTENTION_OUTPUT, change=lambda each: replace(each, bias=True)),
}
SENT = {
    "rotary-key-not-carried": Mutant(
        "records", **LATENT, role=Role.KEYS_UP, change=lambda each: replace(each, carries=0), options=SPLIT
    ),
    "no-gather": Mutant("symbols", patch=(Tensors, "gather", nothing), options=SPLIT),
    "no-reduce": Mutant("symbols", patch=(Tensors, "reduce", nothing)),
    "no-softmax": Mutant("symbols", patch=(Tensors, "softmax", nothing)),
    "no-sums-of-whole-norms": Mutant(
        "symbols", patch=(Tensors, "row_sums", nothing), options=(*SPLIT, ("whole_qk_norm", True))
    ),
    "no-keys-of-others": Mutant("symbols", patch=(Tensors, "gather_sequence", nothing), options=CONTEXT),
    "copies-stay": Mutant("symbols", **LATENT, patch=(_Sent, "to_experts", nothing), options=SPREAD),
    "results-stay": Mutant("symbols", **LATENT, patch=(_Sent, "from_experts", nothing), options=SPREAD),
    "counts-not-sent": Mutant("symbols", **LATENT, patch=(_Sent, "counts", nothing), options=SPREAD),
    "experts-everywhere": Mutant(
        "records", **LATENT, role=Role.EXPERTS_UP, change=lambda each: replace(each, experts=False), options=SPREAD
    ),
}
SAVED = {
    "mlp-repeats-half": Mutant("symbols", patch=(recompute, "_REPEATED", {"mlp": (Role.UP,)}), options=AGAIN),
    "core-not-repeated": Mutant(
        "symbols", patch=(recompute, "_REPEATED", {"mlp": (Role.UP, Role.DOWN)}), options=AGAIN
    ),
    "activation-keeps-more": Mutant("published", role=Role.ACTIVATION, change=wider("takes")),
    "activation-makes-more": Mutant("published", role=Role.ACTIVATION, change=wider("makes")),
}
ROLES = {
    "dispatch-combines": Mutant(
        "symbols", **LATENT, role=Role.DISPATCH, change=lambda each: replace(each, kind=Kind.COMBINE), options=SPREAD
    ),
    "up-is-down": Mutant("records", role=Role.UP, change=called(Role.DOWN)),
    "queries-are-keys": Mutant("records", **LATENT, role=Role.QUERIES_UP, change=called(Role.KEYS_UP)),
    "shared-up-is-up": Mutant("records", **LATENT, role=Role.SHARED_UP, change=called(Role.UP)),
    "head-is-loss": Mutant("symbols", role=Role.HEAD, change=called(Role.LOSS)),
    "router-is-shared": Mutant("records", **LATENT, role=Role.ROUTER, change=called(Role.SHARED_UP)),
    "router-in-bf16": Mutant(
        "records",
        **LATENT,
        role=Role.ROUTER,
        change=lambda each: replace(each, fp32=False),
        options=(("tp", 2), ("dtype", "bf16")),
    ),
}
MUTANTS = {**CUT, **SHAPES, **SENT, **SAVED, **ROLES}


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mutant], None]]:
    def apply(mutant: Mutant) -> None:
        def mutated(role: Role, *fields: Any, **more: Any) -> Operator:
            operator = Operator(role, *fields, **more)
            return mutant.change(operator) if role is mutant.role else operator

        monkeypatch.setattr(operators, "Operator", mutated)
        if mutant.patch is not None:
            monkeypatch.setattr(*mutant.patch)

    return apply


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_description_of_a_layer_is_found(name: str, mutate: Callable[[Mutant], None]) -> None:
    mutant = MUTANTS[name]
    mutate(mutant)
    with pytest.raises(Found):
        FLOORS[mutant.floor](mutant.plan(name))


@pytest.mark.parametrize("floor", FLOORS)
def test_the_right_description_passes_every_floor(floor: str) -> None:
    wanted = {(each.model, each.options): each for each in MUTANTS.values() if each.floor == floor}
    for mutant in wanted.values():
        FLOORS[floor](mutant.plan(f"right {floor}"))


def test_there_are_mutants_of_what_is_cut_sent_saved_of_shapes_and_roles() -> None:
    assert len(MUTANTS) >= 30
    assert min(map(len, (CUT, SHAPES, SENT, SAVED, ROLES))) >= 4
