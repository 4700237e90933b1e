"""What ranks send each other besides tensors, and work that some of them do while the others wait for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..watch.watch import RankWatch
from .base import Group, TransportError

T = TypeVar("T")

ROUND_S = 0.5
"""How often ranks that work, and those that wait for them, signal that they are there: well below
any `train.timeout_s`."""

MAX_BYTES = 1 << 30
"""Of one value: the spans of a step of a million actions are a tenth of it."""


def gather_values(group: Group, value: Any, device: torch.device) -> list[Any]:
    """Every member's `value`, in member order, on every member. It is sent as JSON: tuples arrive as lists, and nothing
    that a peer sends is executed. Raises `TransportError` for what is no JSON, or larger than `MAX_BYTES`."""
    body = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = [int(size) for size in group.all_gather(torch.tensor([body.numel()], dtype=torch.int64, device=device))]
    if not all(0 < size <= MAX_BYTES for size in sizes):
        raise TransportError(
            f"{group}: ranks announce values of {sizes} bytes, of which each may be at most {MAX_BYTES}."
        )
    return [_parsed(group, body) for body in group.all_gather(body, [(size,) for size in sizes])]


def _parsed(group: Group, body: torch.Tensor) -> Any:
    try:
        return json.loads(body.cpu().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise TransportError(f"{group}: a rank has sent what is no value: {error}.") from error


def run_on_all(
    group: Group, device: torch.device, work: Callable[[], T], *, watch: RankWatch | None = None, name: str = "work"
) -> T:
    """What this rank's `work` gives; returns when that of all ranks is done, which call this together. It may
    take as long as it likes.

    The work runs in a thread of its own, and every `ROUND_S` seconds all ranks signal that they are
    there. So no call waits longer than that for its peers, a rank that ends is noticed, and on the board of `watch` the
    ranks move. Raises what the work raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # it belongs to the calling thread
            errors.append(error)

    thread = threading.Thread(target=run, name=f"rank {group.ranks[group.rank]} lane {name}", daemon=True)
    thread.start()
    place = watch.place(name) if watch is not None else None
    rounds, is_over = 0, False
    while not is_over:
        rounds += 1
        thread.join(ROUND_S)
        if place is not None:
            place.comes_to(rounds)
            place.runs(name)
        own = torch.tensor([int(not thread.is_alive())], dtype=torch.int64, device=device)
        is_over = all(bool(done) for done in group.all_gather(own))
    if place is not None:
        place.done()
    if errors:
        raise errors[0]
    return results[0]
