"""Each compiled half and what it must agree with: numpy, Python's fractions, a closed form."""

from __future__ import annotations

import importlib.util
from fractions import Fraction

import numpy as np

from ...core.base import digest as digests
from ...core.commands.commands import service
from ...core.schedule import build, lower
from .checks import Result, seconds_of
from .machine import Machine

NOT_BUILT = "not built: no C compiler was found when shardproof was installed; plain loops do the same, slower"


def event_engine(machine: Machine) -> Result:
    """The length of a 1F1B step of 8 ranks and 32 microbatches: (m + p - 1) forwards and backwards (Narayanan et al.
    2021)."""
    ranks, microbatches = 8, 32
    schedule = lower(build("1F1B", pp=ranks, num_microbatches=microbatches))
    timeline = service("run_schedule")(schedule)
    end_s, due_s = max(span.end_s for span in timeline.spans), 3.0 * (microbatches + ranks - 1)
    if end_s != due_s:
        return Result("failed", f"a step of {ranks} ranks ends after {end_s:g} s, not {due_s:g}")
    if importlib.util.find_spec("shardproof.simulator.engine._kernel") is None:
        return Result("skipped", NOT_BUILT)
    return Result("ok")


def digest(machine: Machine) -> Result:
    """The same digest from the compiled loops and from numpy, and bytes a second."""
    if digests.compiled is None:
        return Result("skipped", NOT_BUILT)
    values = np.random.default_rng(1).standard_normal((1024, 1021)).astype(np.float32)
    index = digests.element_index(values.shape, digests.full_region(values.shape)).reshape(-1)
    if digests.digest(values) != digests.digest_plainly(digests.bit_words(values).reshape(-1), index):
        return Result("failed", "the compiled loops and numpy give different digests")
    rate = values.nbytes / seconds_of(lambda: digests.digest(values)) / 1e9
    return Result("ok", value=round(rate, 2), unit="GB/s")


def exact_sum(machine: Machine) -> Result:
    """The sum of numbers from 2^-149 to 2^127 against Python's fractions, and numbers a second."""
    import torch

    from ...backend.numerics import exact_sum as sums

    generator = np.random.default_rng(2)
    bits = generator.integers(0, 0x7F800000, 4096, dtype=np.uint32) | generator.integers(0, 2, 4096, np.uint32) << 31
    values = bits.view(np.float32)
    total = sums.exact_sum([torch.from_numpy(values)]).total
    if Fraction(total, 1 << -sums.LOWEST_EXPONENT) != sum(map(Fraction, values.tolist()), Fraction()):
        return Result("failed", "an exact sum differs from Python's fractions")
    if sums.compiled is None:
        return Result("skipped", NOT_BUILT)
    many = torch.randn(1 << 20)
    rate = many.nbytes / seconds_of(lambda: sums.exact_sum([many])) / 1e9
    return Result("ok", value=round(rate, 2), unit="GB/s")
