"""A user's own layer, written with ours, is proved like ours; one that breaks the rules is found out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers.gates import sampled
from helpers.plans import training_plan
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.tensor_parallel import mappings, split_fused
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.sections import Numerics
from shardproof.verify.dynamic.proof import prove


def tiny(
    layout: Layout, *, model="tiny-gpt", micro=1, schedule="1F1B", dtype="fp32", overlap=False, **recompute
) -> Plan:
    return training_plan(
        layout,
        model=model,
        hidden_dropout=0.1,
        samples=6,
        micro=micro,
        tp_comm_overlap=overlap or None,
        dtype=dtype,
        recompute=Recompute(**recompute),
        schedule=schedule,
    )


class Plain(nn.Module):
    """Attention and MLP side by side on one norm; the MLP is written out, its activation computed
    again in the backward."""

    def __init__(self, context, layer):
        super().__init__()
        self.context, self.name = context, f"layers.{layer}"
        self.norm, self.attention = context.norm(f"{self.name}.attention.norm"), context.attention(layer)
        self.up, self.down = context.column_linear(f"{self.name}.mlp.up"), context.row_linear(f"{self.name}.mlp.down")

    def forward(self, x):
        y = self.norm(x)
        self.context.observe(f"{self.name}.attention.norm", y)
        return x + self.context.dropout(
            f"{self.name}.both", self.attention(y) + self.down(self.context.recomputed(self.activated, y))
        )

    def activated(self, y):
        up = self.up(y)
        if self.context.model.gated:
            gate, up = split_fused(up, (1, 1))
            return self.context.elementwise(F.silu, gate) * up
        return self.context.elementwise(torch.tanh, up)


class EveryChoice(nn.Module):
    """An MLP whose middle is whole on every rank, with a frozen first weight and biases added late."""

    def __init__(self, context, layer):
        super().__init__()
        self.context, name = context, f"layers.{layer}"
        self.attention_norm, self.attention = context.norm(f"{name}.attention.norm"), context.attention(layer)
        self.norm = context.norm(f"{name}.mlp.norm")
        self.up = context.column_linear(f"{name}.mlp.up", gather_output=True, frozen=layer == 0)
        self.down = context.row_linear(f"{name}.mlp.down", input_is_parallel=False)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        middle, bias = self.up.apart(self.norm(x))
        middle = self.context.elementwise(F.gelu, middle + bias)
        assert middle.shape[-1] == self.context.model.ffn_hidden_size
        y, bias = self.down.apart(middle)
        return x + y * 0.5 + bias


class WithMappings(nn.Module):
    """Hidden states that go from tokens to features and back between two halves, by the group and the
    numerics of the context."""

    def __init__(self, context, layer):
        super().__init__()
        self.context, name = context, f"layers.{layer}"
        self.norm, self.mlp = context.norm(f"{name}.mlp.norm"), context.mlp(layer)

    def forward(self, x):
        tp, tokens = self.context.tp, self.context.tokens
        if tokens is not None and tp.size > 1:
            features = [len(part) for part in torch.arange(x.shape[-1]).tensor_split(tp.size)]
            x = mappings.sequence_to_hidden(x, tp, sequence_sizes=tokens.sizes, hidden_sizes=features)
            x = mappings.hidden_to_sequence(x * 2, tp, sequence_sizes=tokens.sizes, hidden_sizes=features)
        else:
            x = x * 2
        return x + self.mlp(self.norm(x))


class Forgetful(nn.Module):
    """Scales by a mean over the features of this rank only."""

    def __init__(self, context, layer):
        super().__init__()
        self.norm = context.norm(f"layers.{layer}.mlp.norm")
        self.up, self.down = (
            context.column_linear(f"layers.{layer}.mlp.up"),
            context.row_linear(f"layers.{layer}.mlp.down"),
        )

    def forward(self, x):
        up = self.up(self.norm(x))
        return x + self.down(up * up.mean(-1, keepdim=True))


SP = {"sequence_parallel": True}


@sampled(
    ("plan", "block"),
    [
        pytest.param(tiny(Layout(tp=2, dp=3), model="tiny-llama", micro=2), Plain, id="gated-tp2-dp3"),
        pytest.param(
            tiny(Layout(tp=3, dp=2, **SP), model="tiny-gpt-6h", micro=3, mode="full"), Plain, id="tp3-sp-recomputed"
        ),
        pytest.param(
            tiny(Layout(tp=2, pp=2, vpp=2, **SP), schedule="ZBVZeroBubble", dtype="bf16"),
            Plain,
            id="bf16-split-backward",
        ),
        pytest.param(tiny(Layout(tp=4), mode="full", distribute=True), EveryChoice, id="every-choice-tp4-distributed"),
        pytest.param(tiny(Layout(tp=2, pp=2, **SP), overlap=True), EveryChoice, id="every-choice-sp-overlap"),
        pytest.param(
            tiny(Layout(tp=3, **SP), model="tiny-gpt-6h", dtype="bf16"), EveryChoice, id="every-choice-tp3-bf16"
        ),
        pytest.param(tiny(Layout(tp=4, **SP), model="tiny-llama", micro=2), WithMappings, id="mappings-tp4-sp"),
    ],
    on_push=4,
)
def test_no_bit_of_an_own_block_differs(plan: Plan, block: type[nn.Module]) -> None:
    proof = prove(plan, block=block, transport="memory", steps=1)
    assert proof.findings == () and proof.changes == () and proof.report["bits_different"] == 0
    assert proof.report["tensors_compared"] > 50


def test_an_own_block_is_sent_to_the_ranks_of_gloo_and_is_another_model_than_ours() -> None:
    own, ours = prove(tiny(Layout(tp=2)), block=Plain, steps=1), prove(tiny(Layout(tp=2)), transport="memory", steps=1)
    assert own.ok and own.report["losses"] != ours.report["losses"]


def two_steps(transport, plan):
    """What moved, and what the optimizer knows."""
    rank = TrainingRank(transport, plan, model=EveryChoice)
    before = {name: shard.storage.clone() for stage in rank.stages.values() for name, shard in stage.shards.items()}
    for step in range(2):
        rank.step(step)
    after = {name: shard.storage for stage in rank.stages.values() for name, shard in stage.shards.items()}
    return (
        {name for name in before if not torch.equal(before[name], after[name])},
        {held.name for held in rank.optimizer.held},
        set(before),
    )


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_frozen_weights_stay_as_they_are_and_have_no_optimizer_state(mode: str) -> None:
    plan = tiny(Layout(tp=2))
    numerics = plan.numerics if mode == "exact" else Numerics("fast")
    for moved, updated, everything in run_threads(
        MemoryWorld(2, timeout_s=60), two_steps, replace(plan, numerics=numerics)
    ):
        assert everything - updated == everything - moved == {"layers.0.mlp.up.weight", "layers.0.mlp.up.bias"}


def test_a_block_that_forgets_the_other_ranks_is_found_out_where_it_does() -> None:
    proof = prove(tiny(Layout(tp=2)), block=Forgetful, transport="memory", steps=1)
    first = proof.report["first_divergence"]
    assert not proof.ok and (first["tensor"], first["phase"]) == ("layers.0.output", "activation")


class TwiceNormed(nn.Module):
    """Two norms and two MLPs of one name, which share their weights."""

    def __init__(self, context, layer):
        super().__init__()
        self.norms = nn.ModuleList([context.norm(f"layers.{layer}.mlp.norm") for _ in range(2)])
        self.mlps = nn.ModuleList([context.mlp(layer) for _ in range(2)])

    def forward(self, x):
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        return x


def test_weights_that_are_used_twice_give_other_tensors_each_time_which_are_computed_again():
    plan = tiny(Layout(tp=2), mode="selective", modules=("norm", "mlp"))
    proof = prove(plan, block=TwiceNormed, transport="memory", steps=1)
    assert proof.ok, proof.text()


def test_an_own_block_without_some_parameters_of_the_model_is_proved_in_fast_numerics() -> None:
    proof = prove(
        replace(tiny(Layout(tp=2)), numerics=Numerics("fast")), block=WithMappings, transport="memory", steps=1
    )
    assert proof.ok and proof.report["fast"]["tensors_outside"] == 0, proof.text()
