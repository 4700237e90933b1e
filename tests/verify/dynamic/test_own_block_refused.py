"""A user's own block whose parameters nobody would train or compare is refused before the first step, by name
and with what to use."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardproof import Trainer, assert_bitwise
from shardproof.core.base.errors import PlanError
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.mutations.plans import EXPERTS, tiny


class Sound(nn.Module):
    """What a block may have besides its context's layers: buffers, which nobody trains."""

    def __init__(self, context, layer):
        super().__init__()
        self.norm, self.mlp = context.norm(f"layers.{layer}.mlp.norm"), context.mlp(layer)
        self.register_buffer("share", torch.tensor(0.5))

    def forward(self, x):
        return x + self.share * self.mlp(self.norm(x))


class Scaled(Sound):
    """Has a gain that autograd alone gives gradients: random ones, so that whoever compared it would see it."""

    def __init__(self, context, layer):
        super().__init__(context, layer)
        self.gain = nn.Parameter(torch.ones(()))
        self.gain.register_hook(torch.randn_like)

    def forward(self, x):
        return super().forward(x) * self.gain


class Projected(Sound):
    """Has torch's own layers, one of them inside another."""

    def __init__(self, context, layer):
        super().__init__(context, layer)
        self.more = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24, bias=False))

    def forward(self, x):
        return super().forward(self.more(x))


class Frozen(Sound):
    """Has a parameter that nobody trains."""

    def __init__(self, context, layer):
        super().__init__(context, layer)
        self.gain = nn.Parameter(torch.ones(()), requires_grad=False)


class Buffered(Sound):
    """Has a buffer that autograd gives a gradient."""

    def __init__(self, context, layer):
        super().__init__(context, layer)
        self.register_buffer("gain", torch.ones((), requires_grad=True))


class Unregistered(Sound):
    """Keeps parameters where torch does not look."""

    def __init__(self, context, layer):
        super().__init__(context, layer)
        self._gains = [nn.Parameter(torch.ones(())) for _ in range(2)]


class Listed(nn.Module):
    """Keeps its layers in a list, so that they are none of its modules."""

    def __init__(self, context, layer):
        super().__init__()
        self.layers = [context.norm(f"layers.{layer}.mlp.norm"), context.mlp(layer)]

    def forward(self, x):
        return x + self.layers[1](self.layers[0](x))


class FirstNames(Sound):
    """Every layer names its parameters like the first one."""

    def __init__(self, context, layer):
        super().__init__(context, 0)


class Late(Sound):
    """Makes a layer when it runs."""

    def __init__(self, context, layer):
        super().__init__(context, layer)
        self.context, self.layer = context, layer

    def forward(self, x):
        return super().forward(self.context.norm(f"layers.{self.layer}.attention.norm")(x))


class Tied(nn.Module):
    """A second layer is the first one again."""

    first = None

    def __new__(cls, context, layer):
        if layer == 0:
            cls.first = Sound(context, layer)
        return cls.first


def no_module(context, layer):
    """Gives a function."""
    return torch.tanh


REFUSED = [
    pytest.param(
        Scaled,
        {},
        ("block Scaled of layer 0 has parameters that its context did not make: gain. .*register_buffer"),
        id="own",
    ),
    pytest.param(
        Projected,
        {"dp": 2},
        r"did not make: more\.0\.weight, more\.0\.bias, more\.1\.weight\. .*context\.norm instead of LayerNorm; "
        r"context\.column_linear, context\.row_linear or context\.whole_linear instead of Linear\.",
        id="torchs",
    ),
    pytest.param(
        Frozen, {"tp": 2}, r"did not make: gain\. They would be neither trained nor saved nor compared", id="frozen"
    ),
    pytest.param(Buffered, {}, r"did not make: gain\.", id="buffer-with-gradient"),
    pytest.param(Unregistered, {}, r"did not make: _gains\.", id="in-a-list"),
    pytest.param(
        Listed,
        {"model": EXPERTS},
        r"Listed of layer 0 .* as submodules: layers\.0\.mlp\.norm, layers\.0\.mlp\. .*ModuleList",
        id="loose",
    ),
    pytest.param(
        FirstNames,
        {"pp": 2},
        r"stage 1, which has layers\.1, use parameters of other stages: layers\.0\.mlp\.norm",
        id="names",
    ),
    pytest.param(Late, {}, r"a block makes layers\.0\.attention\.norm while it runs", id="made-late"),
    pytest.param(
        Tied,
        {},
        r"layer 1 holds layers that an earlier block holds: layers\.0\.mlp\.norm, layers\.0\.mlp\.",
        id="twice",
    ),
    pytest.param(no_module, {}, r"of layer 0 is no torch\.nn\.Module\.", id="no-module"),
]


@pytest.mark.parametrize(("block", "plan", "words"), REFUSED)
def test_a_proof_refuses_it(block, plan: dict, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        prove(tiny(**plan), block=block, transport="memory", steps=1)


def test_training_and_assertions_refuse_it_over_processes_too() -> None:
    plan = tiny(pp=2)
    for start in (Trainer(plan, model=Scaled).fit, lambda: assert_bitwise(plan, block=Scaled, steps=1)):
        with pytest.raises(PlanError, match="gain"):
            start()


def test_all_problems_of_a_block_are_reported_together() -> None:
    with pytest.raises(PlanError) as caught:
        prove(tiny(), block=ListedAndScaled, transport="memory", steps=1)
    assert len(caught.value.problems) == 2


class ListedAndScaled(Listed):
    """Wrong twice."""

    def __init__(self, context, layer):
        super().__init__(context, layer)
        self.gain = nn.Parameter(torch.ones(()))


def test_buffers_and_names_shared_inside_a_stage_are_right() -> None:
    for block, plan in ((Sound, tiny(pp=2)), (FirstNames, tiny(dp=2))):
        proof = prove(plan, block=block, transport="memory", steps=1)
        assert proof.findings == () and proof.report["bits_different"] == 0
