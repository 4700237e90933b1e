"""Ledgers on disk: a folder with one file per rank, JSON lines, the first of them about the run. A run that ends early leaves what it saw.

A line is one tensor: step, phase, name, sample, shape, region, digest, digest without places, largest magnitude, signed sums (`summary`).
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ..core.errors import PlanError
from ..core.plan import Plan
from .digest import Region, to_hex
from .ledger import NO_STEP, SCALAR, Key, LedgerWriter, Piece, RankLedger, RunLedger
from .modules import AnyPlan
from .summary import Summary

FORMAT = 1
"""Of the lines of a file; files of another one are refused."""


@dataclass
class FileLedger(LedgerWriter):
    """A `LedgerWriter` that writes every entry at once to `rank-N.jsonl` in `target`, and keeps none."""

    step: int = NO_STEP
    target: Path = field(default_factory=Path)
    header: Mapping[str, Any] = field(default_factory=dict)
    _file: IO[str] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)  # hooks of two lanes may come at once

    def keep(self, key: Key, piece: Piece) -> None:
        """One line."""
        with self._lock:
            if self._file is None:
                path = self.target / _file_name(self.global_rank)
                self._file = path.open("x", encoding="utf-8", buffering=1)
                print(json.dumps({"format": FORMAT, "rank": self.global_rank, **self.header}), file=self._file)
            print(_line(key, piece), file=self._file)


@dataclass(frozen=True)
class SavedLedger:
    """A ledger read back: all entries of all ranks, the plan that was run, and where it ran (`environment`, by rank)."""

    path: Path
    run: RunLedger
    plan: AnyPlan
    environments: tuple[Mapping[str, Any], ...]


def prepare_folder(path: Path) -> None:
    """Makes a folder for a new ledger. Raises `PlanError` where something is in it."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise PlanError(f"{path} is not empty. Give a new folder for the ledger, or remove this one.")
    path.mkdir(parents=True, exist_ok=True)


def is_ledger(path: str) -> bool:
    """Whether a path looks like the folder of a ledger."""
    return Path(path).is_dir()


def read_ledger(path: str | Path) -> SavedLedger:
    """The ledger in a folder. Raises `PlanError` for a folder that has none, whose ranks are not complete, or that is broken."""
    folder = Path(path)
    files = sorted(folder.glob("rank-*.jsonl"), key=lambda file: int(file.stem.partition("-")[2]))
    if not files:
        raise PlanError(f"{folder} has no ledger: there is no rank-0.jsonl. Write one with: shardproof train PLAN --ledger {folder}")
    headers, ledgers = zip(*(_read_file(file) for file in files), strict=True)
    world_size = headers[0]["world_size"]
    if missing := sorted(set(range(world_size)) - {header["rank"] for header in headers}):
        raise PlanError(f"{folder}: {world_size} ranks ran, but {_file_name(missing[0])} is not there. Gather the files of all hosts.")
    plan = Plan.from_toml(headers[0]["plan"])
    return SavedLedger(folder, RunLedger.merge(ledgers), plan, tuple(header["environment"] for header in headers))


def _read_file(path: Path) -> tuple[dict[str, Any], RankLedger]:
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        header = json.loads(lines[0])
        if header["format"] != FORMAT:
            raise PlanError(f"{path} is of format {header['format']}, and this version reads format {FORMAT}. Write the ledger again.")
        # a rank that was killed may have left half a line at the end
        return header, RankLedger(tuple(_entries(header["rank"], lines[1:-1])))
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{path} is no file of a ledger, or broken: {error}. Write the ledger again.") from None


def _entries(global_rank: int, lines: Sequence[str]) -> Iterator[tuple[Key, Piece]]:
    for line in lines:
        step, phase, tensor, sample, shape, region, digest, alike, largest, sums = json.loads(line)
        spans: Region = tuple((lo, hi) for lo, hi in region)
        lanes = int(digest[:16], 16), int(digest[16:], 16)
        summary = Summary(lanes, int(alike, 16), _number(largest), tuple(map(_number, sums)))
        kept = summary.sums[0] if phase == SCALAR else None
        yield Key(step, phase, tensor, sample), Piece(global_rank, tuple(shape), spans, summary, kept)


def _line(key: Key, piece: Piece) -> str:
    summary = piece.summary
    numbers = [_written(summary.largest), [_written(each) for each in summary.sums]]
    return json.dumps([*key, piece.shape, piece.region, to_hex(summary.digest), f"{summary.alike:016x}", *numbers], separators=(",", ":"))


def _written(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no infinity


def _number(value: float | str) -> float:
    return float(value)


def _file_name(global_rank: int) -> str:
    return f"rank-{global_rank}.jsonl"
