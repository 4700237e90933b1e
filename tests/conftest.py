"""What all tests share: one thread per process and MKL's reproducible mode, set before torch is loaded, a
core, and pools of ranks.

Some hundred processes are started by tests. Where the environment forbids caches of bytecode each would compile the
library anew, a quarter of a second each, so here they are allowed.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.pop("COLUMNS", None)  # what tests capture is as wide as it comes, whatever the terminal

import shardproof.backend  # noqa: F401 - sets MKL_CBWR
from shardproof.backend.launching.launch import Workers, preload

EXAMPLES_ON_PUSH = 50
"""Of a property that says no number of its own; `--full` tries Hypothesis' own hundred."""

WorkersOf = Callable[..., Workers]

sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-goldens", action="store_true", help="write tests/data/golden anew")
    parser.addoption("--full", action="store_true", help="also the cases that only .ci/full runs (helpers/gates.py)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        later = [item for item in items if "full" in item.keywords]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if "full" not in item.keywords]


def pytest_configure(config: pytest.Config) -> None:
    """Gives properties their examples, without deadlines: on shared machines the time of one means nothing. Gives each
    worker of pytest-xdist (`gw0`, `gw1`, ...) a core, and whatever it starts the same one.

    Ranks that are threads hand the interpreter's lock to each other at every operation of a tiny model. Between cores
    each hand-over wakes a sleeping thread: eight ranks take 2.7 times the processor time that they take on one core,
    half of it in the kernel.
    """
    settings.register_profile("push", deadline=None, max_examples=EXAMPLES_ON_PUSH)
    settings.register_profile("full", deadline=None)
    settings.load_profile("full" if config.getoption("--full") else "push")
    preload("pytest", "hypothesis")  # which modules of tests import, and so ranks whose jobs are in them
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def pytest_collection() -> None:
    """Collecting makes a million objects that all stay: looking for garbage among them takes a quarter of its time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What was collected stays until the end and is not looked at again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkersOf]:
    """`workers(world_size, transport="shm")`: ranks that stay between tests. A pool that a failed
    job closed is replaced."""
    pools: dict[tuple[int, str], Workers] = {}

    def workers_of(world_size: int, transport: str = "shm") -> Workers:
        key = (world_size, transport)
        if key not in pools or pools[key].closed:
            pools[key] = Workers(world_size, transport, timeout_s=600)  # type: ignore[arg-type]
        return pools[key]

    yield workers_of
    for pool in pools.values():
        pool.close()
