"""Where copies of tokens go: from the ranks that hold the tokens to those that hold their experts, and back.

Copies are sorted by expert and go to its rank by an all-to-all over `ep`; the members of `etp`, each of which holds a
part of every expert's width, then bring theirs together. A rank knows of every *chunk* of what arrives (one sender,
sample, piece of a token block, and expert) how many rows it has, because the senders' counts are sent first, as
integers. So it can put the rows in an order that depends on the problem alone: by expert, and in it by sample and
token.

Letters: T tokens that a rank sends, K experts of a token, H hidden, N rows that arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from ...core.layout.routed_tokens import Piece
from ...core.plan.plan import Plan
from ...core.program.expert_tokens import routed_tokens
from ..base.recorder import Recorder
from ..base.streams import to_device
from ..numerics.row_groups import ExpertRows, RowGroup
from ..transport.base import Group, SoloGroup


@dataclass(frozen=True)
class ExpertGroups:
    """A rank's groups on the expert grid: `etp` cuts experts, `ep` spreads them."""

    etp: Group
    ep: Group


def solo_experts(global_rank: int, recorder: Recorder) -> ExpertGroups:
    """The groups of a rank that has all experts for itself."""
    return ExpertGroups(SoloGroup("etp", global_rank, recorder), SoloGroup("ep", global_rank, recorder))


@dataclass(frozen=True)
class _Sender:
    """What is known of a rank that sends copies here: its pieces of each sequence, and its first sample
    behind that of this rank."""

    pieces: tuple[Piece, ...]
    sample_offset: int


@dataclass(frozen=True)
class _Chunks:
    """The chunks that arrive, of a microbatch of some size: sorted they are `order`, and `group_of` the
    sorted ones are the groups. `pieces` are those of the tokens that this rank sends.

    `groups` are `(expert, leaf)`, `leaves` `(sample behind this rank's first, token block)`.
    """

    pieces: Tensor
    order: Tensor
    group_of: Tensor
    groups: tuple[tuple[int, int], ...]
    leaves: tuple[tuple[int, int], ...]


class TokenExchange:
    """The exchange of one rank: what does not depend on the routing. `exchange(experts)` is that of one microbatch."""

    def __init__(self, plan: Plan, groups: ExpertGroups, device: torch.device):
        self.groups = groups
        self.num_local_experts = plan.model.num_experts // groups.ep.size
        self.num_experts = plan.model.num_experts
        self._exact = plan.numerics.mode == "exact"
        self._device = device
        here = plan.layout.coordinates(groups.ep.ranks[groups.ep.rank])
        tokens = routed_tokens(plan)
        self.token_sizes = tuple(hi - lo for lo, hi in (tokens.own(tp_rank) for tp_rank in range(plan.layout.tp)))

        def sender(global_rank: int) -> _Sender:
            there = plan.layout.coordinates(global_rank)
            offset = plan.samples_of(there["dp"])[0] - plan.samples_of(here["dp"])[0]
            return _Sender(tokens.pieces(there["tp"], there["cp"]), offset)

        rows = [plan.layout.expert_group_of(member, "ep") for member in groups.etp.ranks]
        self._senders = [[sender(rank) for rank in row] for row in rows]
        self._own = self._senders[groups.etp.rank][groups.ep.rank]
        self._chunks: dict[int, _Chunks] = {}

    def exchange(self, experts_BSK: Tensor, first_sample: int) -> Exchange:
        """The way of every copy of the tokens [b, s] that this rank sends; `experts` is -1
        where a choice is dropped."""
        samples, _, per_token = experts_BSK.shape
        own = Outgoing(experts_BSK.reshape(-1, per_token), self.num_experts)
        num_pieces = samples * len(self._own.pieces)
        sent = own.counts(self._chunks_of(samples).pieces, num_pieces).view(self.groups.ep.size, -1)
        sizes = [[self.num_local_experts * samples * len(sender.pieces) for sender in row] for row in self._senders]
        received = self.groups.ep.all_to_all(list(sent), [(size,) for size in sizes[self.groups.etp.rank]])
        arrived = self.groups.etp.all_gather(torch.cat(received), [(sum(row),) for row in sizes])
        lengths = torch.cat(arrived)
        chunks = self._chunks_of(samples)
        sorted_lengths = lengths[chunks.order]
        starts = (lengths.cumsum(0) - lengths)[chunks.order]
        ends = sorted_lengths.cumsum(0)
        of_groups = lengths.new_zeros(len(chunks.groups)).index_add_(0, chunks.group_of, sorted_lengths)
        # the one time that the host waits: it needs to know how large what comes is
        numbers = torch.cat([sent.sum(1), *(each.sum().reshape(1) for each in (*received, *arrived)), of_groups])
        sent_rows, received_rows, member_rows, group_lengths = _split(
            numbers.tolist(), len(sent), len(received), len(arrived), len(chunks.groups)
        )
        num_rows = sum(member_rows)
        shifts = torch.repeat_interleave(starts - (ends - sorted_lengths), sorted_lengths, output_size=num_rows)
        order = torch.arange(num_rows, device=lengths.device) + shifts
        own.keep(sum(sent_rows))
        groups = []
        for (expert, leaf), first, length in zip(
            chunks.groups, accumulate(group_lengths, initial=0), group_lengths, strict=False
        ):
            if length:
                groups.append(RowGroup(expert, leaf, first, first + length))
        leaves = tuple((first_sample + sample, block) for sample, block in chunks.leaves)
        return Exchange(
            groups=self.groups,
            outgoing=own,
            sent_rows=sent_rows,
            received_rows=received_rows,
            member_rows=member_rows,
            order=order,
            rows=ExpertRows(self.num_local_experts, tuple(groups), leaves),
            own_experts=self._experts_of(received, received_rows),
        )

    def _pieces_of_tokens(self, samples: int) -> Tensor:
        """int64 [b*s]: the number of each token's piece, counted over all samples."""
        pieces = self._own.pieces
        one = torch.arange(len(pieces)).repeat_interleave(
            torch.tensor([piece.last - piece.first for piece in pieces], dtype=torch.int64)
        )
        return to_device((torch.arange(samples)[:, None] * len(pieces) + one).flatten(), self._device)

    def _experts_of(self, received: Sequence[Tensor], num_rows: Sequence[int]) -> Tensor:
        """int64: the local expert of every row that comes over `ep`, so many from each member."""
        experts = torch.arange(self.num_local_experts, device=self._device)
        counts = [each.view(self.num_local_experts, -1).sum(1) for each in received]
        return torch.cat(
            [experts.repeat_interleave(own, output_size=rows) for own, rows in zip(counts, num_rows, strict=True)]
        )

    def _chunks_of(self, samples: int) -> _Chunks:
        if samples not in self._chunks:
            self._chunks[samples] = self._make_chunks(samples)
        return self._chunks[samples]

    def _make_chunks(self, samples: int) -> _Chunks:
        keys = [
            (expert, sender.sample_offset + sample, piece.block, piece.first, number)
            for number, sender in enumerate(sender for row in self._senders for sender in row)
            for expert in range(self.num_local_experts)
            for sample in range(samples)
            for piece in sender.pieces
        ]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        leaves = sorted({(sample, block) for _, sample, block, _, _ in keys}) if self._exact else []
        place = {leaf: index for index, leaf in enumerate(leaves)}
        found = [(keys[index][0], place.get((keys[index][1], keys[index][2]), 0)) for index in order]
        groups = tuple(dict.fromkeys(found))
        number = {group: index for index, group in enumerate(groups)}
        places, numbers = (
            to_device(torch.tensor(each, dtype=torch.int64), self._device)
            for each in (order, [number[group] for group in found])
        )
        return _Chunks(self._pieces_of_tokens(samples), places, numbers, groups, tuple(leaves))


def _split(numbers: Sequence[int], *sizes: int) -> Iterator[tuple[int, ...]]:
    """Numbers cut into parts of these sizes."""
    ends = list(accumulate(sizes))
    return (tuple(numbers[end - size : end]) for size, end in zip(sizes, ends, strict=True))


class Outgoing:
    """The copies that a rank makes of its T tokens, sorted by expert, those of an expert in the order of tokens."""

    def __init__(self, experts_TK: Tensor, num_experts: int):
        self.num_experts = num_experts
        flat, per_token = experts_TK.flatten(), experts_TK.shape[1]
        self._experts = torch.where(flat >= 0, flat, num_experts)  # what is dropped comes last
        sorted_places = self._experts.argsort(stable=True)
        self.tokens, self.experts = sorted_places // per_token, self._experts[sorted_places]
        places = torch.empty_like(flat)
        places[sorted_places] = torch.arange(len(flat), device=flat.device)
        self.places_TK = places.view_as(experts_TK)

    def counts(self, pieces_T: Tensor, num_pieces: int) -> Tensor:
        """int64 [experts * num_pieces]: how many copies of each piece go to each expert."""
        copies = self._experts.view_as(self.places_TK) * num_pieces + pieces_T.unsqueeze(1)
        counts = copies.new_zeros((self.num_experts + 1) * num_pieces)
        return counts.index_add_(0, copies.flatten(), torch.ones_like(self._experts))[: self.num_experts * num_pieces]

    def keep(self, num_copies: int) -> None:
        """The host knows how many copies there are: `tokens` and `experts` are theirs, and a choice that was dropped
        has the place behind them."""
        self.tokens, self.experts = self.tokens[:num_copies], self.experts[:num_copies]
        self.places_TK = self.places_TK.clamp(max=num_copies)

    def pick(self, copies: Tensor, choice: int) -> Tensor:
        """[t, ...] of every token its copy for the choice of this number; zeros where that was dropped."""
        padded = torch.cat([copies, copies.new_zeros(1, *copies.shape[1:])])
        return padded[self.places_TK[:, choice]]


@dataclass(frozen=True)
class Exchange:
    """The way of the copies of one microbatch.

    `sent_rows` and `received_rows` are counted by member of `ep`, `member_rows` by member of `etp` as they are
    brought together; `order` puts all N rows in the order of `rows`; `own_experts` are the local experts of the
    rows that come over `ep`.
    """

    groups: ExpertGroups
    outgoing: Outgoing
    sent_rows: tuple[int, ...]
    received_rows: tuple[int, ...]
    member_rows: tuple[int, ...]
    order: Tensor
    rows: ExpertRows
    own_experts: Tensor

    def there(self, copies: Tensor) -> Tensor:
        """Rows of the tokens' rank on the ranks of their experts."""
        return self._exchanged(copies, self.sent_rows, self.received_rows)

    def back(self, rows: Tensor) -> Tensor:
        """Rows of the experts' rank on the ranks of their tokens."""
        return self._exchanged(rows, self.received_rows, self.sent_rows)

    def _exchanged(self, rows: Tensor, outgoing: tuple[int, ...], incoming: tuple[int, ...]) -> Tensor:
        if self.groups.ep.size == 1:
            return rows
        return torch.cat(
            self.groups.ep.all_to_all(rows.split(list(outgoing)), [(number, *rows.shape[1:]) for number in incoming])
        )

    def gather_features(self, rows: Tensor) -> Tensor:
        """[n, ...] of all members of `etp`, in the order of `rows`."""
        etp = self.groups.etp
        if etp.size > 1:
            rows = torch.cat(etp.all_gather(rows, [(number, *rows.shape[1:]) for number in self.member_rows]))
        return rows[self.order]

    @cached_property
    def experts(self) -> Tensor:
        """int64 [N]: the local expert of every row, in the order of `rows`."""
        groups = self.rows.groups
        experts = torch.tensor([group.expert for group in groups], dtype=torch.int64)
        lengths = torch.tensor([group.last - group.first for group in groups], dtype=torch.int64)
        return to_device(experts.repeat_interleave(lengths), self.order.device)

    @cached_property
    def inverse(self) -> Tensor:
        """The places of rows by member of `etp` among the sorted ones."""
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(len(self.order), device=self.order.device)
        return inverse
