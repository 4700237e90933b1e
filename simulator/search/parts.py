"""A search in several parts: their JSON reports put together to that of the whole (`plan --part`, `plan --merge`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.base.errors import PlanError
from ...core.base.files import read_text
from ...core.plan.plan import Plan
from .simplicity import plainer_first

KEYS = ("part", "top", "options", "candidates", "evaluated", "simulated", "rejected", "elapsed_s")

LAYOUT_KEYS = ("tp", "pp", "vpp", "dp", "cp", "ep", "etp", "sequence_parallel", "zero", "stages")
"""What `layout` of a candidate has."""


def part_of(text: str) -> tuple[int, int]:
    """(number, of how many) that `2/8` says. Raises `PlanError` for any other text."""
    number, slash, of = text.partition("/")
    if slash and number.isdecimal() and of.isdecimal() and len(text) < 16 and 1 <= int(number) <= int(of):
        return int(number), int(of)
    raise PlanError(f"--part {text[:40]}: write number/of, such as 2/8.")


def merged(files: Sequence[str]) -> tuple[dict[str, Any], list[Plan]]:
    """The report of the whole, as `search` makes it, and its plans, best first. Raises `PlanError` where files are no
    reports of parts, are of different searches, or are not all of them."""
    parts = [_read(file) for file in files]
    first = parts[0]
    of = first["part"][1]
    for file, part in zip(files, parts, strict=True):
        if (part["options"], part["part"][1], part["top"]) != (first["options"], of, first["top"]):
            raise PlanError(f"{file}: this part is of another search than {files[0]}. Merge parts of one command.")
    numbers = sorted(part["part"][0] for part in parts)
    if numbers != list(range(1, of + 1)):
        raise PlanError(f"parts {', '.join(map(str, numbers))} are there, not each of 1 to {of} once. Add the others.")
    rows = [row for part in parts for row in part["candidates"]]
    ranked = plainer_first([(row["step_time_s"], Plan.from_toml(row["plan"]), row) for row in rows])
    best, lost = ranked[: first["top"]], ranked[first["top"] :]
    rejected = Counter({"slower": len(lost)})
    for part in parts:
        rejected.update(part["rejected"])
    report = {
        "candidates": [{name: value for name, value in row.items() if name != "plan"} for _, _, row in best],
        "evaluated": sum(part["evaluated"] for part in parts),
        "simulated": sum(part["simulated"] for part in parts),
        "rejected": {reason: number for reason, number in sorted(rejected.items()) if number},
        "elapsed_s": sum(part["elapsed_s"] for part in parts),
    }
    return report, [plan for _, plan, _ in best]


def _read(file: str) -> Mapping[str, Any]:
    try:
        part = json.loads(read_text(file))
    except ValueError as error:
        raise PlanError(f"{file} is not JSON. Merge what `plan --part i/n --json` printed.") from error
    if not (isinstance(part, dict) and set(KEYS) <= set(part) and _is_sound(part)):
        raise PlanError(f"{file} is no part of a search. Merge what `plan --part i/n --json` printed.")
    return part


def _is_sound(part: Mapping[str, Any]) -> bool:
    """Whether the fields that are read have the types that they are read as."""
    counts = (
        (part["top"], part["evaluated"], part["simulated"], *part["rejected"].values())
        if isinstance(part["rejected"], dict)
        else (None,)
    )
    numbers = part["part"]
    rows = part["candidates"] if isinstance(part["candidates"], list) else [None]
    return (
        all(isinstance(each, int) for each in counts)
        and isinstance(part["elapsed_s"], int | float)
        and isinstance(numbers, list)
        and len(numbers) == 2
        and all(isinstance(each, int) for each in numbers)
        and all(map(_is_row, rows))
    )


def _is_row(row: Any) -> bool:
    """Whether a candidate has what a report prints of it."""
    texts, numbers = ("plan", "recompute", "schedule"), ("step_time_s", "mfu", "peak_memory_bytes")
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(name), str) for name in texts)
        and all(isinstance(row.get(name), int | float) for name in numbers)
        and isinstance(row.get("layout"), dict)
        and set(LAYOUT_KEYS) <= set(row["layout"])
        and isinstance(row.get("batch"), dict)
        and isinstance(row.get("free", {}), dict)
        and "micro" in row["batch"]
    )
