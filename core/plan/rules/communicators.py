"""The rules of NCCL's communicators. `table` has them in order."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.errors import did_you_mean
from ..communicators import AXES, Communicators

TABLES = ("min_ctas", "max_ctas", "cga_cluster_size")


def axes_are_known(communicators: Communicators) -> Iterator[str]:
    """Options are by axis."""
    for name in TABLES:
        for axis in getattr(communicators, name):
            if axis not in AXES:
                yield f'{name} names "{axis}", which no communicators join{did_you_mean(axis, AXES)}'


def ctas_are_whole(communicators: Communicators) -> Iterator[str]:
    """Thread blocks are counted."""
    for name in TABLES:
        for axis, number in getattr(communicators, name).items():
            if number != int(number) or number < 1:
                yield f"{name}: {axis} = {number:g} is no number of thread blocks. Use {max(1, round(number))}."


def windows_are_registered(communicators: Communicators) -> Iterator[str]:
    """Windows are of registered buffers."""
    if communicators.symmetric and not communicators.registered:
        yield 'symmetric=true is about registered buffers, and there are none. Set registered=["dp"], or leave it out.'


def most_ctas_are_no_fewer(communicators: Communicators) -> Iterator[str]:
    """At most is not less than at least."""
    for axis, least in communicators.min_ctas.items():
        most = communicators.max_ctas.get(axis)
        if most is not None and most < least:
            yield (
                f"max_ctas: {axis} = {most:g} is fewer than min_ctas: {axis} = {least:g}. "
                f"Use min_ctas of at most {most:g}, or leave one of them out."
            )
