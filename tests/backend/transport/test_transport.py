"""One contract, held by every transport: what arrives, what is recorded, what may be changed
afterwards, and what is refused."""

import functools
import inspect
import threading
import time

import pytest
import torch

from shardproof.backend.numerics.summands import Summands, merged, part_over, sum_over
from shardproof.backend.transport.base import Group, ring_all_reduce_bytes
from shardproof.backend.transport.baton import PairedGroup
from shardproof.core.base.reduction import CarryTree
from shardproof.core.machine.host import EXCHANGED_BYTES
from shardproof.core.program import Collective

TRANSPORTS = ("memory", "gloo", "shm")
WORLDS = (1, 2, 3, 5)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.bool)

every_transport = pytest.mark.parametrize("transport", TRANSPORTS)
every_world = pytest.mark.parametrize("world_size", WORLDS)


def payload(source, destination, shape, dtype):
    """A tensor that shows where it comes from and where it goes: values 0..15, which every dtype here holds exactly."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + 3 * source + 5 * destination) % 16).reshape(shape).to(torch.float32).to(dtype)


def uneven(source, destination):
    """Shapes that differ for every pair; (0, 3), (1, 0), (2, 4) ... are empty."""
    return ((source + destination) % 3, 2 + destination) if (source + 2 * destination) % 5 else (0, 4)


def bits(tensor):
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def all_to_all_job(transport, dtypes):
    group = transport.group("world", "tp", range(transport.world_size))
    received = {}
    for dtype in dtypes:
        parts = [payload(group.rank, i, uneven(group.rank, i), dtype) for i in range(group.size)]
        arrived = group.all_to_all(parts, [uneven(i, group.rank) for i in range(group.size)])
        received[str(dtype)] = [bits(tensor) for tensor in arrived]
    return received


@every_transport
@every_world
def test_all_to_all_delivers_uneven_and_empty_parts_of_seven_dtypes(workers, transport, world_size):
    results = workers(world_size, transport).run(all_to_all_job, DTYPES)
    for destination, received in enumerate(results):
        for dtype in DTYPES:
            expected = [
                bits(payload(source, destination, uneven(source, destination), dtype)) for source in range(world_size)
            ]
            assert received[str(dtype)] == expected


def all_gather_job(transport, dtypes):
    group = transport.group("world", "dp", range(transport.world_size))
    shapes = [(i, 3) for i in range(group.size)]
    even = [[bits(t) for t in group.all_gather(payload(group.rank, 0, (2, 3), dtype))] for dtype in dtypes]
    differing = [
        [bits(t) for t in group.all_gather(payload(group.rank, 0, shapes[group.rank], dtype), shapes)]
        for dtype in dtypes
    ]
    scalars = [tensor.item() for tensor in group.all_gather(torch.tensor(group.rank * 10))]
    empty = [tuple(tensor.shape) for tensor in group.all_gather(torch.empty(0, 7))]
    return even, differing, scalars, empty


@every_transport
@every_world
def test_all_gather_of_even_uneven_scalar_and_empty_tensors(workers, transport, world_size):
    ranks = range(world_size)
    expected = (
        [[bits(payload(i, 0, (2, 3), dtype)) for i in ranks] for dtype in DTYPES],
        [[bits(payload(i, 0, (i, 3), dtype)) for i in ranks] for dtype in DTYPES],
        [i * 10 for i in ranks],
        [(0, 7)] * world_size,
    )
    assert workers(world_size, transport).run(all_gather_job, DTYPES) == [expected] * world_size


TREES = ((1, 1, 1, 1, 1), (3, 3, 2, 0, 4), (0, 7, 1, 0, 0), (64, 1, 0, 30, 5))
"""Leaves of each member; of fewer members the first ones."""


def tree_sum_job(transport, counts):
    """The sum of all leaves for an uneven part of the elements, and the same from all leaves by the tree itself."""
    group = transport.group("world", "dp", range(transport.world_size))
    counts = counts[: group.size]
    summands, found = Summands.leaves(counts), []
    for width in (0, 1, 1023, 70_000):
        leaves = torch.randn(sum(counts), group.size, width, generator=torch.Generator().manual_seed(width))
        lo = sum(counts[: group.rank])
        own = merged(leaves[lo : lo + counts[group.rank]], summands, group.rank)
        total = part_over(group, own.flatten(1), summands, dim=0, sizes=[width] * group.size)
        tree = CarryTree(sum(counts), torch.add)
        for leaf, value in enumerate(leaves[:, group.rank]):
            tree.insert((leaf, leaf + 1), value)
        whole = sum_over(group, own.clone(), summands)
        found.append(torch.equal(total, tree.root()) and torch.equal(whole[group.rank], tree.root()))
    return found


@every_transport
@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("counts", TREES)
def test_sums_over_members_are_those_of_the_canonical_tree(workers, transport, world_size, counts):
    assert workers(world_size, transport).run(tree_sum_job, counts) == [[True] * 4] * world_size


def test_a_pair_of_communicators_makes_every_call_of_a_group():
    calls = {name for name, value in vars(Group).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert calls - {"release"} <= set(vars(PairedGroup))


def all_reduce_job(transport, _):
    group = transport.group("world", "dp", range(transport.world_size))
    values = torch.tensor([1.0, -2.0, 4.0]) * (group.rank + 1)
    before = values.clone()
    sums = [
        group.all_reduce(values.to(dtype), "sum").tolist()
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64)
    ]
    largest = group.all_reduce(values, "max").tolist()
    group.barrier()
    return sums, largest, torch.equal(values, before)


@every_transport
@every_world
def test_all_reduce_sums_and_maximises_without_touching_its_argument(workers, transport, world_size):
    total = world_size * (world_size + 1) // 2
    expected = ([[total, -2 * total, 4 * total]] * 4, [world_size, -2, 4 * world_size], True)
    assert workers(world_size, transport).run(all_reduce_job) == [expected] * world_size


def subgroups_job(transport, _):
    pairs = [(0, 3), (1, 4)]
    mine = next((pair for pair in pairs if transport.global_rank in pair), None)
    if mine is None:
        return None
    group = transport.group(f"pair {mine[0]}", "pp", mine)
    reverse = transport.group(f"reverse {mine[0]}", "pp", mine[::-1])
    here = torch.tensor(transport.global_rank)
    return (
        group.rank,
        [t.item() for t in group.all_gather(here)],
        reverse.rank,
        [t.item() for t in reverse.all_gather(here)],
    )


@every_transport
def test_members_keep_the_order_they_were_named_in(workers, transport):
    first, second = (0, [0, 3], 1, [3, 0]), (1, [0, 3], 0, [3, 0])
    third, fourth = (0, [1, 4], 1, [4, 1]), (1, [1, 4], 0, [4, 1])
    assert workers(5, transport).run(subgroups_job) == [first, third, None, second, fourth]


def ownership_job(transport, _):
    group = transport.group("world", "tp", range(transport.world_size))
    source = torch.full((4,), float(group.rank), requires_grad=True)
    gathered = group.all_gather(source)
    exchanged = group.all_to_all([source] * group.size, [(4,)] * group.size)
    strided = group.all_gather(torch.arange(6.0).reshape(2, 3).t())[-1]
    with torch.no_grad():
        source.fill_(99)
    group.barrier()
    for tensor in (*gathered, *exchanged):
        tensor.add_(1)  # in a member's own results, not in anybody else's
    group.barrier()
    values = [tensor.tolist() for tensor in (*gathered, *exchanged)]
    return values, any(tensor.requires_grad for tensor in (*gathered, *exchanged)), source.tolist(), strided.tolist()


@every_transport
@pytest.mark.parametrize("world_size", (1, 3))
def test_results_belong_to_the_caller_and_arguments_may_change_afterwards(workers, transport, world_size):
    values = [[rank + 1.0] * 4 for rank in range(world_size)] * 2
    expected = (values, False, [99.0] * 4, [[0, 3], [1, 4], [2, 5]])
    assert workers(world_size, transport).run(ownership_job) == [expected] * world_size


def recorded_job(transport, _):
    transport.recorder.enabled = True
    group = transport.group("world", "tp", range(transport.world_size))
    parts = [torch.zeros(i + 1, 2) for i in range(group.size)]
    group.all_to_all(parts, [(group.rank + 1, 2)] * group.size)
    group.all_gather(torch.zeros(5, dtype=torch.bfloat16))
    group.all_reduce(torch.zeros(7), "sum")
    group.barrier()
    return [operation for _, operation in transport.recorder.events]


@every_transport
def test_collectives_of_3_ranks_record_the_bytes_that_leave_each(workers, transport):
    for rank, operations in enumerate(workers(3, transport).run(recorded_job)):
        assert operations == [
            Collective("", "all_to_all", "tp", 3, 4 * 2 * (1 + 2 + 3 - (rank + 1))),
            Collective("", "all_gather", "tp", 3, 2 * 5 * 2),
            Collective("", "all_reduce", "tp", 3, 38),  # 28 bytes * 4/3 = 37.3
        ]
    assert workers(1, transport).run(recorded_job) == [[]]


def reduce_scatter_job(transport, _):
    group = transport.group("world", "tp", range(transport.world_size))
    transport.recorder.enabled = True
    parts = [torch.arange(6.0).view(2, 3) + 10 * group.rank + 100 * i for i in range(group.size)]
    sums = [
        group.reduce_scatter([part.to(dtype) for part in parts]).tolist() for dtype in (torch.float32, torch.bfloat16)
    ]
    return sums, parts[0][0, 0].item(), [operation for _, operation in transport.recorder.events]


@every_transport
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reduce_scatter_gives_each_member_the_sum_of_its_parts_and_records_a_ring(workers, transport, world_size):
    for rank, (sums, first, recorded) in enumerate(workers(world_size, transport).run(reduce_scatter_job)):
        whole = world_size * (torch.arange(6.0).view(2, 3) + 100 * rank) + 10 * sum(range(world_size))
        assert sums == [whole.tolist(), whole.bfloat16().tolist()] and first == 10 * rank
        sent = [Collective("", "reduce_scatter", "tp", world_size, (world_size - 1) * size) for size in (24, 12)]
        assert recorded == (sent if world_size > 1 else [])


def member_values(member, count):
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * count + member))


def sums_job(transport, counts):
    group = transport.group("world", "tp", range(transport.world_size))
    results = []
    for count in counts:
        own = member_values(group.rank, count * group.size)
        results.append(
            (group.all_reduce(own, "sum"), group.all_reduce(own, "max"), group.reduce_scatter(own.split(count)))
        )
    return results


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_gloo_sums_of_few_bytes_are_made_in_member_order_and_large_ones_are_equal_on_all_members(workers, world_size):
    """Of one and of many elements a member, within `EXCHANGED_BYTES`, and of more."""
    counts = (1, 7, 1000, EXCHANGED_BYTES // 4)
    ranks = workers(world_size, "gloo").run(sums_job, counts)
    for number, count in enumerate(counts):
        values = [member_values(member, count * world_size) for member in range(world_size)]
        total = functools.reduce(torch.add, values)
        bound = (
            0.0
            if 4 * count * world_size <= EXCHANGED_BYTES
            else 2 * world_size * 2.0**-24 * float(sum(value.abs() for value in values).max())
        )
        for member, results in enumerate(ranks):
            summed, largest, own = results[number]
            assert torch.equal(summed, ranks[0][number][0])
            assert torch.equal(largest, functools.reduce(torch.maximum, values))
            assert float((summed - total).abs().max()) <= bound
            assert float((own - total.split(count)[member]).abs().max()) <= bound


def test_ring_all_reduce_bytes_round_up():
    assert [ring_all_reduce_bytes(100, n) for n in (1, 2, 3, 4, 8)] == [0, 100, 134, 150, 175]


def channel_job(transport, dtypes):
    forward = transport.channel("forward", 0, 1) if transport.global_rank < 2 else None
    if transport.global_rank == 0:
        for shape in ((3, 2), (0, 5), (), (1000, 300)):
            for dtype in dtypes:
                forward.send(payload(0, 1, shape, dtype))
        return None
    if transport.global_rank == 1:
        return [
            bits(received) == bits(payload(0, 1, shape, dtype))
            for shape in ((3, 2), (0, 5), (), (1000, 300))
            for received in [forward.receive(shape, dtype) for dtype in dtypes]
            for dtype in [received.dtype]
        ]
    return None


@every_transport
def test_a_channel_delivers_in_order_also_empty_tensors_and_scalars(workers, transport):
    results = workers(3, transport).run(channel_job, DTYPES)
    assert results == [None, [True] * 28, None]


def crossing_job(transport, num_messages):
    """Both ranks begin all their messages, in both directions, before either ends one; receives end first."""
    here, other = transport.global_rank, 1 - transport.global_rank
    lines = {source: transport.channel(f"{source}-{1 - source}", source, 1 - source) for source in (0, 1)}
    sends = [lines[here].begin_send(torch.full((i + 1,), 10.0 * here + i)) for i in range(num_messages)]
    receives = [lines[other].begin_receive((i + 1,), torch.float32) for i in range(num_messages)]
    received = [end()[0].item() for end in receives]
    for end in sends:
        end()
    return received


@every_transport
def test_messages_that_have_begun_pass_each_other_and_end_in_their_order(workers, transport):
    assert workers(2, transport).run(crossing_job, 4) == [[10.0, 11.0, 12.0, 13.0], [0.0, 1.0, 2.0, 3.0]]


def rendezvous_job(transport, shape):
    channel = transport.channel("late", 0, 1)
    group = transport.group("both", "pp", (0, 1))
    group.barrier()
    if transport.global_rank == 0:
        tensor = torch.ones(shape)
        channel.send(tensor)
        sent_s = time.monotonic()  # one clock for all processes of a machine
        tensor.zero_()
        return sent_s, None
    time.sleep(0.3)
    begun_s = time.monotonic()
    return begun_s, channel.receive(shape, torch.float32).sum().item()


@every_transport
@pytest.mark.parametrize("shape", [(1,), (0,), (300_000,)])
def test_a_send_lasts_until_its_receive_begins(workers, transport, shape):
    (sent_s, _), (begun_s, total) = workers(2, transport).run(rendezvous_job, shape)
    assert sent_s > begun_s
    assert total == torch.Size(shape).numel()


def lanes_job(transport, num_messages):
    """Every ordered pair of ranks talks in threads of its own while the main thread runs collectives."""
    here, size = transport.global_rank, transport.world_size
    links = [(a, b) for a in range(size) for b in range(size) if a != b and here in (a, b)]
    channels = {link: transport.channel(f"{link[0]}-{link[1]}", *link) for link in links}
    group = transport.group("world", "tp", range(size))
    received, errors = {}, []

    def lane(source, destination):
        try:
            channel = channels[source, destination]
            for i in range(num_messages):
                if here == source:
                    channel.send(torch.full((1 + i % 7,), source * 100.0 + i))
                else:
                    received.setdefault(source, []).append(channel.receive((1 + i % 7,), torch.float32)[0].item())
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=lane, args=link, name=f"rank {here} lane") for link in links]
    for thread in threads:
        thread.start()
    sums = [group.all_reduce(torch.tensor([float(i)]), "sum").item() for i in range(num_messages)]
    for thread in threads:
        thread.join()
    return received, sums, errors


@every_transport
def test_twelve_message_lanes_and_collectives_run_at_once_in_threads(workers, transport):
    results = workers(4, transport).run(lanes_job, 25)
    for here, (received, sums, errors) in enumerate(results):
        assert errors == []
        assert received == {source: [source * 100.0 + i for i in range(25)] for source in range(4) if source != here}
        assert sums == [4.0 * i for i in range(25)]


def refusals_job(transport, _):
    group = transport.group("world", "tp", range(transport.world_size))
    channel = transport.channel("0-1", 0, 1) if transport.global_rank < 2 else None
    one = torch.zeros(1)
    attempts = [
        lambda: transport.group("world", "dp", range(transport.world_size)),
        lambda: transport.group("elsewhere", "dp", [transport.global_rank, 9]),
        lambda: transport.group("stranger", "dp", [(transport.global_rank + 1) % 3]),
        lambda: transport.group("twice", "dp", [transport.global_rank] * 2),
        lambda: group.all_to_all([one], [(1,)]),
        lambda: group.all_to_all([one, one, one.double()], [(1,)] * 3),
        lambda: group.all_gather(one, [(2,)] * 3),
        lambda: transport.channel("loop", 1, 1),
    ]
    if channel is not None:
        attempts.append(
            (lambda: channel.receive((1,), torch.float32))
            if transport.global_rank == 0
            else (lambda: channel.send(one))
        )
    messages = []
    for attempt in attempts:
        with pytest.raises(ValueError) as caught:
            attempt()
        messages.append(str(caught.value))
    return messages


@every_transport
def test_wrong_calls_are_refused_before_anything_is_sent(workers, transport):
    messages = workers(3, transport).run(refusals_job)[0]
    expected = [
        "rank 0 has opened 'world' before",
        "names ranks [9], which are outside the world of 3 ranks",
        "rank 0 is not a member of group 'stranger' over ranks 1",
        "names a rank twice",
        "one entry per member (3)",
        "one dtype at a time, not torch.float32, torch.float64",
        "expects (2,) from this member, but was given (1,)",
        "cannot be opened on rank 0",
        "only rank 1 may receive",
    ]
    for message, words in zip(messages, expected, strict=True):
        assert words in message
