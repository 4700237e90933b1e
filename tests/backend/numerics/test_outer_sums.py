"""Weight gradients that are computed into their sum: the bits of the canonical trees over blocks of tokens and over
samples, in whatever order microbatches arrive."""

from __future__ import annotations

import pytest
import torch

from shardproof.backend.gradients.gradients import _added
from shardproof.backend.numerics import outer_sums, same_bits, tiles
from shardproof.backend.numerics.exact_gradients import ExactAccumulator
from shardproof.backend.numerics.outer_sums import BYTES_AT_ONCE, OuterSums
from shardproof.backend.numerics.same_bits import Operands, multiply_into
from shardproof.backend.ranks.live_memory import LiveMeter
from shardproof.core.base.reduction import split

CUT, WHOLE = 40, 24


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def intervals(length: int, size: int) -> tuple[tuple[int, int], ...]:
    return tuple((lo, min(lo + size, length)) for lo in range(0, length, size))


def tree_sum(terms: list[torch.Tensor], node: tuple[int, int]) -> torch.Tensor:
    if node[1] - node[0] == 1:
        return terms[node[0]]
    left, right = split(node)
    return tree_sum(terms, left) + tree_sum(terms, right)


def by_hand(x: torch.Tensor, y: torch.Tensor, leaf: int, block: int) -> torch.Tensor:
    """The sum over samples of that over blocks, every tile a product of its own."""
    samples = []
    for x_SC, y_SF in zip(x, y, strict=True):
        terms = []
        for first, last in intervals(len(x_SC), block):
            term = torch.empty(CUT, WHOLE)
            for lo, hi in intervals(CUT, leaf):
                multiply_into(term[lo:hi], x_SC[first:last, lo:hi].clone().t(), y_SF[first:last].clone())
            terms.append(term)
        samples.append(tree_sum(terms, (0, len(terms))))
    return tree_sum(samples, (0, len(samples)))


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("leaf", "block"), [(8, 16), (7, 5), (40, 3), (1, 16)])
@pytest.mark.parametrize("microbatches", [[1] * 6, [2, 2, 2], [3, 3], [6], [4, 2], [1, 4, 1]])
def test_a_batch_has_the_bits_of_its_tree_however_it_is_cut(
    microbatches: list[int], leaf: int, block: int, backwards: bool
) -> None:
    x, y = drawn(6, 16, CUT, seed=0), drawn(6, 16, WHOLE, seed=1)
    accumulator, pieces, first = ExactAccumulator(6), [], 0
    for count in microbatches:
        part = slice(first, first + count)
        pieces.append((first, OuterSums(x[part], y[part], intervals(CUT, leaf), intervals(16, block))))
        first += count
    for first, sums in reversed(pieces) if backwards else pieces:
        accumulator.add(first, sums)
    (total,) = accumulator.held
    assert torch.equal(total, by_hand(x, y, leaf, block))


@pytest.mark.parametrize("same", [False, True])
def test_larger_products_are_used_where_they_have_the_same_bits_and_there_alone(
    same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, shapes = drawn(2, 16, CUT, seed=0), drawn(2, 16, WHOLE, seed=1), []
    monkeypatch.setattr(Operands, "joins", lambda *given: same)
    monkeypatch.setattr(Operands, "adds", lambda *given: False)
    outer_sums._way.cache_clear()

    def counted(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        shapes.append(tuple(out.shape))
        multiply_into(out, left, right)

    monkeypatch.setattr(tiles, "multiply_into", counted)
    accumulator = ExactAccumulator(2)
    accumulator.add(0, OuterSums(x, y, intervals(CUT, 8), intervals(16, 8)))
    assert shapes == ([(CUT, WHOLE)] * 4 if same else [(8, WHOLE)] * 20)
    outer_sums._way.cache_clear()


def test_every_sample_can_be_read_and_two_uses_of_a_parameter_add_up() -> None:
    x, y = drawn(3, 16, CUT, seed=0), drawn(3, 16, WHOLE, seed=1)
    sums = OuterSums(x, y, ((0, CUT),), ((0, 16),))
    assert len(sums) == 3 and torch.equal(sums[2], x[2].t() @ y[2])
    assert torch.equal(sums[-1], sums[2]) and all(torch.equal(*pair) for pair in zip(sums, sums[:3], strict=True))
    with pytest.raises(IndexError):
        sums[3]
    twice = _added([sums, OuterSums(y.repeat(1, 1, 2)[..., :CUT], y, ((0, CUT),), ((0, 16),))])
    expected = [a.t() @ b + c.repeat(1, 2)[:, :CUT].t() @ b for a, b, c in zip(x, y, y, strict=True)]
    assert all(torch.equal(*pair) for pair in zip(twice, expected, strict=True))


def test_a_microbatch_that_is_added_holds_no_second_tensor_of_the_weight() -> None:
    """Of two samples with two blocks each: two buffers of a part of the rows."""
    width = 256
    leaf = BYTES_AT_ONCE // (4 * width)
    cut = 8 * leaf
    x, y = drawn(4, 8, cut, seed=0), drawn(4, 8, width, seed=1)
    pieces = [OuterSums(x[at : at + 2], y[at : at + 2], intervals(cut, leaf), intervals(8, 4)) for at in (0, 2)]
    accumulator, meter = ExactAccumulator(4), LiveMeter(0)
    accumulator.add(0, pieces[0])
    (total,) = accumulator.held
    meter.hold([x, y, total])
    before = meter.live_bytes
    with meter.watch():
        accumulator.add(2, pieces[1])
    assert meter.live_bytes == before
    assert meter.peak_bytes - before <= 3 * BYTES_AT_ONCE < total.nbytes / 2


def test_another_order_of_a_product_is_seen_and_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of one row whose last term is added first differs in some bit of 4,096 numbers."""
    operands = Operands.of(drawn(2, 9, seed=0), drawn(9, 2, seed=1))

    def turned(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        out.copy_(left.flip(1) @ right.flip(0) if len(left) == 1 else left @ right)

    monkeypatch.setattr(same_bits, "multiply_into", turned)
    for cached in (same_bits._joins, same_bits._adds):
        cached.cache_clear()
    assert not operands.joins((1, 1), 9, (2,)) and not operands.adds(1, 9, 2)
    for cached in (same_bits._joins, same_bits._adds):
        cached.cache_clear()


def test_one_column_and_sums_on_another_device_are_never_joined() -> None:
    """The bits of one column follow the strides of the result; products were added to sums on the CPU alone."""
    operands = Operands.of(drawn(4, 9, seed=0), drawn(9, 1, seed=1))
    assert operands == (False, False, torch.get_num_threads(), torch.device("cpu"))
    assert not operands.adds(4, 9, 1)
    elsewhere = operands._replace(device=torch.device("meta"))
    assert not elsewhere.adds(4, 9, 3) and elsewhere.joins((2,), 9, (3,))
