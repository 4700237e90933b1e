"""`Recorder`: what a rank really computed and sent, in the words of `core.program`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

from ...core.program import Collective, Message, Operation, Product
from ...core.schedule.action import Action

CollectiveOp = Literal["all_to_all", "all_gather", "all_reduce", "reduce_scatter"]


class _Scope(threading.local):
    """What the current thread is working on, the innermost layer last."""

    action: Action | None = None
    failed: str = ""
    """The innermost layer that an exception has left since the action began."""

    def __init__(self) -> None:
        self.layers = [""]


class _InLayer(AbstractContextManager[None]):
    """`Recorder.layer`: entered several times for every product, so there is one for each layer, and it is no
    generator, which costs four times as much."""

    __slots__ = ("_layer", "_scope")

    def __init__(self, scope: _Scope, layer: str):
        self._scope = scope
        self._layer = layer

    def __enter__(self) -> None:
        self._scope.layers.append(self._layer)

    def __exit__(self, *raised: object) -> None:
        layer = self._scope.layers.pop()
        if raised[0] is not None:
            self._scope.failed = self._scope.failed or layer


class Waits:
    """Seconds of the calls that exchange tensors, by the action they belong to; on a GPU the host's alone."""

    def __init__(self) -> None:
        self._seconds: dict[Action | None, float] = {}
        self._lock = threading.Lock()  # lanes are threads

    def add(self, action: Action | None, seconds: float) -> None:
        """One call."""
        with self._lock:
            self._seconds[action] = self._seconds.get(action, 0.0) + seconds

    def take(self) -> dict[Action | None, float]:
        """What there was since the last time."""
        with self._lock:
            taken, self._seconds = self._seconds, {}
        return taken


class Recorder:
    """Collects operations with the action and layer they belong to. Layers and the executor set the scope;
    transports report calls.

    One recorder belongs to one rank. Scopes are per thread, because gradient reductions run outside the compute lane;
    message lanes pass their action explicitly.
    """

    def __init__(self, enabled: bool = False):
        self.enabled = enabled
        self.events: list[tuple[Action | None, Operation]] = []
        self.failed: tuple[Action, str] | None = None
        """The first action that an exception has left, and the layer it was in, empty outside all layers."""
        self.waits: Waits | None = None
        """Where the seconds of collectives go; None takes none."""
        self._scope = _Scope()
        self._in_layer: dict[str, _InLayer] = {}

    @contextmanager
    def action(self, action: Action | None) -> Iterator[None]:
        """Everything inside belongs to `action`."""
        before, self._scope.action = self._scope.action, action
        self._scope.failed = ""
        try:
            yield
        except BaseException:
            if self.failed is None and action is not None:
                self.failed = action, self._scope.failed or self.current_layer
            raise
        finally:
            self._scope.action = before

    def layer(self, layer: str) -> AbstractContextManager[None]:
        """Everything inside belongs to `layer`, e.g. `layers.0.mlp.down`."""
        found = self._in_layer.get(layer)
        if found is None:
            found = self._in_layer[layer] = _InLayer(self._scope, layer)
        return found

    @property
    def current_layer(self) -> str:
        """The layer this thread is working on; empty outside all layers."""
        return self._scope.layers[-1]

    @property
    def scope(self) -> tuple[Action | None, str]:
        """What this thread is working on, for a thread that goes on with it."""
        return self._scope.action, self._scope.layers[-1]

    @contextmanager
    def within(self, scope: tuple[Action | None, str]) -> Iterator[None]:
        """Everything inside belongs to the `scope` of another thread."""
        action, layer = scope
        with self.action(action), self.layer(layer):
            yield

    def product(
        self, m: int, n: int, k: int, count: int = 1, *, dtype: Literal["fp32"] | None = None, grouped: bool = False
    ) -> None:
        """`count` products [m, k] x [k, n], with `grouped` on average; `dtype` where the operands are not in
        the plan's precision."""
        if self.enabled:
            self.events.append((self._scope.action, Product(self.current_layer, m, n, k, count, grouped, dtype)))

    def collective(self, op: CollectiveOp, axis: str, group_size: int, sent_bytes: int) -> None:
        """One collective call; `sent_bytes` left this rank."""
        if self.enabled:
            self.events.append((self._scope.action, Collective(self.current_layer, op, axis, group_size, sent_bytes)))

    def repeat(self, operations: Iterable[tuple[Action | None, Operation]]) -> None:
        """The same once more: what a replay does of what was recorded when it was captured."""
        if self.enabled:
            self.events.extend(operations)

    def message(self, action: Action, num_bytes: int) -> None:
        """One point-to-point message."""
        if self.enabled:
            self.events.append((action, Message("", num_bytes)))
