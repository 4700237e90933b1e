"""Muon's orthogonal matrices: next to torch's own Muon, and bits that nothing but shape and values decides."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shardproof.backend.base.recorder import Recorder
from shardproof.backend.optimizers.held import Held
from shardproof.backend.optimizers.muon import Muon
from shardproof.backend.optimizers.orthogonal import newton_schulz, orthogonal_parts
from shardproof.backend.optimizers.sharded import ShardedOptimizer
from shardproof.backend.transport.base import SoloGroup
from shardproof.core.model.matrices import Split, split_of
from shardproof.core.model.model_presets import model_preset
from shardproof.core.model.parameters import layer_parameters
from shardproof.core.plan.optimizer import Optimizer

CPU = torch.device("cpu")
MODEL = model_preset("tiny-llama")
RATE = 0.02


def squares(tensor: Tensor) -> Tensor:
    return tensor.double().square().sum()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scale", ["original", "match_rms"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_three_updates_are_those_of_torchs_muon_but_for_its_products_in_bf16(scale: str, nesterov: bool) -> None:
    (output,) = (each for each in layer_parameters(MODEL, 0) if each.name.endswith("attention.output.weight"))
    choice = Optimizer(name="muon", muon_scale=scale, nesterov=nesterov)
    weight = torch.nn.Parameter(drawn(*output.shape))
    # torch adds (1 - momentum) of a gradient to its momentum, which changes no direction
    torchs = torch.optim.Muon(
        [weight], RATE, 0.1, momentum=0.95, nesterov=nesterov, adjust_lr_fn=scale.replace("rms", "rms_adamw")
    )
    own = weight.detach().clone()
    held = [Held(output, tuple(slice(0, size) for size in output.shape), own, counts=True)]
    muon = Muon(MODEL, choice, [(SoloGroup("matrices", 0, Recorder()), held)], squares, CPU)
    optimizer = ShardedOptimizer(held, choice, RATE, muon=muon)
    for seed in (1, 2, 3):
        gradient = drawn(*output.shape, seed=seed)
        weight.grad = gradient.clone()
        torchs.step()
        optimizer.step([gradient])
    start = drawn(*output.shape)
    assert (own - weight).norm() < 0.02 * (weight - start).norm()
    assert (own - start).norm() > 0.5 * (weight - start).norm()


@pytest.mark.parametrize("shape", [(64, 192), (192, 64), (37, 129), (300, 7), (5, 1)])
def test_bits_follow_from_shape_and_values_alone(shape: tuple[int, int]) -> None:
    """Not from threads, addresses or strides, and singular values come near 1."""
    values, norm = drawn(*shape), squares(drawn(*shape))
    first = newton_schulz(values, 5, lambda _: norm)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            for offset in (1, 3, 16):
                moved = torch.empty(values.numel() + offset)[offset:].view(shape).copy_(values)
                assert torch.equal(newton_schulz(moved, 5, lambda _: norm), first)
                assert torch.equal(newton_schulz(moved.t().contiguous().t(), 5, lambda _: norm), first)
    finally:
        torch.set_num_threads(threads)
    assert torch.linalg.svdvals(first).sub(1.0).abs().max() < 0.4
    assert not newton_schulz(torch.zeros(shape), 5, squares).any()


def test_queries_keys_values_gates_and_units_are_matrices_of_their_own() -> None:
    """As Jordan 2024 has it for queries, keys and values; gates and up-projections are apart in most models."""
    splits = {each.name: split_of(MODEL, each) for each in layer_parameters(MODEL, 0) if len(each.shape) == 2}
    group, d = MODEL.query_heads_per_group, MODEL.head_dim
    qkv = splits["layers.0.attention.qkv.weight"]
    ends = 0, group * d, (group + 1) * d, (group + 2) * d
    assert qkv == Split(ends[-1], tuple(pairwise(ends)))
    assert splits["layers.0.mlp.up.weight"] == Split(2, ((0, 1), (1, 2)))
    whole = drawn(12, 20)
    choice = Optimizer(name="muon", muon_scale="original")
    made = orthogonal_parts(whole, Split(2, ((0, 1), (1, 2))), choice, squares)
    for first in (0, 1):
        assert torch.equal(made[first::2], newton_schulz(whole[first::2], 5, squares))
