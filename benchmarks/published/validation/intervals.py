"""Measured over predicted seconds of every kind of run, as the module that `shardproof check` reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import astuple
from statistics import median
from typing import Any

from ....simulator.simulation.interval import RunKind, kind_of
from ..plans import plan_of
from .predictions import Prediction

HEAD = '''"""Measured over predicted step of published settings, by kind of run. Written by
`python benchmarks/validate.py --write-intervals simulator/simulation/validated.py`; not edited by hand.

Near-duplicates (one source, model and cut of it) are one setting, with the middle of their ratios.
"""

from __future__ import annotations

RATIOS: tuple[tuple[tuple[str, str, bool, bool], tuple[float, ...]], ...] = (
'''


def ratios_by_kind(predictions: Iterable[Prediction]) -> dict[RunKind, tuple[float, ...]]:
    """Kind of run -> measured over predicted seconds of its settings, ordered. Rows of single nodes that are put
    together from kernels (vTrain) are no measured steps."""
    found: dict[tuple[RunKind, Any], list[float]] = defaultdict(list)
    for each in predictions:
        if each.error is not None and each.row.family != "vtrain_single":
            found[kind_of(plan_of(each.row).plan), each.row.setting_key].append(1 / (1 + each.error))
    kinds: dict[RunKind, list[float]] = defaultdict(list)
    for (kind, _), ratios in found.items():
        kinds[kind].append(round(median(ratios), 4))
    return {kind: tuple(sorted(kinds[kind])) for kind in sorted(kinds, key=astuple)}


def module_text(predictions: Iterable[Prediction]) -> str:
    """The module as text, in lines of at most 120 characters."""
    lines = []
    for kind, ratios in ratios_by_kind(predictions).items():
        lines.append("    (")
        named = ", ".join(f'"{each}"' if isinstance(each, str) else str(each) for each in astuple(kind))
        lines.append(f"        ({named}),")
        lines.append("        (")
        for start in range(0, len(ratios), 12):
            lines.append("            " + " ".join(f"{ratio:.4f}," for ratio in ratios[start : start + 12]))
        lines += ["        ),", "    ),"]
    return HEAD + "\n".join(lines) + "\n)\n"
