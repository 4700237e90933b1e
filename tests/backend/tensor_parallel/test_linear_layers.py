"""The cut linear layers and all their choices: right against plain torch in fp64, and in exact numerics the
same bits for every cut."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from helpers.plans import product_plan
from shardproof.backend.base.microbatch import Microbatch
from shardproof.backend.numerics import make_numerics
from shardproof.backend.tensor_parallel import (
    ColumnParallelLinear,
    LayerContext,
    RowParallelLinear,
    join_fused,
    split_fused,
)
from shardproof.backend.transport.base import SoloGroup
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan

HIDDEN, FFN, SAMPLES, TOKENS = 24, 42, 2, 12
MODEL = ModelSpec(
    "layers", 1, HIDDEN, FFN, 30, 30, 2, 64, 64, activation="gelu", norm="layernorm", position="learned", bias=True
)
UP, DOWN = "layers.0.mlp.up", "layers.0.mlp.down"


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WEIGHTS = {
    f"{UP}.weight": rand(FFN, HIDDEN, seed=1),
    f"{UP}.bias": rand(FFN, seed=2),
    f"{DOWN}.weight": rand(HIDDEN, FFN, seed=3),
    f"{DOWN}.bias": rand(HIDDEN, seed=4),
}


@dataclass(frozen=True)
class Case:
    """One layer; `whole` sides have all features of a rank's own tokens, the others a rank's own
    features of all tokens."""

    layer: str
    choices: tuple[str, ...] = ()
    apart: bool = False

    @property
    def whole_input(self) -> bool:
        return self.layer == UP or "input_is_parallel" in self.choices

    @property
    def whole_output(self) -> bool:
        return self.layer == DOWN or "gather_output" in self.choices

    @property
    def sizes(self) -> tuple[int, int]:
        return (HIDDEN, FFN) if self.layer == UP else (FFN, HIDDEN)

    def make(self, context: LayerContext) -> ColumnParallelLinear | RowParallelLinear:
        frozen = "frozen" in self.choices
        if self.layer == UP:
            return ColumnParallelLinear(context, UP, gather_output="gather_output" in self.choices, frozen=frozen)
        return RowParallelLinear(
            context, DOWN, input_is_parallel="input_is_parallel" not in self.choices, frozen=frozen
        )


def plan_of(mode: str, tp: int, sequence_parallel: bool, dtype: str = "fp32") -> Plan:
    return product_plan(
        model=MODEL,
        samples=SAMPLES,
        micro=SAMPLES,
        sequence=TOKENS,
        dtype=dtype,
        mode=mode,
        **{"gradient_token_block": 4, "reduction_token_block": 2} if mode == "exact" else {},
        tp=tp,
        sequence_parallel=sequence_parallel,
    )


def run_layer(transport, payload):
    """Output, input gradient and parameter gradients of this rank."""
    plan, case = payload
    tp = transport.group("tp", "tp", range(transport.world_size))
    context = LayerContext(plan, tp=tp, numerics=make_numerics(plan), recorder=transport.recorder)
    layer = case.make(context)
    for name, shard in context.shards.items():
        shard.load(WEIGHTS[name])
    inputs, outputs = case.sizes
    features, tokens = slice(*_items(layer)), slice(None) if context.tokens is None else slice(*context.tokens.own)

    def own(full: Tensor, whole: bool) -> Tensor:
        return (full[:, tokens] if whole else full[..., features]).contiguous().to(context.dtype)

    x = own(rand(SAMPLES, TOKENS, inputs, seed=5), case.whole_input).requires_grad_()
    ids = torch.zeros(SAMPLES, TOKENS, dtype=torch.int64)
    with context.running(Microbatch(0, 0, ids, ids)):
        y = layer(x)
        if case.apart:
            y, bias = layer.apart(x)
            assert bias.shape == y.shape
            y = y * 2 + bias
    torch.autograd.backward(y, own(rand(SAMPLES, TOKENS, outputs, seed=6), case.whole_output))
    gradients = context.gradients.reduce(SoloGroup("dp", tp.rank, transport.recorder), lambda _: (0, SAMPLES), tp)
    slices = {name: context.shards[name].slices for name in gradients}
    return y.detach(), x.grad, gradients, slices, features, tokens


def _items(layer) -> tuple[int, int]:
    lo, hi = layer.leaves.items
    return lo * layer.leaves.unit, hi * layer.leaves.unit


def together(case: Case, ranks) -> dict[str, Tensor]:
    """Full tensors from all ranks; what several hold must be equal to the bit."""
    inputs, outputs = case.sizes
    full = {
        "y": torch.full((SAMPLES, TOKENS, outputs), torch.nan),
        "dx": torch.full((SAMPLES, TOKENS, inputs), torch.nan),
    }
    for y, dx, gradients, slices, features, tokens in ranks:
        for name, part, whole in (("y", y, case.whole_output), ("dx", dx, case.whole_input)):
            _put(full[name], (slice(None), tokens) if whole else (slice(None), slice(None), features), part.float())
        for name, gradient in gradients.items():
            _put(full.setdefault(name, torch.full(WEIGHTS[name].shape, torch.nan)), slices[name], gradient)
    assert not any(tensor.isnan().any() for tensor in full.values())
    return full


def _put(full: Tensor, where: tuple[slice, ...], part: Tensor) -> None:
    known = ~full[where].isnan()
    assert torch.equal(full[where][known], part[known]), "replicas differ"
    full[where] = part


def in_fp64(case: Case) -> dict[str, Tensor]:
    inputs, outputs = case.sizes
    x = rand(SAMPLES, TOKENS, inputs, seed=5).double().requires_grad_()
    weight, bias = (WEIGHTS[f"{case.layer}.{name}"].double().requires_grad_() for name in ("weight", "bias"))
    y = x @ weight.t() * (2 if case.apart else 1) + bias
    y.backward(rand(SAMPLES, TOKENS, outputs, seed=6).double())
    found = {"y": y.detach(), "dx": x.grad}
    return (
        found
        if "frozen" in case.choices
        else {**found, f"{case.layer}.weight": weight.grad, f"{case.layer}.bias": bias.grad}
    )


def run(case: Case, mode: str, tp: int, sequence_parallel: bool, dtype: str = "fp32") -> dict[str, Tensor]:
    return together(
        case, run_threads(MemoryWorld(tp, timeout_s=60), run_layer, (plan_of(mode, tp, sequence_parallel, dtype), case))
    )


CASES = {
    "column": Case(UP),
    "column-gathered": Case(UP, ("gather_output",)),
    "column-bias-apart": Case(UP, apart=True),
    "column-gathered-bias-apart": Case(UP, ("gather_output",), apart=True),
    "column-frozen": Case(UP, ("frozen",)),
    "row": Case(DOWN),
    "row-of-whole-inputs": Case(DOWN, ("input_is_parallel",)),
    "row-bias-apart": Case(DOWN, apart=True),
    "row-frozen": Case(DOWN, ("frozen", "input_is_parallel")),
}
LAYOUTS = [(1, False), (2, False), (2, True), (3, False), (3, True), (5, False), (6, True)]


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_plain_torch_in_fp64(
    name: str, tp: int, sequence_parallel: bool, mode: str
) -> None:
    """Sums of up to 42 products of normal numbers: fp32 rounds them to some 1e-5; a missing or doubled
    summand is 1e-1 and more."""
    found, expected = run(CASES[name], mode, tp, sequence_parallel), in_fp64(CASES[name])
    assert found.keys() == expected.keys()
    for tensor, value in expected.items():
        assert (found[tensor] - value).abs().max() < 5e-5, tensor


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_no_bit_depends_on_the_cut(name: str, dtype: str) -> None:
    one = run(CASES[name], "exact", 1, False, dtype)
    for tp, sequence_parallel in LAYOUTS[1:]:
        many = run(CASES[name], "exact", tp, sequence_parallel, dtype)
        for tensor, value in one.items():
            assert torch.equal(many[tensor], value), (tp, sequence_parallel, tensor)


def saved_by_a_forward(transport, frozen):
    plan = plan_of("fast", 1, False)
    context = LayerContext(
        plan, tp=SoloGroup("tp", 0, transport.recorder), numerics=make_numerics(plan), recorder=transport.recorder
    )
    layer = ColumnParallelLinear(context, UP, frozen=frozen)
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    with context.running(Microbatch(0, 0, ids, ids)):
        y = layer(rand(1, TOKENS, HIDDEN, seed=0).requires_grad_())
    return len(y.grad_fn.saved_tensors), context.frozen


def test_a_frozen_layer_keeps_no_input_and_has_no_gradient() -> None:
    ((retained, frozen),) = run_threads(MemoryWorld(1), saved_by_a_forward, True)
    assert (retained, frozen) == (0, {f"{UP}.weight", f"{UP}.bias"})
    ((retained, frozen),) = run_threads(MemoryWorld(1), saved_by_a_forward, False)
    assert (retained, frozen) == (1, set())


@pytest.mark.parametrize("tp", [2, 3])
def test_fused_parts_of_published_weights_are_cut_in_one_way_and_come_apart_again(tp: int) -> None:
    """Gate and up-projection, then query, key and value with two query heads of 3 to a group: every rank's
    features are its items'."""
    for widths, num_items in (((1, 1), 6), ((6, 3, 3), 6)):
        parts = [rand(width * num_items, 5, seed=width) for width in widths]
        fused = join_fused(parts, widths)
        for part, again in zip(parts, split_fused(fused, widths, dim=0), strict=True):
            assert torch.equal(part, again)
        for rank, own in enumerate(fused.chunk(tp)):
            for part, own_part in zip(parts, split_fused(own, widths, dim=0), strict=True):
                assert torch.equal(part.chunk(tp)[rank], own_part)


def test_features_that_are_no_whole_items_are_refused() -> None:
    with pytest.raises(ValueError, match=r"7 features are no whole items of 2 \+ 1"):
        split_fused(torch.zeros(2, 7), (2, 1))
    with pytest.raises(ValueError, match=r"parts of \[4, 3\] features have not \[2, 1\]"):
        join_fused([torch.zeros(4), torch.zeros(3)], (2, 1))
