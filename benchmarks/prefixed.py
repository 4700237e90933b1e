"""`Prefixed`: several training ranks share one transport, for benchmarks that run two ways in the same processes."""

from __future__ import annotations

from typing import Any


class Prefixed:
    """A transport whose groups and channels have names of their own."""

    def __init__(self, transport: Any, prefix: str):
        self._transport, self._prefix = transport, prefix

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def channel(self, name: str, source: int, destination: int) -> Any:
        """As the transport's."""
        return self._transport.channel(f"{self._prefix} {name}", source, destination)

    def group(self, name: str, axis: str, ranks: Any, **how: Any) -> Any:
        """As the transport's."""
        return self._transport.group(f"{self._prefix} {name}", axis, ranks, **how)
