"""SGD on shards has the bits of `torch.optim.SGD` on whole tensors, however they are cut and wherever its momentum
rests."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shardproof.backend.base.host_copies import HostCopies
from shardproof.backend.optimizers.held import Held
from shardproof.backend.optimizers.sharded import ShardedOptimizer
from shardproof.core.model.parameters import Parameter
from shardproof.core.plan.optimizer import Optimizer

CPU = torch.device("cpu")
SHAPE = (60, 37)
RATE = 1e-2


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def trained(
    choice: Optimizer, cuts: list[int], *, offloaded: float = 0.0, skips: bool = False, decay: bool = True
) -> tuple[Tensor, Tensor]:
    """Weight and momentum, [60, 37], after three updates of gradients halved by a coefficient, in parts of rows."""
    start, gradients = drawn(*SHAPE), drawn(3, *SHAPE)
    held = [
        Held(Parameter("p", SHAPE, decay=decay), (slice(lo, hi), slice(0, 37)), start[lo:hi].clone(), counts=True)
        for lo, hi in pairwise(cuts)
    ]
    copies = HostCopies(CPU) if offloaded else None
    optimizer = ShardedOptimizer(held, choice, RATE, copies=copies, offloaded=offloaded)
    for gradient in gradients:
        own = [gradient[lo:hi].clone() for lo, hi in pairwise(cuts)]
        optimizer.step(own, torch.tensor(0.5, dtype=torch.float64), torch.tensor(skips))
    moments = [next(iter(optimizer.moments(one).values()), torch.zeros_like(one.tensor)) for one in held]
    return torch.cat([one.tensor for one in held]), torch.cat(moments)


@pytest.mark.parametrize(
    ("choice", "decay"),
    [
        (Optimizer(name="sgd"), True),
        (Optimizer(name="sgd"), False),
        (Optimizer(name="sgd", momentum=0.8, nesterov=True), True),
        (Optimizer(name="sgd", momentum=0.0, weight_decay=0.3), True),
    ],
    ids=["plain", "no-decay", "nesterov", "no-momentum"],
)
def test_sgd_has_the_bits_of_torchs_on_whole_tensors(choice: Optimizer, decay: bool) -> None:
    weight = torch.nn.Parameter(drawn(*SHAPE))
    torchs = torch.optim.SGD(
        [weight],
        RATE,
        momentum=choice.own_momentum,
        nesterov=choice.own_nesterov,
        weight_decay=choice.weight_decay * decay,
    )
    for gradient in drawn(3, *SHAPE):
        weight.grad = gradient * 0.5
        torchs.step()
    momentum = torchs.state[weight]["momentum_buffer"] if choice.own_momentum else torch.zeros(SHAPE)
    for cuts in ([0, 60], [0, 20, 40, 60], [0, 1, 33, 60]):
        for offloaded in (0.0, 0.4) if choice.own_momentum else (0.0,):
            own_weight, own_momentum = trained(choice, cuts, offloaded=offloaded, decay=decay)
            assert torch.equal(own_weight, weight) and torch.equal(own_momentum, momentum)


def test_a_skipped_step_changes_neither_weight_nor_momentum() -> None:
    weight, momentum = trained(Optimizer(name="sgd"), [0, 30, 60], skips=True)
    assert torch.equal(weight, drawn(*SHAPE)) and not momentum.any()
