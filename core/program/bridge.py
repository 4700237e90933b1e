"""What goes from which rank to which when hidden states pass from one grid of ranks to another, as integer mathematics.

A rank holds a box of the hidden states [sample, token, hidden]: in each dimension some ranges, one behind the other.
Data parallelism cuts samples, context and sequence parallelism cut tokens, and the ranks of a tensor-parallel group
without sequence parallelism are replicas. Whatever the degrees on both sides are, a rank needs what is in its own
ranges, and the intersection of those with the ranges of a source is what that source sends: fan-in, fan-out and uneven
cuts are the same rule. Every rank receives every item it holds exactly once. Gradients lie as hidden states do, also in
replicas, so the way back is the same from destination to source.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..layout.chunks import Chunks, Span
from ..plan.plan import Plan

DIMS = ("samples", "tokens", "hidden")

Spans = tuple[Span, ...]
"""Ranges of one dimension, one behind the other."""

Box = tuple[Span, Span, Span]
"""One range of samples, tokens and hidden features."""


@dataclass(frozen=True)
class Holding:
    """The hidden states of one rank: in each dimension ranges of the whole, in the order in which they
    lie in the rank's tensor.

    >>> Holding(((0, 2),), ((0, 3), (9, 12)), ((0, 8),)).shape
    (2, 6, 8)
    """

    samples: Spans
    tokens: Spans
    hidden: Spans

    @property
    def dims(self) -> tuple[Spans, Spans, Spans]:
        """The ranges of each dimension."""
        return self.samples, self.tokens, self.hidden

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rank's tensor."""
        return tuple(sum(hi - lo for lo, hi in spans) for spans in self.dims)

    @property
    def num_items(self) -> int:
        """Elements of the rank's tensor."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return ", ".join(f"{name} {_words(spans)}" for name, spans in zip(DIMS, self.dims, strict=True))


@dataclass(frozen=True)
class Piece:
    """A box that a source sends: where it lies in the tensor of the source, and where in that of the destination."""

    source: Box
    destination: Box

    @property
    def num_items(self) -> int:
        """Elements of the box."""
        return math.prod(hi - lo for lo, hi in self.source)


@dataclass(frozen=True)
class Message:
    """Everything that one rank has for another, or for itself, as one piece behind the other. Ranks are global."""

    source: int
    destination: int
    pieces: tuple[Piece, ...]

    @property
    def num_items(self) -> int:
        """Elements of the message."""
        return sum(piece.num_items for piece in self.pieces)


@dataclass(frozen=True)
class Grid:
    """Ranks, and what each holds of the same hidden states. Ranks that hold the same are replicas;
    all others share nothing.

    Raises `ValueError` where a rank occurs twice, a holding has an empty or doubled range, or two holdings
    overlap without being equal.
    """

    ranks: tuple[int, ...]
    holdings: tuple[Holding, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != len(self.holdings):
            raise ValueError(
                f"a grid of {len(self.ranks)} ranks was given {len(self.holdings)} holdings. Give one for each rank."
            )
        if doubled := [rank for rank, count in Counter(self.ranks).items() if count > 1]:
            raise ValueError(f"a grid names rank {doubled[0]} twice. Each rank has one holding.")
        for rank, holding in zip(self.ranks, self.holdings, strict=True):
            for name, spans in zip(DIMS, holding.dims, strict=True):
                _check_spans(rank, name, spans)
        for one, other in _overlaps(self.replicas, self.replicas):
            if one != other:
                raise ValueError(
                    f"ranks {self.replicas[one][0]} ({one}) and {self.replicas[other][0]} ({other}) of a grid share "
                    "some hidden states "
                    "and not all. Ranks must hold the same, or nothing in common."
                )

    @cached_property
    def replicas(self) -> dict[Holding, tuple[int, ...]]:
        """The ranks of each holding, in the order of the grid."""
        found: dict[Holding, list[int]] = defaultdict(list)
        for rank, holding in zip(self.ranks, self.holdings, strict=True):
            found[holding].append(rank)
        return {holding: tuple(ranks) for holding, ranks in found.items()}

    def holding_of(self, global_rank: int) -> Holding | None:
        """What a rank holds; None for a rank that is not of this grid."""
        return self.holdings[self.ranks.index(global_rank)] if global_rank in self.ranks else None

    @property
    def num_items(self) -> int:
        """Elements of the hidden states, replicas counted once."""
        return sum(holding.num_items for holding in self.replicas)


def stage_grid(plan: Plan, *, samples: Sequence[Sequence[Span]], pp_rank: int = 0, first_rank: int = 0) -> Grid:
    """The ranks between whose layers the hidden states of a stage lie, and what each holds.

    `samples[dp_rank]` are the ranges of samples of a data-parallel rank; `first_rank` is the global rank of the
    layout's rank 0. Tokens are cut as context and sequence parallelism do, tensor-parallel ranks without the latter are
    replicas. Raises `ValueError` for another number of ranges than data-parallel ranks.
    """
    layout, whole = plan.layout, ((0, plan.model.hidden_size),)
    if len(samples) != layout.dp:
        raise ValueError(f"dp={layout.dp} ranks need one list of samples each, but {len(samples)} were given.")
    ranks, holdings = [], []
    for dp, cp, tp in itertools.product(range(layout.dp), range(layout.cp), range(layout.tp)):
        ranks.append(first_rank + layout.global_rank(tp=tp, cp=cp, dp=dp, pp=pp_rank))
        tokens = Chunks(plan.batch.sequence, layout.cp, cp).places(*plan.tokens_of(tp))
        holdings.append(Holding(tuple(samples[dp]), tokens, whole))
    return Grid(tuple(ranks), tuple(holdings))


def messages(source: Grid, destination: Grid) -> tuple[Message, ...]:
    """What fills every rank of `destination` from `source`, sorted by source and destination: an order in which ranks
    that send and receive one after the other cannot wait for each other in a circle.

    A rank of both grids takes what it has from itself. Otherwise each box comes from that replica of its source
    which has sent least so far, the first of them where several have. Raises `ValueError` where the grids do not
    hold the same hidden states.
    """
    if source.num_items != destination.num_items:
        raise ValueError(
            f"the source holds {source.num_items} items of hidden states and the destination {destination.num_items}. "
            "Both grids of a bridge must hold the same samples, tokens and features."
        )
    sent: Counter[int] = Counter()
    found: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    sources: dict[Holding, list[Holding]] = defaultdict(list)
    for wanted, holding in _overlaps(destination.replicas, source.replicas):
        sources[wanted].append(holding)
    for rank, wanted in zip(destination.ranks, destination.holdings, strict=True):
        num_found = 0
        for holding in sources[wanted]:
            replicas, pieces = source.replicas[holding], list(_pieces(holding, wanted))
            num_items = sum(piece.num_items for piece in pieces)
            chosen = rank if rank in replicas else min(replicas, key=lambda replica: sent[replica])
            sent[chosen] += 0 if chosen == rank else num_items
            num_found += num_items
            found[chosen, rank] += pieces
        if num_found < wanted.num_items:
            raise ValueError(
                f"rank {rank} needs {wanted}, but the source ranks {_some(source.ranks)} have only {num_found} of "
                "these "
                f"{wanted.num_items} items. Both grids of a bridge must hold the same samples, tokens and features."
            )
    return tuple(Message(*ends, tuple(found[ends])) for ends in sorted(found))


@dataclass(frozen=True)
class BridgeMessage:
    """What one rank has of one of its microbatches for one microbatch of another rank. Boxes count samples
    inside the microbatches.

    `sample` is the first sample in the batch: ranks that send and receive messages one after the other, in the order of
    `sample`, cannot wait for each other in a circle.
    """

    sample: int
    source_microbatch: int
    destination_microbatch: int
    message: Message


def bridge_messages(source: Grid, destination: Grid, micro_size: int) -> tuple[BridgeMessage, ...]:
    """`messages` between grids that hold a whole batch, one range of samples a rank, cut into microbatches of
    `micro_size` samples on both sides; sorted by sample, source and destination. Raises as `messages`."""
    found: dict[tuple[int, int, int, int], list[Piece]] = defaultdict(list)
    firsts: dict[tuple[int, int, int, int], int] = {}
    for message in messages(source, destination):
        holding = source.holding_of(message.source)
        assert holding is not None
        for piece in message.pieces:
            (lo, hi), there = piece.source[0], piece.destination[0][0]
            while lo < hi:
                ours, theirs = lo // micro_size, there // micro_size
                size = min((ours + 1) * micro_size - lo, (theirs + 1) * micro_size - there, hi - lo)
                key = message.source, message.destination, ours, theirs
                firsts[key] = min(firsts.get(key, lo), lo)
                here = lo - ours * micro_size, there - theirs * micro_size
                cut = ((place, place + size) for place in here)
                found[key].append(
                    Piece(
                        *(
                            (samples, *box[1:])
                            for samples, box in zip(cut, (piece.source, piece.destination), strict=True)
                        )
                    )
                )
                lo, there = lo + size, there + size
    made = []
    for key, pieces in found.items():
        holding = source.holding_of(key[0])
        assert holding is not None
        made.append(
            BridgeMessage(holding.samples[0][0] + firsts[key], key[2], key[3], Message(*key[:2], tuple(pieces)))
        )
    return tuple(
        sorted(made, key=lambda bridged: (bridged.sample, bridged.message.source, bridged.message.destination))
    )


def _overlaps(ones: Iterable[Holding], others: Iterable[Holding]) -> Iterator[tuple[Holding, Holding]]:
    """Every one with every other that it shares an item with. The work grows with what is found, not with
    the square of the ranks."""
    ones, others = list(ones), set(others)
    near = [_near({one.dims[dim] for one in ones}, {other.dims[dim] for other in others}) for dim in range(len(DIMS))]
    for one in ones:
        for dims in itertools.product(*(sharing[spans] for sharing, spans in zip(near, one.dims, strict=True))):
            if (other := Holding(*dims)) in others:
                yield one, other


def _near(ones: Iterable[Spans], others: Iterable[Spans]) -> dict[Spans, list[Spans]]:
    """For each list of ranges those of the others that share an item with it, sorted. Ranges are met in the order
    of their first items."""
    found: dict[Spans, set[Spans]] = {one: set() for one in ones}
    every = sorted(
        (*span, side, spans) for side, group in enumerate((found, others)) for spans in group for span in spans
    )
    open_ranges: tuple[list[tuple[int, Spans]], list[tuple[int, Spans]]] = ([], [])
    for lo, hi, side, spans in every:
        met = open_ranges[1 - side]
        while met and met[0][0] <= lo:
            heapq.heappop(met)
        for _, theirs in met:
            one, other = (spans, theirs) if side == 0 else (theirs, spans)
            found[one].add(other)
        heapq.heappush(open_ranges[side], (hi, spans))
    return {one: sorted(near) for one, near in found.items()}


def _pieces(source: Holding, destination: Holding) -> Iterator[Piece]:
    """Every box that both have, in the order of the destination's tensor."""
    shared = [list(_shared(theirs, ours)) for theirs, ours in zip(source.dims, destination.dims, strict=True)]
    for samples, tokens, hidden in itertools.product(*shared):
        yield Piece((samples[0], tokens[0], hidden[0]), (samples[1], tokens[1], hidden[1]))


def _shared(source: Sequence[Span], destination: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """The places, in the one and in the other, of every range that both lists of ranges have."""
    for place, (lo, hi) in _placed(destination):
        for source_place, (source_lo, source_hi) in _placed(source):
            first, last = max(lo, source_lo), min(hi, source_hi)
            if first < last:
                there, here = source_place + first - source_lo, place + first - lo
                yield (there, there + last - first), (here, here + last - first)


def _placed(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Each range with its place in the rank's own tensor."""
    place = 0
    for lo, hi in spans:
        yield place, (lo, hi)
        place += hi - lo


def _check_spans(rank: int, name: str, spans: Sequence[Span]) -> None:
    ordered = sorted(spans)
    if any(lo < 0 or lo >= hi for lo, hi in spans) or any(
        one[1] > other[0] for one, other in itertools.pairwise(ordered)
    ):
        raise ValueError(
            f"rank {rank} of a grid holds {name} {_words(spans)}. A range `(lo, hi)` has the items `lo <= item < "
            "hi`, one or more, and no "
            "item is in two ranges."
        )


def _words(spans: Sequence[Span]) -> str:
    return " and ".join(f"{lo}..{hi - 1}" for lo, hi in spans) or "none"


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{', '.join(map(str, ranks[:4]))}, ... {ranks[-1]}"
