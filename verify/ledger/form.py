"""The form of the lines of a ledger's file: what must be where, before anything is made of it."""

from __future__ import annotations

import math
import re
from typing import Any, TypeGuard

from ...core.base.digest import Region
from ...core.base.names import is_plain, is_plain_table
from ...core.layout.recorded_numerics import RecordedNumerics
from .ledger import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    BROUGHT,
    GATHERED,
    GRADIENT,
    HELD_OUT,
    NO_STEP,
    OPTIMIZER,
    RECOMPUTED,
    SCALAR,
    SQUARE,
    WEIGHT,
    Key,
    Piece,
)
from .summary import NUM_SUMS, Summary

FORMAT = 3
"""Of the lines of a file; files of another one are refused."""

KINDS = (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    HELD_OUT,
    GRADIENT,
    SQUARE,
    OPTIMIZER,
    WEIGHT,
    RECOMPUTED,
    BROUGHT,
    GATHERED,
    SCALAR,
)
"""Of tensors that a line may be about."""

MOST_RANKS = 2**20
"""Of a run; each has a file of its own."""

LARGEST_COUNT = 2**62
"""Of steps, samples and elements."""

_DIGEST = re.compile(r"[0-9a-f]{32}")
_VALUE_DIGEST = re.compile(r"[0-9a-f]{16}")
_NOT_FINITE = ("nan", "inf", "-inf")


def header_problem(header: Any) -> str:
    """What keeps a JSON value from being the first line of a ledger's file; empty when nothing does."""
    if not isinstance(header, dict):
        return f"the first line is no object but {_short(header)}"
    if header.get("format") != FORMAT:
        return f"it is of format {_short(header.get('format'))}, and this version reads format {FORMAT}"
    ranks, rank, environment = header.get("world_size"), header.get("rank"), header.get("environment")
    if not _is_count(ranks) or not 1 <= ranks <= MOST_RANKS:
        return f"world_size is {_short(ranks)}, not a number of ranks from 1 to {MOST_RANKS:,}"
    if not _is_count(rank) or rank >= ranks:
        return f"rank is {_short(rank)}, not one of 0 to {ranks - 1}"
    if not is_plain_table(environment):
        return f"environment is {_short(environment)}, not a table of texts"
    if "numerics" in header:
        try:
            RecordedNumerics.from_json(header["numerics"])
        except ValueError as error:
            return str(error)
    if "plan" in header:
        return "" if isinstance(header["plan"], str) else f"plan is {_short(header['plan'])}, not the text of a plan"
    if not isinstance(header.get("exact"), bool):
        return f"there is neither a plan nor exact=true or false, but exact is {_short(header.get('exact'))}"
    return ""


def entry_of(global_rank: int, line: Any) -> tuple[Key, Piece]:
    """One tensor, of a parsed line. Raises `ValueError` with what is wrong."""
    if not isinstance(line, list) or len(line) != 10:
        raise ValueError(f"{_short(line)} is no list of 10 values")
    step, phase, tensor, sample, shape, region, digest, value_digest, largest, sums = line
    if type(step) is not int or not NO_STEP <= step <= LARGEST_COUNT:
        raise ValueError(f"step {_short(step)} is no whole number from {NO_STEP}")
    if not isinstance(phase, str) or phase not in KINDS:
        raise ValueError(f"kind {_short(phase)} is not one of {', '.join(KINDS)}")
    if not isinstance(tensor, str) or not is_plain(tensor):
        raise ValueError(f"tensor {_short(tensor)} is no name")
    if sample is not None and not _is_count(sample):
        raise ValueError(f"sample {_short(sample)} is neither a number nor null")
    if not isinstance(shape, list) or not all(map(_is_count, shape)) or math.prod(shape) > LARGEST_COUNT:
        raise ValueError(f"shape {_short(shape)} is no list of sizes")
    spans = _region(region, shape)
    if (
        not isinstance(digest, str)
        or not _DIGEST.fullmatch(digest)
        or not isinstance(value_digest, str)
        or not _VALUE_DIGEST.fullmatch(value_digest)
    ):
        raise ValueError(f"digests {_short([digest, value_digest])} have not 32 and 16 hexadecimal digits")
    if not isinstance(sums, list) or len(sums) != NUM_SUMS:
        raise ValueError(f"sums {_short(sums)} are not {NUM_SUMS} numbers")
    lanes = int(digest[:16], 16), int(digest[16:], 16)
    summary = Summary(lanes, int(value_digest, 16), _number(largest), tuple(map(_number, sums)))
    stored = summary.sums[0] if phase == SCALAR else None
    return Key(step, phase, tensor, sample), Piece(global_rank, tuple(shape), spans, summary, stored)


def _region(region: Any, shape: list[int]) -> Region:
    if not isinstance(region, list) or len(region) != len(shape):
        raise ValueError(f"region {_short(region)} has not a part for each dimension of {shape}")
    for span, size in zip(region, shape, strict=True):
        if (
            not isinstance(span, list)
            or len(span) != 2
            or not all(map(_is_count, span))
            or not span[0] <= span[1] <= size
        ):
            raise ValueError(f"part {_short(span)} of a region is not within 0 and {size}")
    return tuple((lo, hi) for lo, hi in region)


def _number(value: object) -> float:
    if value in _NOT_FINITE and isinstance(value, str):
        return float(value)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= 1e308:
        raise ValueError(f"{_short(value)} is no number")
    return float(value)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= LARGEST_COUNT


def _short(value: object) -> str:
    words = repr(value)
    return words if len(words) <= 80 else f"{words[:80]}..."
