"""What all tests share: one thread per process and MKL's reproducible mode, set before torch is loaded, and pools of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

os.environ["OMP_NUM_THREADS"] = "1"

import shardproof.backend  # noqa: F401 - sets MKL_CBWR
from shardproof.backend.launch import Workers

WorkersOf = Callable[..., Workers]


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkersOf]:
    """`workers(world_size, transport="gloo")`: ranks that stay between tests. A pool that a failed job closed is replaced."""
    pools: dict[tuple[int, str], Workers] = {}

    def workers_of(world_size: int, transport: str = "gloo") -> Workers:
        key = (world_size, transport)
        if key not in pools or pools[key].closed:
            pools[key] = Workers(world_size, transport, timeout_s=120)  # type: ignore[arg-type]
        return pools[key]

    yield workers_of
    for pool in pools.values():
        pool.close()
