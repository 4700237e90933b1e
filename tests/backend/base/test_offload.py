"""Tensors in host memory come back with every bit, one copy serves all views, and what lives on stays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardproof.backend.base.host_copies import HostCopies
from shardproof.backend.base.offload import Retained, Saved
from shardproof.backend.optimizers import offloaded_moments
from shardproof.backend.optimizers.held import Held
from shardproof.backend.optimizers.offloaded_moments import OffloadedMoments, num_offloaded
from shardproof.backend.optimizers.sharded import ShardedOptimizer
from shardproof.core.model.parameters import Parameter
from shardproof.core.plan.optimizer import Optimizer

CPU = torch.device("cpu")


def nothing_stays(address: int) -> bool:
    return False


def test_views_of_one_tensor_are_copied_once_and_come_back_as_they_were():
    copies = HostCopies(CPU)
    retained, whole = Retained(copies, nothing_stays), torch.arange(24.0).view(4, 6)
    packed = [retained.pack(each) for each in (whole, whole.t(), whole[1:3, ::2])]
    assert copies.sent_bytes == whole.nbytes
    retained.settle()
    whole.fill_(-1.0)
    retained.arrive()
    assert copies.brought_bytes == whole.nbytes
    expected = torch.arange(24.0).view(4, 6)
    for one, tensor in zip(packed, (expected, expected.t(), expected[1:3, ::2]), strict=True):
        assert isinstance(one, Saved)
        assert torch.equal(one(), tensor) and one().stride() == tensor.stride()


def test_what_is_asked_for_after_its_layer_comes_once_more():
    copies = HostCopies(CPU)
    retained = Retained(copies, nothing_stays)
    saved = retained.pack(torch.ones(8))
    retained.settle()
    retained.arrive()
    retained.let_go()
    assert isinstance(saved, Saved) and torch.equal(saved(), torch.ones(8))
    assert copies.brought_bytes == 64


def test_a_buffer_is_used_again_when_nobody_holds_what_lies_in_it():
    copies = HostCopies(CPU)
    first = Retained(copies, nothing_stays)
    packed = first.pack(torch.ones(300))
    assert isinstance(packed, Saved)
    address = packed.stored.host.data_ptr()
    first.settle()
    assert Retained(copies, nothing_stays).pack(torch.ones(300)).stored.host.data_ptr() != address
    del packed
    again = Retained(copies, nothing_stays).pack(torch.ones(260))
    assert again.stored.host.data_ptr() == address  # both fit 2048 bytes


def test_weights_and_empty_tensors_stay():
    weight, copies = torch.ones(4, 4), HostCopies(CPU)
    retained = Retained(copies, lambda address: address == weight.data_ptr())
    assert all(isinstance(retained.pack(each), Tensor) for each in (weight, weight[1:].t(), torch.empty(0, 3)))
    assert copies.sent_bytes == 0


def test_the_gradients_of_autograd_are_those_of_tensors_that_stayed():
    x, w = torch.randn(5, 7, requires_grad=True), torch.randn(7, 7, requires_grad=True)

    def gradients(retained: Retained | None) -> list[Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(*((lambda t: t,) * 2)) if retained is None else retained.hooks():
            y = torch.nn.functional.gelu(x @ w).softmax(-1).square().sum()
        if retained is not None:
            retained.settle()
        return list(torch.autograd.grad(y, [x, w]))

    copies = HostCopies(CPU)
    moved = gradients(Retained(copies, nothing_stays))
    assert copies.sent_bytes and all(map(torch.equal, moved, gradients(None)))


def adamw(
    tensors: Sequence[Tensor], decays: Sequence[bool], share: float, rounded: Sequence[Tensor] = ()
) -> ShardedOptimizer:
    """Of the first tensors the weights rest in host memory too, and are left in `rounded` as updates go."""
    held = [
        Held(
            Parameter(f"p{number}", tuple(each.shape), decay=decay),
            tuple(map(slice, each.shape)),
            each,
            counts=True,
            rounded=rounded[number] if number < len(rounded) else None,
        )
        for number, (each, decay) in enumerate(zip(tensors, decays, strict=True))
    ]
    return ShardedOptimizer(held, Optimizer(), 1e-2, copies=HostCopies(CPU) if share else None, offloaded=share)


SHAPES = st.lists(
    st.tuples(st.sampled_from([(1,), (63,), (64,), (7, 19), (130,), (3, 64)]), st.booleans()), min_size=1, max_size=5
)


@given(SHAPES, st.sampled_from([0.3, 0.5, 1.0]), st.sampled_from([64, 128, 512]), st.integers(0, 5))
@settings(max_examples=40)
def test_an_update_of_what_is_in_host_memory_has_the_bits_of_any_other(shapes, share, piece, num_masters):
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(shape, generator=generator) for shape, _ in shapes]
    given_gradients = [[torch.randn(shape, generator=generator) for shape, _ in shapes] for _ in range(3)]
    ended = []
    before, offloaded_moments.PIECE_ELEMENTS = offloaded_moments.PIECE_ELEMENTS, piece
    try:
        for offloaded in (0.0, share):
            tensors = [each.clone() for each in weights]
            rounded = [each.bfloat16() for each in tensors[:num_masters] if offloaded]
            optimizer = adamw(tensors, [decay for _, decay in shapes], offloaded, rounded)
            for gradients in given_gradients:
                optimizer.step([each.clone() for each in gradients], torch.tensor(0.5, dtype=torch.float64))
            states = [optimizer.saved_state(one) for one in optimizer.held]
            ended.append([*tensors, *(state[name] for state in states for name in sorted(state))])
            assert all(torch.equal(low, each.bfloat16()) for low, each in zip(rounded, tensors, strict=False))
    finally:
        offloaded_moments.PIECE_ELEMENTS = before
    assert all(map(torch.equal, *ended))


@given(SHAPES, st.sampled_from([64, 128, 512]))
def test_pieces_have_every_element_once_and_in_one_group(shapes, piece):
    sizes = [torch.Size(shape).numel() for shape, _ in shapes]
    groups = sorted(decay for _, decay in shapes)
    moments = OffloadedMoments(HostCopies(CPU), [(size,) for size in sizes], groups, piece_elements=piece)
    seen = [
        (part.tensor, element)
        for each in moments.pieces
        for part in each.parts
        for element in range(part.lo, part.hi)
        if groups[part.tensor] == each.group
    ]
    assert seen == [(tensor, element) for tensor, size in enumerate(sizes) for element in range(size)]
    assert all(each.hi - each.lo <= piece and part.place % 64 == 0 for each in moments.pieces for part in each.parts)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_the_first_tensors_are_as_few_as_reach_the_share(share):
    sizes = [40, 30, 20, 10]
    number = num_offloaded(sizes, share)
    assert sum(sizes[:number]) >= share * 100 and (number == 0 or sum(sizes[: number - 1]) < share * 100)
