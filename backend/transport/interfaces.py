"""Which network interfaces ranks use: those that `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` name, and loopback where
one machine has all of them. `docs/hosts.md` says what listens where. No torch here."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""What torch and NCCL read: names of interfaces, separated by commas."""

LOOPBACK_NAMES = ("lo", "lo0")
"""Of Linux, and of BSD and macOS."""


def loopback_variables() -> dict[str, str]:
    """The variables that bind gloo and NCCL to this machine's loopback interface."""
    present = {name for _, name in socket.if_nameindex()}
    name = next((name for name in LOOPBACK_NAMES if name in present), LOOPBACK_NAMES[0])
    return {GLOO_VARIABLE: name, NCCL_VARIABLE: name}


def gloo_interfaces() -> list[str]:
    """The interfaces that gloo is to use; none where it is to look up the name of the host."""
    return [name for name in os.environ.get(GLOO_VARIABLE, "").split(",") if name]


def is_one_host(environment: Mapping[str, str]) -> bool:
    """True where a launcher says that all its ranks are on this machine."""
    return environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE") is not None
