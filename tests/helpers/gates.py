"""What is tested on every push, and what by `.ci/full` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

MODES = ("exact", "fast")
"""Of numerics."""


def sampled(
    names: str | tuple[str, ...], cases: Iterable[Any], *, on_push: int, **keywords: Any
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize`, of whose cases only the first `on_push` run on every push.

    For tests that go through many layouts or models by the way that the matrix goes too.
    `pytest --full` runs all cases.
    """
    single = isinstance(names, str) and "," not in names
    return pytest.mark.parametrize(names, sample(cases, on_push=on_push, single=single), **keywords)


def sample(cases: Iterable[Any], *, on_push: int, single: bool = True) -> list[Any]:
    """The cases, those behind the first `on_push` marked `full`; `single` where a case is one value."""
    cases = list(cases)
    assert 0 < on_push < len(cases), f"{on_push} of {len(cases)} cases are no sample"
    return [*cases[:on_push], *(_marked(case, single) for case in cases[on_push:])]


def _marked(case: Any, single: bool) -> Any:
    if hasattr(case, "marks"):  # what `pytest.param` gave
        return case._replace(marks=(*case.marks, pytest.mark.full))
    return pytest.param(*((case,) if single else case), marks=pytest.mark.full)


def in_both_modes(cases: Iterable[Any], *, fast_on_push: int) -> list[Any]:
    """Every `pytest.param` with `exact` behind its values, and with `fast`, of these on every push only the first so
    many: what is cut and sent is the same in both but for the sums."""
    cases = list(cases)
    exact, fast = ([pytest.param(*case.values, mode, id=f"{case.id}-{mode}") for case in cases] for mode in MODES)
    return [*exact, *sample(fast, on_push=fast_on_push, single=False)]
