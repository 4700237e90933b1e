"""Collectives and messages as a step has them: what ranks take longer with them than without.

In a step ranks come to a collective from work of their own, never at the same moment, with other things in their
caches, and go on with work; threads of the library take the cores meanwhile. All of that belongs to the collective, and
the waits for the slower rank do not show in the middle call of a single rank. So whole turns of work and collective are
timed, and turns of work alone; the seconds of a collective are the difference.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from .cases import (
    COLLECTIVES,
    TRANSFER_BYTES,
    TRANSFER_BYTES_QUICK,
    Measurement,
    Pools,
    collective_call,
    product_case,
)
from .messages import TURNS, during_work, open_ends, there_and_back

WORK_TOKENS, WORK_HIDDEN, WORK_INNER = 512, 256, 512
"""Sizes of the MLP that a rank works on in every turn: about as long as half a layer of a small model does
between two collectives."""

SKEW_TOKENS = {"short": 96, "long": 768}
"""Tokens of turns from which it is seen how waits for the slower rank grow with the work before."""

SKEW_BYTES = 1 << 15
"""The tensor of the collective in those turns: so small that what it takes is mostly waiting."""

SKEW_REPEATS = 4
"""Turns of either kind a round, by turns: what is looked for is the difference of two differences."""

TURNS_S = 16e-3
"""Turns of one case last about so long, `TURNS` of them at most and `LEAST_TURNS` at least."""

LEAST_TURNS = 2


def measure_transfers(transport: Any, *, rounds: int, quick: bool, quantile: float) -> list[Measurement]:
    """Collectives over all ranks by the bytes of the whole tensor; between two ranks also messages: `message` is what
    passes between a send and its receive, `message_work` what one of each costs the work of a rank meanwhile. Global
    rank 0 has the seconds."""
    import torch

    world, pools = transport.group("measure", "tp", range(transport.world_size)), Pools(transport.device)
    work = _work(pools, WORK_TOKENS)
    sizes = TRANSFER_BYTES_QUICK if quick else TRANSFER_BYTES
    calls = [(op, size, collective_call(op, size, transport, world)) for size in sizes for op in COLLECTIVES]
    cases = [_Case("collective", op, size, _finished(call, transport.device)) for op, size, call in calls]
    for case in cases:
        case.choose_turns(world, transport.device)
    messages = []
    if transport.world_size == 2:
        ends = open_ends(transport)
        for size in sizes:
            payload = torch.zeros(max(1, size // 4), device=transport.device)
            messages += [
                _Case("message", "message", size, partial(there_and_back, transport, ends, payload)),
                _Case("message", "message_work", size, partial(during_work, transport, ends, payload, work)),
            ]
    works = {name: _work(pools, tokens) for name, tokens in SKEW_TOKENS.items()}
    skew = _Skew(works, _finished(collective_call("all_reduce", SKEW_BYTES, transport, world), transport.device))
    for _ in range(rounds):
        skew.take_turns(world)
        for number, case in enumerate(cases):
            if number % len(COLLECTIVES) == 0:
                world.barrier()
                alone_s = _seconds(work, TURNS) / TURNS
                skew.seconds["work"].append(alone_s)
            world.barrier()
            case.take_turns(work, alone_s)
        for case in messages:
            world.barrier()
            alone_s = _seconds(work, TURNS) / TURNS
            world.barrier()
            if case.name == "message":
                case.take_call(per=2 * TURNS)
            else:
                case.take_call(per=TURNS, less_s=alone_s)
    return [
        *(case.row(transport.world_size, quantile) for case in [*cases, *messages]),
        *skew.rows(transport.world_size, quantile),
    ]


def _both(work: Callable[[], Any], call: Callable[[], Any]) -> None:
    work()
    call()


class _Skew:
    """Turns of little and of much work, each alone and with one small collective."""

    def __init__(self, works: dict[str, Callable[[], Any]], call: Callable[[], Any]):
        self._works, self._call = works, call
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def take_turns(self, world: Any) -> None:
        """All ranks together."""
        for name, work in [*self._works.items()] * SKEW_REPEATS:
            world.barrier()
            alone_s = _seconds(work, TURNS) / TURNS
            world.barrier()
            both_s = _seconds(partial(_both, work, self._call), TURNS) / TURNS
            self.seconds[f"{name}_work"].append(alone_s)
            self.seconds[name].append(both_s - alone_s)

    def rows(self, ranks: int, quantile: float) -> list[Measurement]:
        """What turns took, and what they took longer."""
        found = []
        for name, seconds in self.seconds.items():
            chosen_s, low_s, high_s = _quantiles(seconds, (quantile, 0.25, 0.75))
            found.append(
                Measurement("turn", name, (), ranks, max(chosen_s, LEAST_S), (high_s - low_s) / max(chosen_s, LEAST_S))
            )
        return found


class _Case:
    """A call, and what its turns take longer than turns of work just before: the machine changes
    from minute to minute."""

    def __init__(self, kind: Any, name: str, size: int, call: Callable[[], Any]):
        self.kind, self.name, self.size, self.call = kind, name, size, call
        self._turns, self._least_s = TURNS, float("inf")
        self._seconds: list[float] = []

    def choose_turns(self, world: Any, device: Any) -> None:
        """All ranks together: as many turns as the slowest rank has time for."""
        import torch

        self.call()
        world.barrier()
        found = torch.tensor([max(LEAST_TURNS, min(TURNS, int(TURNS_S / _seconds(self.call, 1))))], device=device)
        self._turns = -int(world.all_reduce(-found, "max"))

    def take_turns(self, work: Callable[[], Any], alone_s: float) -> None:
        """Turns of work, which takes `alone_s`, and call; the shortest call of all is of a rank that came last,
        and waited for nobody."""
        start_s = perf_counter()
        for _ in range(self._turns):
            work()
            self._least_s = min(self._least_s, _seconds(self.call, 1))
        self._seconds.append((perf_counter() - start_s) / self._turns - alone_s)

    def take_call(self, *, per: int, less_s: float = 0.0) -> None:
        """A call that has its turns in itself, `per` of them, each with work of `less_s`."""
        self._seconds.append(_seconds(self.call, 1) / per - less_s)

    def row(self, ranks: int, quantile: float) -> Measurement:
        """The seconds of one call; no less than the shortest, or than the clock's resolution."""
        chosen_s, low_s, high_s = _quantiles(self._seconds, (quantile, 0.25, 0.75))
        seconds = max(chosen_s, self._least_s if self._least_s < float("inf") else LEAST_S)
        return Measurement(self.kind, self.name, (self.size,), ranks, seconds, (high_s - low_s) / seconds)


LEAST_S = 1e-6
"""What cannot be distinguished from nothing."""


def _seconds(call: Callable[[], Any], times: int) -> float:
    start_s = perf_counter()
    for _ in range(times):
        call()
    return perf_counter() - start_s


def _quantiles(values: Sequence[float], parts: Sequence[float]) -> list[float]:
    import torch

    return [float(torch.quantile(torch.tensor(values, dtype=torch.float64), part)) for part in parts]


def _finished(call: Callable[[], Any], device: Any) -> Callable[[], Any]:
    """A call that returns when the device has done it."""
    import torch

    def finished() -> Any:
        result = call()
        torch.cuda.synchronize(device)
        return result

    return finished if device.type == "cuda" else call


def _work(pools: Pools, tokens: int) -> Callable[[], Any]:
    """An MLP with its norm and residual, on weights that lie far."""
    import torch

    makers = [
        product_case((WORK_HIDDEN, WORK_INNER), (tokens, WORK_HIDDEN), lambda weight, x: x @ weight, pools),
        product_case((WORK_INNER, WORK_HIDDEN), (tokens, WORK_INNER), lambda weight, x: x @ weight, pools),
    ]
    up, down = (itertools.cycle(make()) for make in makers)
    x = pools.just_made(tokens, WORK_HIDDEN)

    def mlp() -> Any:
        torch.nn.functional.layer_norm(x, (WORK_HIDDEN,))
        torch.nn.functional.gelu(next(up)())
        return x + next(down)()

    return _finished(mlp, x.device)
