"""What a sequence of operations keeps between its forward and its backward, and the most it holds while either runs.

An operation is a `Node`: what its backward needs (kept until that backward ends), the gradient that its backward
hands on, and temporary tensors. `forward_peak_bytes` and `backward_peak_bytes` walk a tape of nodes as autograd
does: one after the other, and in reverse; a gradient lives until the node that takes it ends, what a node kept
until its own backward ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Node(NamedTuple):
    """One operation of one microbatch on one rank, in bytes. A tuple, because a search makes a hundred thousand: it is
    made in a third of a frozen dataclass's time.

    `saved_bytes`: what its backward needs and no later node keeps too. `drops`: how much of it each module of
    selective recomputation would give up. `dropped_bytes`: what is given up, and brought back when the backward
    reaches the group `recompute`. `gradient_bytes`: the gradient that its backward makes. `transient_bytes`: other
    gradients alive meanwhile, such as that of a residual. `forward_bytes`, `backward_bytes`: temporary tensors of
    the two, operands that nobody keeps included. `weight_input_bytes`, `weight_gradient_bytes`: of a node with a
    weight gradient, the part of `saved_bytes` (or of a later node's) and the output gradient that are kept when the
    weight gradient is put off. `weight_bytes`: a weight gradient that is a tensor of its own before it is added to
    its sum (a part of `backward_bytes`).
    """

    name: str
    saved_bytes: int = 0
    gradient_bytes: int = 0
    transient_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    drops: tuple[tuple[str, int], ...] = ()
    dropped_bytes: int = 0
    recompute: str = ""
    weight_input_bytes: int = 0
    weight_gradient_bytes: int = 0
    weight_bytes: int = 0

    @property
    def retained_bytes(self) -> int:
        """What is kept from forward to backward."""
        return self.saved_bytes - self.dropped_bytes


@dataclass(frozen=True)
class TapeMemory:
    """A tape in a few numbers: kept from forward to backward; the most held while forward and backward run, what was
    kept for this tape included; what a backward that puts weight gradients off leaves for them, the most held while
    that runs (`split_bytes`), and what the weight gradients hold in addition when they run (`weight_bytes`)."""

    retained_bytes: int
    forward_bytes: int
    backward_bytes: int
    deferred_bytes: int
    backward_peak: str = ""
    split_bytes: int = 0
    weight_bytes: int = 0

    def __add__(self, later: TapeMemory) -> TapeMemory:
        """This tape, then `later`: its forward runs on top of what this one kept, its backward before
        this one frees anything."""
        grows = self.retained_bytes + later.backward_bytes
        return TapeMemory(
            self.retained_bytes + later.retained_bytes,
            max(self.forward_bytes, self.retained_bytes + later.forward_bytes),
            max(self.backward_bytes, grows),
            self.deferred_bytes + later.deferred_bytes,
            self.backward_peak if self.backward_bytes > grows else later.backward_peak,
            max(self.split_bytes + later.deferred_bytes, self.retained_bytes + later.split_bytes),
            max(self.weight_bytes, later.weight_bytes),
        )

    def times(self, count: int) -> TapeMemory:
        """So many tapes like this one, in a row."""
        before = (count - 1) * self.retained_bytes
        return TapeMemory(
            count * self.retained_bytes,
            before + self.forward_bytes,
            before + self.backward_bytes,
            count * self.deferred_bytes,
            self.backward_peak,
            (count - 1) * max(self.retained_bytes, self.deferred_bytes) + self.split_bytes,
            self.weight_bytes,
        )


EMPTY = TapeMemory(0, 0, 0, 0)


def with_offloaded(parts: Sequence[tuple[TapeMemory, int, bool]]) -> TapeMemory:
    """The tape of a stage, of parts that each come so many times in a row, and that keep what their backward needs in
    host memory where the last is true.

    What an offloaded part keeps is still on its way out while the next part runs forward, and on its way back while the
    backward of that part runs (`backend.base.offload`).
    """
    tape, moving = EMPTY, 0
    for part, count, offloaded in parts:
        if not offloaded and not moving:
            tape = tape + part.times(count)
            continue
        first, others = _with_moving(part, moving), part
        if offloaded:
            first, others = _left(first), _left(_with_moving(part, part.retained_bytes))
        tape, moving = tape + first, part.retained_bytes * offloaded
        if count > 1:
            tape = tape + others.times(count - 1)
    return tape


def _with_moving(tape: TapeMemory, num_bytes: int) -> TapeMemory:
    """A tape during whose forward and backward so many bytes are on their way."""
    return replace(
        tape,
        forward_bytes=tape.forward_bytes + num_bytes,
        backward_bytes=tape.backward_bytes + num_bytes,
        split_bytes=tape.split_bytes + num_bytes,
    )


def _left(tape: TapeMemory) -> TapeMemory:
    """A tape of which nothing stays on the device between its forward and its backward."""
    return replace(tape, retained_bytes=0)


def tape_memory(nodes: Sequence[Node]) -> TapeMemory:
    """The four numbers of a tape of nodes in forward order."""
    backward, peak = backward_peak_bytes(nodes)
    deferred = sum(node.weight_input_bytes + node.weight_gradient_bytes for node in nodes)
    weight = max((node.weight_bytes for node in nodes), default=0)
    retained, split = sum(node.retained_bytes for node in nodes), split_peak_bytes(nodes)
    return TapeMemory(retained, forward_peak_bytes(nodes), backward, deferred, peak, split, weight)


def forward_peak_bytes(nodes: Iterable[Node]) -> int:
    """The most held while the forward runs; a group that is recomputed drops its tensors when it ends."""
    held = peak = pending = 0
    group = ""
    for node in nodes:
        if node.recompute != group:
            held, pending, group = held - pending, 0, node.recompute
        held += node.saved_bytes
        pending += node.dropped_bytes
        peak = max(peak, held + node.forward_bytes)
    return peak


def backward_peak_bytes(nodes: Sequence[Node]) -> tuple[int, str]:
    """The most held while the backward runs, and at which node."""
    held = sum(node.retained_bytes for node in nodes)
    dropped: dict[str, int] = {}
    for node in nodes:
        if node.dropped_bytes:
            dropped[node.recompute] = dropped.get(node.recompute, 0) + node.dropped_bytes
    peak, where, gradient = held, "", 0
    for node in reversed(nodes):
        held += dropped.pop(node.recompute, 0)
        now = held + gradient + node.gradient_bytes + node.transient_bytes + node.backward_bytes
        if now > peak:
            peak, where = now, node.name
        held -= node.saved_bytes
        gradient = node.gradient_bytes
    return peak, where


def split_peak_bytes(nodes: Sequence[Node]) -> int:
    """The most held while a backward runs that puts its weight gradients off. With recomputation, as long as it brings
    tensors back at the start of the backward, that of a whole backward."""
    if any(node.dropped_bytes for node in nodes):
        return backward_peak_bytes(nodes)[0]
    held = peak = sum(node.retained_bytes for node in nodes)
    gradient = 0
    for node in reversed(nodes):
        backward = node.backward_bytes - node.weight_bytes
        peak = max(peak, held + gradient + node.gradient_bytes + node.transient_bytes + backward)
        held += node.weight_input_bytes + node.weight_gradient_bytes - node.saved_bytes
        gradient = node.gradient_bytes
    return peak
