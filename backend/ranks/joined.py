"""`Joined`: how a rank of one of several modules (`core.plan.plan.ModularPlan`) is joined to the ranks of the others.

Hidden states come and go over bridges where a pipeline rank has no neighbour in its own module; loss, gradient norm and
token counts are those of all modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ...core.plan.batch_sizes import sizes_of
from ...core.plan.plan import ModularPlan, ModulePlan
from ...core.plan.schedule_of import part_schedule
from ...core.program.bridge import BridgeMessage, Grid, bridge_messages, stage_grid
from ...core.schedule.schedule import Schedule
from ..base.microbatch import Microbatch
from ..base.observe import Observer
from ..pipeline.bridge import BridgeReceiver, BridgeSender
from ..transport.base import Channel, Group, Shape, Transport

Direction = Literal["F", "B"]


class Joined:
    """What joins a rank's module to the others: the `schedule` of its part, the group of `world`, and lines to modules
    before and behind; schedule and lines are those of global batches of one size, at first of the largest.

    All ranks of the world make it, before anything else is opened.
    """

    def __init__(self, transport: Transport, plan: ModularPlan, part: ModulePlan):
        here = part.layout.coordinates(transport.global_rank)
        self.world = transport.group("modules", "modules", range(transport.world_size))
        self._peers: dict[int, int] = {}
        for source, target in plan.joins:
            if (end := _end_of(source, target, part, here["pp"])) is not None:
                peer, outside = (target, part.layout.pp) if end is source else (source, -1)
                self._peers.setdefault(outside, peer.layout.global_rank(pp=0 if end is source else peer.layout.pp - 1))
        channels = Channels(transport)
        sizes = sorted(sizes_of(plan.batch), reverse=True)
        self._of_size = {size: _Joins(channels, plan.of_size(size), part.name, here) for size in sizes}
        self.begin_batches_of(sizes[0])

    def begin_batches_of(self, size: int) -> None:
        """From here on `schedule` and `line` are those of global batches of that size."""
        self._joins = self._of_size[size]

    @property
    def schedule(self) -> Schedule:
        """What the pipeline ranks of the module do."""
        return self._joins.schedule

    def line(self, direction: Direction, *, sending: bool) -> JoinedLine:
        """The line to the modules behind or before, for hidden states (F) or gradients (B)."""
        return self._joins.lines[direction, sending]

    def peer(self, pp_rank: int) -> int:
        """A rank of the other module, that is called pipeline rank `pp_rank` here
        (`core.schedule.placement.ModulePlacement`)."""
        return self._peers[pp_rank]


class Channels:
    """This rank's channels to ranks of other modules, each opened once, whatever batches go through it."""

    def __init__(self, transport: Transport):
        self.transport = transport
        self._opened: dict[str, Channel] = {}

    def of(self, name: str, source: int, destination: int) -> Channel:
        """The channel of that name."""
        if name not in self._opened:
            self._opened[name] = self.transport.channel(name, source, destination)
        return self._opened[name]


class _Joins:
    """Schedule and lines of global batches of one size, which `plan` has."""

    def __init__(self, channels: Channels, plan: ModularPlan, name: str, here: Mapping[str, int]):
        part = plan.part_named(name)
        self.schedule = part_schedule(plan, part, part.microbatches_of(here["dp"]))
        lines: dict[tuple[Direction, bool], list[Line]] = {}
        for source, target in plan.joins:
            if (end := _end_of(source, target, part, here["pp"])) is None:
                continue
            before, behind = _grid(source, source.layout.pp - 1), _grid(target, 0)
            ways: tuple[tuple[Direction, Grid, Grid], ...] = (("F", before, behind), ("B", behind, before))
            for direction, giving, taking in ways:
                sending = (direction == "F") == (end is source)
                bridge = f"{direction}/{source.name}-{target.name}"
                lines.setdefault((direction, sending), []).append(
                    _line(channels, bridge, giving, taking, part, sending=sending)
                )
        self.lines = {ends: JoinedLine(found) for ends, found in lines.items()}


def _end_of(source: ModulePlan, target: ModulePlan, part: ModulePlan, pp_rank: int) -> ModulePlan | None:
    """The one of two joined modules that is `part`, where its pipeline rank is the one that they are joined at."""
    end = source if part.name == source.name else target if part.name == target.name else None
    return end if end is not None and pp_rank == (part.layout.pp - 1 if end is source else 0) else None


class JoinedLine:
    """One end of what joins a module to others: what is received is the sum of what comes from each, in their order;
    what is sent goes to each. A call is a microbatch, and microbatches come in order, step after step."""

    def __init__(self, lines: Sequence[Line]):
        self._lines = lines
        self._calls = 0

    def send(self, tensor: Tensor) -> None:
        """Returns once every destination has its part."""
        self.begin_send(tensor)()

    def begin_send(self, tensor: Tensor) -> Callable[[], None]:
        """`send` in two parts, as a channel's."""
        begun = [line.begin_send(tensor) for line in self._next()]

        def send() -> None:
            for end in begun:
                end()

        return send

    def sent_bytes(self, tensor: Tensor) -> int:
        """Bytes that leave this rank when `tensor` is sent next."""
        return sum(line[self._calls % len(line)].sent_bytes(tensor) for line in self._lines)

    def receive(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """The next microbatch's."""
        return self.begin_receive(shape, dtype)()

    def begin_receive(self, shape: Shape, dtype: torch.dtype) -> Callable[[], Tensor]:
        """`receive` in two parts, as a channel's."""
        begun = [line.begin_receive(shape, dtype) for line in self._next()]

        def receive() -> Tensor:
            first, *others = (end() for end in begun)
            for other in others:
                first = first + other
            return first

        return receive

    def _next(self) -> list[BridgeSender | BridgeReceiver]:
        call, self._calls = self._calls, self._calls + 1
        return [line[call % len(line)] for line in self._lines]


Line = list[BridgeSender] | list[BridgeReceiver]
"""The ends of one bridge, an end for every microbatch of the rank."""


def _line(channels: Channels, name: str, source: Grid, destination: Grid, part: ModulePlan, *, sending: bool) -> Line:
    """This rank's ends of the bridge from one grid of whole batches to another."""
    here, device, opened = channels.transport.global_rank, channels.transport.device, {}
    calls: dict[int, list[BridgeMessage]] = {}
    for bridged in bridge_messages(source, destination, part.batch.micro_size):
        ends = bridged.message.source, bridged.message.destination
        if here == ends[not sending]:
            calls.setdefault(bridged.source_microbatch if sending else bridged.destination_microbatch, []).append(
                bridged
            )
            if ends not in opened:
                opened[ends] = channels.of(f"{name}/{ends[0]}-{ends[1]}", *ends)
    lo, hi = part.samples_of(part.layout.coordinates(here)["dp"])
    holding = (source if sending else destination).holding_of(here)
    assert holding is not None
    shape = part.batch.micro_size, *holding.shape[1:]

    def lines(call: int) -> list[tuple[Any, Channel]]:
        found = calls.get(call, [])
        return [(each.message, opened[each.message.source, each.message.destination]) for each in found]

    numbers = range((hi - lo) // part.batch.micro_size)
    if sending:
        return [BridgeSender(shape, lines(call)) for call in numbers]
    return [BridgeReceiver(shape, lines(call), device) for call in numbers]


def _grid(part: ModulePlan, pp_rank: int) -> Grid:
    """What the ranks of a pipeline rank of a module hold of the hidden states of a whole batch."""
    return stage_grid(part, samples=[(part.samples_of(dp_rank),) for dp_rank in range(part.layout.dp)], pp_rank=pp_rank)


class ModuleTransport(Transport):
    """A rank's way to the others of its module, as if there were no others. Ranks keep their numbers; names
    are the module's own."""

    def __init__(self, transport: Transport, name: str, world_size: int):
        super().__init__(transport.global_rank, transport.world_size, transport.device, transport.recorder)
        self.watch = transport.watch
        self._transport, self._module = transport, name
        self.world_size = world_size

    def _check_name(self, name: str, ranks: Sequence[int]) -> None:
        """The whole transport checks, who knows all ranks."""

    def _group(self, name: str, axis: str, ranks: Sequence[int]) -> Group:
        return self._transport.group(f"{self._module}/{name}", axis, ranks)

    def _channel(self, name: str, source: int, destination: int) -> Channel:
        return self._transport.channel(f"{self._module}/{name}", source, destination)

    def register_rooms(self) -> None:
        self._transport.register_rooms()


class NamedObserver:
    """Shows an observer a module's tensors by their names in the whole: `encoder.layers.0.output`."""

    def __init__(self, observer: Observer, part: ModulePlan):
        self._observer, self._name = observer, part.name_in_run

    def begin_step(self, step: int) -> None:
        """As `Observer.begin_step`."""
        self._observer.begin_step(step)

    def activation(self, name: str, microbatch: Microbatch, tokens: tuple[slice, ...], tensor_BSH: Tensor) -> None:
        """As `Observer.activation`."""
        self._observer.activation(self._name(name), microbatch, tokens, tensor_BSH)

    def scalar(self, name: str, value: float) -> None:
        """As `Observer.scalar`: a number of all modules."""
        self._observer.scalar(name, value)

    def gradient(self, name: str, slices: tuple[slice, ...], tensor: Tensor) -> None:
        """As `Observer.gradient`."""
        self._observer.gradient(self._name(name), slices, tensor)

    def optimizer_state(self, name: str, slices: tuple[slice, ...], moments: Mapping[str, Tensor]) -> None:
        """As `Observer.optimizer_state`."""
        self._observer.optimizer_state(self._name(name), slices, moments)

    def weight(self, name: str, slices: tuple[slice, ...], tensor: Tensor, *, step: int | None = None) -> None:
        """As `Observer.weight`."""
        self._observer.weight(self._name(name), slices, tensor, step=step)

    def recomputed(self, name: str, microbatch: Microbatch, tokens: tuple[slice, ...] | None, tensor: Tensor) -> None:
        """As `Observer.recomputed`."""
        self._observer.recomputed(self._name(name), microbatch, tokens, tensor)

    def brought(self, name: str, slices: tuple[slice, ...], tensor: Tensor) -> None:
        """As `Observer.brought`."""
        self._observer.brought(self._name(name), slices, tensor)

    def gathered(self, name: str, slices: tuple[slice, ...], tensor: Tensor) -> None:
        """As `Observer.gathered`."""
        self._observer.gathered(self._name(name), slices, tensor)
