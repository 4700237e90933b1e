"""What is watched of a long run: processes as /proc has them, and what counts as growth."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable

import pytest

from shardproof.benchmarks.endurance import NUM_SAMPLES, Sample, courses

MEBIBYTE = 1 << 20


def growing(of: Callable[[int], Sample]) -> list[str]:
    """The quantities that grow in 2,000 steps."""
    samples = [(20 * number, {"rank 0": of(number)}) for number in range(NUM_SAMPLES)]
    return [each.quantity for each in courses(samples, MEBIBYTE) if each.grows]


def test_a_process_is_seen_to_hold_more() -> None:
    before = Sample.of(os.getpid())
    descriptor, ended = os.memfd_create("endurance"), threading.Event()
    os.ftruncate(descriptor, MEBIBYTE)
    with mmap.mmap(descriptor, MEBIBYTE) as mapped:
        mapped.write(b"x" * MEBIBYTE)
        thread = threading.Thread(target=ended.wait)
        thread.start()
        after = Sample.of(os.getpid())
        ended.set()
        thread.join()
    os.close(descriptor)
    assert after.shared_mapped_bytes - before.shared_mapped_bytes == MEBIBYTE
    assert after.shared_resident_bytes - before.shared_resident_bytes == MEBIBYTE
    assert (after.open_files - before.open_files, after.threads - before.threads) in ((1, 1), (2, 1))  # mmap's own


@pytest.mark.parametrize(
    ("of", "grows"),
    [
        (lambda number: Sample(MEBIBYTE + 5000 * (number % 7), 4096 * (number % 3), 4096, 16 + number % 2, 3), []),
        (lambda number: Sample(MEBIBYTE, 0, 0, 16 + number // 50, 3), ["open_files"]),
        (lambda number: Sample(MEBIBYTE, 0, 0, 16, 3 + number // 90), ["threads"]),
        (lambda number: Sample(MEBIBYTE, 0, 4096 * number, 16, 3), ["shared_mapped_bytes"]),
        (lambda number: Sample(MEBIBYTE + 12_000 * number, 0, 0, 16, 3), ["resident_bytes"]),
        (lambda number: Sample(MEBIBYTE + 8_000 * number, 0, 0, 16, 3), []),
        (lambda number: Sample(MEBIBYTE * (1 + 50 * (number == 99)), 0, 0, 16, 3), []),
    ],
    ids=["flat", "files", "threads", "shared", "resident", "within", "one-value"],
)
def test_growth_is_what_lasts(of: Callable[[int], Sample], grows: list[str]) -> None:
    assert growing(of) == grows
