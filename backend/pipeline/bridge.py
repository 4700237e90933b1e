"""Bridges: hidden states go from the ranks of one grid to those of another, of other tensor-, context-
and data-parallel degree.

What goes where is `core.program.bridge`. There are two ways. `Bridge` is one exchange over the ranks of both grids,
differentiable, for modules that are called one after the other; a rank may be in both grids. `open_bridge` gives the
two ends of a pipeline's message lane, whose messages go from rank to rank in one order, for grids that share no rank:
to the executor an end is like any other channel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.program.bridge import Box, Grid, Message, messages
from ..transport.base import Channel, Group, Shape, Transport

LAYER = "bridge"
"""What recorders call the exchanges of `Bridge`."""


class Bridge:
    """Takes hidden states from one grid of ranks to another: `y = bridge(x)`, called by all ranks of both together.

    `group` has exactly the ranks of both grids. Raises `ValueError` where it has others, or the
    grids do not hold the same.
    """

    def __init__(
        self, group: Group, source: Grid, destination: Grid, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ):
        if set(group.ranks) != set(source.ranks) | set(destination.ranks):
            both = sorted(set(source.ranks) | set(destination.ranks))
            raise ValueError(
                f"{group}: a bridge joins the ranks of both its grids, which are {both}. Open a group over these."
            )
        self._group = group
        self._dtype, self._device = dtype, device
        self._forward = _Exchange(group, source, destination)
        self._backward = _Exchange(group, destination, source)

    def __call__(self, x_BSH: Tensor | None) -> Tensor:
        """What this rank holds of the hidden states in the destination grid; an empty tensor on
        a rank that is not of it.

        `x_BSH` is what it holds in the source grid, None on a rank that is not of it. All ranks also run the
        backward together, through the tensor that they were given here: that of an empty one brings the
        gradient of `x_BSH`. Ranks that hold the same of the destination must come with the same gradient, the
        whole one, as behind `mappings.copy`: it is taken from one of them. Raises `ValueError` for another
        shape or dtype than the grid says.
        """
        self._forward.check(x_BSH, self._dtype)
        nothing = torch.empty(0, dtype=self._dtype, device=self._device)
        # autograd comes by here on every rank, also where there is no input, or one without a gradient
        anchor = torch.empty(0, dtype=self._dtype, device=self._device, requires_grad=True)
        return _Crossing.apply(nothing if x_BSH is None else x_BSH, anchor, self._forward, self._backward)


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, there: _Exchange, back: _Exchange) -> Tensor:
        ctx.exchanges = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        there, back = ctx.exchanges
        return _Crossing.apply(dy, dy.new_empty(0), back, there), None, None, None


class _Exchange:
    """One direction: a message for every member of the group, empty where there is nothing."""

    def __init__(self, group: Group, source: Grid, destination: Grid):
        here = group.ranks[group.rank]
        self._group = group
        every = messages(source, destination)
        self._sent = {message.destination: message for message in every if message.source == here}
        self._received = {message.source: message for message in every if message.destination == here}
        self._held, self._wanted = source.holding_of(here), destination.holding_of(here)

    def __call__(self, x: Tensor) -> Tensor:
        parts = [_packed(x, self._sent[rank]) if rank in self._sent else x.new_empty(0) for rank in self._group.ranks]
        shapes = [(self._received[rank].num_items if rank in self._received else 0,) for rank in self._group.ranks]
        with self._group.recorder.layer(LAYER):
            arrived = self._group.all_to_all(parts, shapes)
        whole = x.new_empty((0,) if self._wanted is None else self._wanted.shape)
        for rank, part in zip(self._group.ranks, arrived, strict=True):
            if rank in self._received:
                _unpack(part, self._received[rank], whole)
        return whole

    def check(self, x: Tensor | None, dtype: torch.dtype) -> None:
        """Raises `ValueError` for a tensor that is not what this rank holds."""
        expected = None if self._held is None else self._held.shape
        given = None if x is None else tuple(x.shape)
        if given != expected:
            words = f"expects {_shape_words(expected)} from this rank, but was given {_shape_words(given)}"
            raise ValueError(f"{self._group}: the bridge {words}.")
        if x is not None and x.dtype != dtype:
            raise ValueError(
                f"{self._group}: the bridge was made for {dtype}, but was given {x.dtype}. Convert it first."
            )


class BridgeSender:
    """A sending end: `send` hands the parts of this rank's tensor to all ranks that need them, in their order."""

    def __init__(self, shape: Shape, lines: Sequence[tuple[Message, Channel]]):
        self._shape = tuple(shape)
        self._lines = lines

    def sent_bytes(self, tensor: Tensor) -> int:
        """Bytes that leave this rank when `tensor` is sent: none where other replicas send them all."""
        return tensor.element_size() * sum(message.num_items for message, _ in self._lines)

    def send(self, tensor: Tensor) -> None:
        """Returns once every destination has its part. Raises `ValueError` for a tensor of another
        shape than the grid says."""
        self.begin_send(tensor)()

    def begin_send(self, tensor: Tensor) -> Callable[[], None]:
        """`send` in two parts, as a channel's."""
        if tuple(tensor.shape) != self._shape:
            raise ValueError(
                f"this end of a bridge sends {_shape_words(self._shape)}, but was given "
                f"{_shape_words(tuple(tensor.shape))}."
            )
        begun = [channel.begin_send(_packed(tensor.detach(), message)) for message, channel in self._lines]

        def send() -> None:
            for end in begun:
                end()

        return send

    def receive(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Always raises `ValueError`: a bridge has a direction."""
        return self.begin_receive(shape, dtype)()

    def begin_receive(self, shape: Shape, dtype: torch.dtype) -> Callable[[], Tensor]:
        """Always raises `ValueError`: a bridge has a direction."""
        raise ValueError(
            "this is the sending end of a bridge. Gradients come back over a bridge of the other direction."
        )


class BridgeReceiver:
    """A receiving end: `receive` puts this rank's tensor together from what comes from all ranks
    that have some of it."""

    def __init__(self, shape: Shape, lines: Sequence[tuple[Message, Channel]], device: torch.device):
        self._shape = tuple(shape)
        self._lines = lines
        self._device = device

    def receive(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The next tensor. Raises `ValueError` for another shape than the grid says."""
        return self.begin_receive(shape, dtype)()

    def begin_receive(self, shape: Shape, dtype: torch.dtype) -> Callable[[], Tensor]:
        """`receive` in two parts, as a channel's."""
        if tuple(shape) != self._shape:
            raise ValueError(
                f"this end of a bridge receives {_shape_words(self._shape)}, but was asked for "
                f"{_shape_words(tuple(shape))}."
            )
        begun = [(channel.begin_receive((message.num_items,), dtype), message) for message, channel in self._lines]

        def receive() -> Tensor:
            whole = torch.empty(self._shape, dtype=dtype, device=self._device)
            for end, message in begun:
                _unpack(end(), message, whole)
            return whole

        return receive

    def sent_bytes(self, tensor: Tensor) -> int:
        """None: nothing is sent from here."""
        return 0

    def send(self, tensor: Tensor) -> None:
        """Always raises `ValueError`: a bridge has a direction."""
        self.begin_send(tensor)()

    def begin_send(self, tensor: Tensor) -> Callable[[], None]:
        """Always raises `ValueError`: a bridge has a direction."""
        raise ValueError(
            "this is the receiving end of a bridge. Gradients go back over a bridge of the other direction."
        )


def open_bridge(transport: Transport, name: str, source: Grid, destination: Grid) -> BridgeSender | BridgeReceiver:
    """This rank's end of a new bridge. All ranks of both grids open it, in one agreed order with
    whatever else they open.

    A rank with nothing to send has an end too, whose `send` returns at once.
    Raises `ValueError` for grids that share a rank or do not hold the same, and on a rank of neither.
    """
    here = transport.global_rank
    if shared := sorted(set(source.ranks) & set(destination.ranks)):
        raise ValueError(
            f"bridge {name!r}: rank {shared[0]} is in both grids, and a channel joins two ranks. Use "
            "`Bridge` over a group."
        )
    held, wanted = source.holding_of(here), destination.holding_of(here)
    if held is None and wanted is None:
        raise ValueError(f"rank {here} is in neither grid of bridge {name!r}. Only members open it.")
    lines = [
        (
            message,
            transport.channel(f"{name}/{message.source}-{message.destination}", message.source, message.destination),
        )
        for message in messages(source, destination)
        if here in (message.source, message.destination)
    ]
    if held is not None:
        return BridgeSender(held.shape, lines)
    assert wanted is not None
    return BridgeReceiver(wanted.shape, lines, transport.device)


def _packed(x: Tensor, message: Message) -> Tensor:
    """The pieces of a message, one behind the other."""
    return torch.cat([x[_slices(piece.source)].reshape(-1) for piece in message.pieces])


def _unpack(flat: Tensor, message: Message, whole: Tensor) -> None:
    """Writes the pieces of a message to where they lie in the destination's tensor."""
    for piece, values in zip(message.pieces, flat.split([piece.num_items for piece in message.pieces]), strict=True):
        target = whole[_slices(piece.destination)]
        target.copy_(values.view(target.shape))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in box)


def _shape_words(shape: Shape | None) -> str:
    return "nothing" if shape is None else f"shape {tuple(shape)}"
