"""Conjugate mappings against one process: values, gradients, adjointness, and sums whose bits do not
depend on where leaves lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.backend.numerics import ExactNumerics, FastNumerics, Summands
from shardproof.backend.tensor_parallel import mappings
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.base.errors import RankFailure
from shardproof.core.base.reduction import CarryTree
from shardproof.core.layout.leaves import LeafSizes, Leaves
from shardproof.core.program import Collective

SIZES = (1, 2, 3, 5, 6)
CPU = torch.device("cpu")
NUMERICS = {
    "exact": ExactNumerics(LeafSizes(Leaves(1, 1), Leaves(1, 1), Leaves(1, 1), 8, 4), CPU),
    "fast": FastNumerics(CPU),
}


def offsets(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)]


def uneven(size: int, total: int) -> tuple[int, ...]:
    """The first member has nearly all, the others in turn one item and none."""
    others = [rank % 2 for rank in range(1, size)]
    return total - sum(others), *others


def whole_numbers(seed: int, *shape: int) -> torch.Tensor:
    """fp64 whole numbers: sums are exact, so any order gives the same and `==` may be asked for."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


@dataclass(frozen=True)
class Case:
    """A mapping: `run(x, group, numerics)` on one member, `inputs(size)` of all members, and `oracle(inputs)`, the
    outputs of all members from ordinary torch. Replicated inputs and outputs count once in an inner product."""

    run: Callable
    inputs: Callable
    oracle: Callable
    shared_in: bool = False
    shared_out: bool = False


def replicated(*shape):
    return lambda size: [whole_numbers(7, *shape)] * size


def each(*shape):
    return lambda size: [whole_numbers(100 + rank, *shape) for rank in range(size)]


def cut_along(dim, total, *shape):
    def inputs(size):
        return [
            whole_numbers(200 + rank, *shape[:dim], part, *shape[dim:]) for rank, part in enumerate(uneven(size, total))
        ]

    return inputs


def leaf_counts(size):
    return [(rank * 3 + 2) % 5 for rank in range(size)]


def partial_values(make):
    def inputs(size):
        summands = make(leaf_counts(size))
        return [whole_numbers(300 + rank, len(nodes), 4, 7) for rank, nodes in enumerate(summands.nodes)]

    return inputs


def parts_of(x, dim, sizes):
    return list(x.split(list(sizes), dim))


def per_node(make, xs):
    return [x.expand(len(nodes), *x.shape) for x, nodes in zip(xs, make(leaf_counts(len(xs))).nodes, strict=True)]


def exchanged(xs):
    size = len(xs)
    rows = [parts_of(x, 1, [send_size(source, to, size) for to in range(size)]) for source, x in enumerate(xs)]
    return [torch.cat([rows[source][to] for source in range(size)], 1) for to in range(size)]


def send_size(source, to, size):
    return (source + 2 * to) % 3 if size > 1 else 4


def all_to_all_sizes(group):
    sizes = range(group.size)
    return {
        "send_sizes": [send_size(group.rank, to, group.size) for to in sizes],
        "receive_sizes": [send_size(source, group.rank, group.size) for source in sizes],
    }


LEAVES, SUMS = Summands.leaves, Summands.partial_sums
CASES = {
    "copy": Case(
        lambda x, g, n: mappings.copy(x, g, n), replicated(3, 4), lambda xs: [x * 1 for x in xs], shared_in=True
    ),
    "copy per leaf": Case(
        lambda x, g, n: mappings.copy(x, g, n, summands=LEAVES(leaf_counts(g.size))),
        replicated(4, 7),
        lambda xs: per_node(LEAVES, xs),
        shared_in=True,
    ),
    "reduce": Case(
        lambda x, g, n: mappings.reduce(x, g, n), each(3, 5), lambda xs: [sum(xs)] * len(xs), shared_out=True
    ),
    "reduce leaves": Case(
        lambda x, g, n: mappings.reduce(x, g, n, summands=LEAVES(leaf_counts(g.size))),
        partial_values(LEAVES),
        lambda xs: [torch.cat(xs).sum(0)] * len(xs),
        shared_out=True,
    ),
    "reduce partial sums": Case(
        lambda x, g, n: mappings.reduce(x, g, n, summands=SUMS(leaf_counts(g.size))),
        partial_values(SUMS),
        lambda xs: [torch.cat(xs).sum(0)] * len(xs),
        shared_out=True,
    ),
    "scatter last dim": Case(
        lambda x, g, n: mappings.scatter(x, g, dim=-1, sizes=uneven(g.size, 11)),
        replicated(2, 3, 11),
        lambda xs: parts_of(xs[0], 2, uneven(len(xs), 11)),
        shared_in=True,
    ),
    "scatter sequence": Case(
        lambda x, g, n: mappings.scatter(x, g, dim=1),
        replicated(2, 60, 3),
        lambda xs: parts_of(xs[0], 1, [60 // len(xs)] * len(xs)),
        shared_in=True,
    ),
    "gather last dim": Case(
        lambda x, g, n: mappings.gather(x, g, dim=-1, sizes=uneven(g.size, 11)),
        cut_along(2, 11, 2, 3),
        lambda xs: [torch.cat(xs, 2)] * len(xs),
        shared_out=True,
    ),
    "gather sequence": Case(
        lambda x, g, n: mappings.gather(x, g, dim=1),
        each(2, 4, 3),
        lambda xs: [torch.cat(xs, 1)] * len(xs),
        shared_out=True,
    ),
    "all_gather sequence": Case(
        lambda x, g, n: mappings.all_gather(x, g, n, dim=1, sizes=uneven(g.size, 11)),
        cut_along(1, 11, 2, 3),
        lambda xs: [torch.cat(xs, 1) * 1 for _ in xs],
    ),
    "all_gather last dim evenly": Case(
        lambda x, g, n: mappings.all_gather(x, g, n, dim=-1), each(2, 4), lambda xs: [torch.cat(xs, 1) * 1 for _ in xs]
    ),
    "all_gather per partial sum": Case(
        lambda x, g, n: mappings.all_gather(
            x, g, n, dim=1, sizes=uneven(g.size, 11), summands=SUMS(leaf_counts(g.size))
        ),
        cut_along(1, 11, 2, 3),
        lambda xs: per_node(SUMS, [torch.cat(xs, 1)] * len(xs)),
    ),
    "reduce_scatter sequence": Case(
        lambda x, g, n: mappings.reduce_scatter(x, g, n, dim=1, sizes=uneven(g.size, 11)),
        each(2, 11, 3),
        lambda xs: parts_of(sum(xs), 1, uneven(len(xs), 11)),
    ),
    "reduce_scatter last dim evenly": Case(
        lambda x, g, n: mappings.reduce_scatter(x, g, n, dim=-1),
        each(2, 30),
        lambda xs: parts_of(sum(xs), 1, [30 // len(xs)] * len(xs)),
    ),
    "reduce_scatter leaves": Case(
        lambda x, g, n: mappings.reduce_scatter(
            x, g, n, dim=-1, sizes=uneven(g.size, 7), summands=LEAVES(leaf_counts(g.size))
        ),
        partial_values(LEAVES),
        lambda xs: parts_of(torch.cat(xs).sum(0), 1, uneven(len(xs), 7)),
    ),
    "all_to_all": Case(
        lambda x, g, n: mappings.all_to_all(x, g, dim=1, **all_to_all_sizes(g)),
        lambda size: [
            whole_numbers(rank, 2, sum(send_size(rank, to, size) for to in range(size)), 3) for rank in range(size)
        ],
        exchanged,
    ),
    "sequence to hidden": Case(
        lambda x, g, n: mappings.sequence_to_hidden(
            x, g, sequence_sizes=uneven(g.size, 9), hidden_sizes=uneven(g.size, 11)
        ),
        lambda size: [whole_numbers(rank, 2, part, 11) for rank, part in enumerate(uneven(size, 9))],
        lambda xs: parts_of(torch.cat(xs, 1), 2, uneven(len(xs), 11)),
    ),
    "hidden to sequence evenly": Case(
        lambda x, g, n: mappings.hidden_to_sequence(x, g),
        each(2, 30, 4),
        lambda xs: parts_of(torch.cat(xs, 2), 1, [30 // len(xs)] * len(xs)),
    ),
}


def run_cases(transport, mode):
    """Per case this member's output, and its input's gradient for the output gradients that `weights_of` gives."""
    group = transport.group("g", "tp", range(transport.world_size))
    found = {}
    for name, case in CASES.items():
        x = case.inputs(group.size)[group.rank].requires_grad_()
        y = case.run(x, group, NUMERICS[mode])
        (y * weights_of(case, y, group.rank)).sum().backward()
        found[name] = y.detach(), x.grad
    return found


def weights_of(case: Case, y: torch.Tensor, rank: int) -> torch.Tensor:
    """Gradients of the outputs: the same on every member where the output is."""
    return whole_numbers(900 if case.shared_out else 900 + rank, *y.shape)


def oracle_of(case: Case, size: int):
    """Outputs and input gradients of all members, by autograd over ordinary torch in one process."""
    values = case.inputs(size)
    inputs = (
        [values[0].clone().requires_grad_()] * size if case.shared_in else [x.clone().requires_grad_() for x in values]
    )
    outputs = case.oracle(inputs)
    counted = list(enumerate(outputs))[: 1 if case.shared_out else None]
    sum((y * weights_of(case, y, rank)).sum() for rank, y in counted).backward()
    return [
        (y.detach(), x.grad if x.grad is not None else torch.zeros_like(x))
        for y, x in zip(outputs, inputs, strict=True)
    ]


@pytest.mark.parametrize("mode", NUMERICS)
@pytest.mark.parametrize("size", SIZES)
def test_values_and_gradients_are_those_of_one_process(mode, size):
    ranks = run_threads(MemoryWorld(size, timeout_s=60), run_cases, mode)
    for name, case in CASES.items():
        for rank, (expected, gradient) in enumerate(oracle_of(case, size)):
            value, found = ranks[rank][name]
            assert torch.equal(value, expected), (name, rank)
            assert torch.equal(found, gradient), (name, rank)


@pytest.mark.parametrize("mode", NUMERICS)
def test_gloo_gives_what_threads_give(mode, workers):
    threads = run_threads(MemoryWorld(3, timeout_s=60), run_cases, mode)
    for ours, theirs in zip(threads, workers(3, "gloo").run(run_cases, mode), strict=True):
        for name in CASES:
            assert all(map(torch.equal, ours[name], theirs[name])), name


@st.composite
def layouts(draw):
    """Members with random parts of a sequence and of a hidden dimension, and random leaves."""
    size = draw(st.integers(1, 6))
    part = st.lists(st.integers(0, 4), min_size=size, max_size=size)
    return draw(part), draw(part), draw(part), draw(st.integers(0, 2**20))


def adjoint_cases(numerics, group, sequence, hidden, sums):
    """name -> (shape in, replicated?, shape out, replicated?, mapping), on this member."""
    whole, own = (sum(sequence), sum(hidden)), len(sums.nodes[group.rank])
    by_sequence, by_hidden, each_own = (sequence[group.rank], whole[1]), (whole[0], hidden[group.rank]), (own, *whole)
    return {
        "copy": (whole, True, each_own, False, lambda x: mappings.copy(x, group, numerics, summands=sums)),
        "reduce": (each_own, False, whole, True, lambda x: mappings.reduce(x, group, numerics, summands=sums)),
        "scatter": (whole, True, by_sequence, False, lambda x: mappings.scatter(x, group, dim=0, sizes=sequence)),
        "gather": (by_hidden, False, whole, True, lambda x: mappings.gather(x, group, dim=1, sizes=hidden)),
        "all_gather": (
            by_sequence,
            False,
            each_own,
            False,
            lambda x: mappings.all_gather(x, group, numerics, dim=0, sizes=sequence, summands=sums),
        ),
        "reduce_scatter": (
            each_own,
            False,
            by_hidden,
            False,
            lambda x: mappings.reduce_scatter(x, group, numerics, dim=1, sizes=hidden, summands=sums),
        ),
        "swap": (
            by_sequence,
            False,
            by_hidden,
            False,
            lambda x: mappings.swap(x, group, split_dim=1, join_dim=0, split_sizes=hidden, join_sizes=sequence),
        ),
    }


def adjointness(transport, payload):
    """<Ax, y> and <x, A'y> of every kind of mapping on this member; the members' sums must agree."""
    sequence, hidden, leaves, seed = payload
    group = transport.group("g", "tp", range(transport.world_size))
    products = {}
    for mode, numerics in NUMERICS.items():
        for name, case in adjoint_cases(numerics, group, sequence, hidden, Summands.partial_sums(leaves)).items():
            shape_in, shared_in, shape_out, shared_out, run = case
            x = whole_numbers(seed + (0 if shared_in else 1 + group.rank), *shape_in).requires_grad_()
            y = whole_numbers(seed + 50 + (0 if shared_out else 1 + group.rank), *shape_out)
            ax = run(x)
            ax.backward(y)
            counted_out, counted_in = (not shared or group.rank == 0 for shared in (shared_out, shared_in))
            products[mode, name] = (
                float((ax.detach() * y).sum()) * counted_out,
                float((x.detach() * x.grad).sum()) * counted_in,
            )
    return products


@settings(max_examples=40)
@given(layouts())
def test_every_backward_is_the_transpose_of_its_forward(payload):
    ranks = run_threads(MemoryWorld(len(payload[0]), timeout_s=60), adjointness, payload)
    for key in ranks[0]:
        assert sum(rank[key][0] for rank in ranks) == sum(rank[key][1] for rank in ranks), key


def summed(transport, payload):
    """The sum of `values` whose leaves lie on the members as `counts` say, whole and in parts;
    leaves or partial sums."""
    values, counts, partial, dtype = payload
    group, exact = transport.group("g", "tp", range(transport.world_size)), NUMERICS["exact"]
    lo, hi = offsets(counts)[group.rank : group.rank + 2]
    summands = Summands.partial_sums(counts) if partial else Summands.leaves(counts)
    own = values[lo:hi].to(dtype)
    if partial:
        own = torch.stack([tree_sum(values[first:last]) for first, last in summands.nodes[group.rank]] or [own.sum(0)])[
            : hi - lo
        ]
    sizes = uneven(group.size, values.shape[1])
    return (
        mappings.reduce(own, group, exact, summands=summands),
        mappings.gather(
            mappings.reduce_scatter(own, group, exact, dim=0, sizes=sizes, summands=summands), group, dim=0, sizes=sizes
        ),
    )


def tree_sum(leaves: torch.Tensor) -> torch.Tensor:
    tree: CarryTree = CarryTree(len(leaves), torch.add)
    for index, leaf in enumerate(leaves):
        tree.insert((index, index + 1), leaf)
    return tree.root()


@pytest.mark.parametrize("counts", [(13,), (5, 8), (0, 4, 9), (1, 1, 1, 5, 5), (3, 0, 2, 6, 1, 1)])
@pytest.mark.parametrize("partial", [False, True])
def test_exact_sums_have_the_same_bits_wherever_the_leaves_lie(counts, partial):
    values = torch.randn(13, 17, generator=torch.Generator().manual_seed(3))
    expected = tree_sum(values)
    if len(counts) > 1:
        assert not torch.equal(expected, values.sum(0)), "the order does not matter here, so the test could not fail"
    for whole, parts in run_threads(
        MemoryWorld(len(counts), timeout_s=60), summed, (values, counts, partial, torch.float32)
    ):
        assert torch.equal(whole, expected) and torch.equal(parts, expected)


def test_exact_sums_of_bf16_add_in_fp32_and_round_once():
    values = torch.randn(13, 17, generator=torch.Generator().manual_seed(3)).bfloat16()
    expected = tree_sum(values.float()).bfloat16()
    for whole, parts in run_threads(MemoryWorld(3, timeout_s=60), summed, (values, (4, 0, 9), False, torch.bfloat16)):
        assert whole.dtype == torch.bfloat16 and torch.equal(whole, expected) and torch.equal(parts, expected)


def second_derivative(transport, _):
    group = transport.group("g", "tp", range(transport.world_size))
    x = whole_numbers(group.rank, 4).requires_grad_()
    y = mappings.all_gather(x, group, NUMERICS["exact"], dim=0)
    (gradient,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.sum(), x)[0], x.detach()


def test_second_derivatives_flow():
    for second, x in run_threads(MemoryWorld(3, timeout_s=60), second_derivative, None):
        assert torch.equal(second, 3 * 6 * x)  # every member cubes every element


def unchanged(transport, _):
    group = transport.group("g", "tp", range(transport.world_size))
    x = torch.ones(4, 6)
    own = mappings.scatter(x, group, dim=1)
    copied, reduced = (mapping(x, group, NUMERICS["fast"]) for mapping in (mappings.copy, mappings.reduce))
    results = [copied, reduced, own, mappings.gather(own, group, dim=1)]
    return [result is x for result in results], x, own.untyped_storage().nbytes()


def test_arguments_stay_as_they_were_and_one_member_gets_its_argument_back():
    for same, x, own_bytes in run_threads(MemoryWorld(2, timeout_s=60), unchanged, None):
        assert not any(same) and torch.equal(x, torch.ones(4, 6))
        assert own_bytes == 4 * 3 * 4, "a part must not keep the whole tensor alive"
    assert run_threads(MemoryWorld(1), unchanged, None)[0][0] == [True] * 4


def recorded(transport, mode):
    transport.recorder.enabled = True
    group, numerics = transport.group("g", "tp", range(transport.world_size)), NUMERICS[mode]
    x = torch.ones(2, 6, 5, requires_grad=True)
    with transport.recorder.layer("layers.0.mine"):
        y = mappings.reduce_scatter(mappings.copy(x, group, numerics), group, numerics, dim=1)
    y.sum().backward()
    return [operation for _, operation in transport.recorder.events]


def test_collectives_are_recorded_under_the_layer_that_ran_forward_in_both_directions():
    part = 2 * (2 * 6 * 5 * 4) // 3  # what leaves a rank when a tensor of fp32 is spread over three
    expected = {
        "fast": [("reduce_scatter", part), ("all_gather", part), ("all_reduce", 2 * part)],
        "exact": [("all_to_all", part), ("all_gather", part), ("all_to_all", part), ("all_gather", part)],
    }
    for mode, ops in expected.items():
        for operations in run_threads(MemoryWorld(3, timeout_s=60), recorded, mode):
            assert operations == [Collective("layers.0.mine", op, "tp", 3, num_bytes) for op, num_bytes in ops]


REFUSED = {
    "evenly": (
        lambda x, g: mappings.scatter(x, g, dim=1),
        ("scatter cannot cut 5 items of dim 1 evenly over 2 members. Give sizes"),
    ),
    "sum": (
        lambda x, g: mappings.scatter(x, g, dim=1, sizes=[2, 2]),
        r"sizes \[2, 2\], 4 items together, but dim 1 has 5",
    ),
    "count": (
        lambda x, g: mappings.gather(x, g, dim=0, sizes=[4, 4, 4]),
        r"one size of at least 0 per member \(2\), .* \[4, 4, 4\]",
    ),
    "own": (
        lambda x, g: mappings.gather(x, g, dim=0, sizes=[3, 3]),
        ("expects 3 items of dim 0 from this member, but was given 4"),
    ),
    "dim": (lambda x, g: mappings.gather(x, g, dim=2), r"gather along dim 2 of a tensor of shape \(4, 5\)"),
    "twice": (
        lambda x, g: mappings.swap(x, g, split_dim=0, join_dim=-2),
        ("swap needs two dimensions, but was given 0 twice"),
    ),
    "members": (
        lambda x, g: mappings.reduce(x, g, NUMERICS["exact"], summands=Summands.leaves([4])),
        "the summands are those of 1 members, but the group has 2",
    ),
    "summands": (
        lambda x, g: mappings.reduce(x, g, NUMERICS["exact"], summands=Summands.leaves([3, 3])),
        r"this member has 3 summands, but was given shape \(4, 5\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(name):
    run, message = REFUSED[name]
    with pytest.raises(RankFailure, match=message) as caught:
        run_threads(
            MemoryWorld(2, timeout_s=60),
            lambda transport, _: run(torch.ones(4, 5), transport.group("g", "tp", (0, 1))),
            None,
        )
    assert isinstance(caught.value.__cause__, ValueError)
