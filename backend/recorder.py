"""`Recorder`: what a rank really computed and sent, in the words of `core.program`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from ..core.action import Action
from ..core.program import Collective, Message, Operation, Product


class Recorder:
    """Collects operations with the action and layer they belong to. Layers and the executor set the scope; transports report calls.

    One recorder belongs to one rank. Message lanes run in threads of their own and pass their action explicitly.
    """

    def __init__(self, enabled: bool = False):
        self.enabled = enabled
        self.events: list[tuple[Action | None, Operation]] = []
        self._action: Action | None = None
        self._layer = ""

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Everything inside belongs to `action`."""
        before, self._action = self._action, action
        try:
            yield
        finally:
            self._action = before

    @contextmanager
    def layer(self, layer: str) -> Iterator[None]:
        """Everything inside belongs to `layer`, e.g. `layers.0.mlp.down`."""
        before, self._layer = self._layer, layer
        try:
            yield
        finally:
            self._layer = before

    def product(self, m: int, n: int, k: int, count: int = 1) -> None:
        """`count` products [m, k] x [k, n]."""
        if self.enabled:
            self.events.append((self._action, Product(self._layer, m, n, k, count)))

    def collective(self, op: Literal["all_to_all", "all_gather", "all_reduce", "reduce_scatter"], axis: str, group_size: int, sent_bytes: int) -> None:
        """One collective call; `sent_bytes` left this rank."""
        if self.enabled:
            self.events.append((self._action, Collective(self._layer, op, axis, group_size, sent_bytes)))

    def message(self, action: Action, num_bytes: int) -> None:
        """One point-to-point message."""
        if self.enabled:
            self.events.append((action, Message("", num_bytes)))
