"""Ledgers on disk: a folder with one file per rank, JSON lines, the first of them about the run. A run that ends early
leaves what it saw, one that is killed all but the last few dozen lines.

A line is one tensor: step, phase, name, sample, shape, region, digest, digest without places, largest magnitude,
signed sums (`summary`).
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ...core.base.digest import to_hex
from ...core.base.errors import PlanError
from ...core.base.files import read_lines
from ...core.base.parsing import parse_json
from ...core.layout.recorded_numerics import RecordedNumerics
from ...core.plan.plan import AnyPlan, Plan, recorded_numerics
from .form import FORMAT, entry_of, header_problem
from .ledger import NO_STEP, SCALAR, WEIGHT, Key, LedgerWriter, Piece, RankLedger, RunLedger

OF_THE_RUN = ("world_size", "plan", "numerics", "exact")
"""What the files of all ranks have in common."""

_LINES_AT_ONCE = 64
"""Lines written at once: half a megabyte of values empties the caches, and then a line alone costs the
interpreter five times as much."""


@dataclass
class FileLedger(LedgerWriter, AbstractContextManager["FileLedger"]):
    """A `LedgerWriter` that writes its entries to `rank-N.jsonl` in `target`, and keeps none. A context
    manager that closes the file.

    What a step or a held-out pass ends with, weights and scalars, is written at once, with all before it.
    """

    step: int = NO_STEP
    target: Path = field(default_factory=Path)
    header: Mapping[str, Any] = field(default_factory=dict)
    _file: IO[str] | None = None
    _waiting: list[tuple[Key, Piece]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # hooks of two lanes may come at once

    def keep(self, key: Key, piece: Piece) -> None:
        """One line."""
        with self._lock:
            self._waiting.append((key, piece))
            if key.phase in (WEIGHT, SCALAR) or len(self._waiting) == _LINES_AT_ONCE:
                self._write()

    def close(self) -> None:
        """Ends the file, if it was begun."""
        with self._lock:
            if self._waiting:
                self._write()
            if self._file is not None:
                self._file.close()

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _write(self) -> None:
        if self._file is None:
            self._file = (self.target / _file_name(self.global_rank)).open("x", encoding="utf-8")
            print(json.dumps({"format": FORMAT, "rank": self.global_rank, **self.header}), file=self._file)
        self._file.write("".join(_line(key, piece) for key, piece in self._waiting))
        self._file.flush()
        self._waiting.clear()


@dataclass(frozen=True)
class SavedLedger:
    """A ledger read back: all entries of all ranks, the plan that was run, the numerics that it recorded (before
    version 2 those of its plan), and where it ran (`environment`, by rank)."""

    path: Path
    run: RunLedger
    plan: AnyPlan
    numerics: RecordedNumerics
    environments: tuple[Mapping[str, Any], ...]

    @property
    def exact(self) -> bool:
        """Whether the run has the bits of every other of its plan."""
        return self.plan.numerics.mode == "exact"


@dataclass(frozen=True)
class RecordedLedger:
    """A ledger of another stack (`foreign.Recorder`) read back; there is no plan, and `exact` is what the
    run claims of its bits."""

    path: Path
    run: RunLedger
    exact: bool
    environments: tuple[Mapping[str, Any], ...]


def prepare_folder(path: Path) -> None:
    """Makes a folder for a new ledger. Raises `PlanError` where something is in it."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise PlanError(f"{path} is not empty. Give a new folder for the ledger, or remove this one.")
    path.mkdir(parents=True, exist_ok=True)


def is_ledger(path: str) -> bool:
    """Whether a path looks like the folder of a ledger."""
    return Path(path).is_dir()


def read_ledger(path: str | Path) -> SavedLedger | RecordedLedger:
    """The ledger in a folder. Raises `PlanError` for a folder that has none, whose ranks are not
    complete, or that is broken."""
    folder = Path(path)
    files = sorted((file for file in folder.glob("rank-*.jsonl") if _FILE.fullmatch(file.name)), key=_rank_of)
    if not files:
        raise PlanError(
            f"{folder} has no ledger: there is no rank-0.jsonl. Write one with: shardproof train PLAN --ledger {folder}"
        )
    headers, ledgers = zip(*map(_read_file, files), strict=True)
    first = headers[0]
    for file, header in zip(files, headers, strict=True):
        if any(header.get(name) != first.get(name) for name in OF_THE_RUN):
            raise _broken(file, f"it is of another run than {files[0].name}")
    missing = next(
        (rank for rank in range(first["world_size"]) if rank >= len(files) or _rank_of(files[rank]) != rank), None
    )
    if missing is not None:
        ran = f"{first['world_size']} ranks ran"
        raise PlanError(f"{folder}: {ran}, but {_file_name(missing)} is not there. Gather the files of all hosts.")
    run, environments = RunLedger.merge(ledgers), tuple(header["environment"] for header in headers)
    if "plan" not in first:
        return RecordedLedger(folder, run, all(header["exact"] for header in headers), environments)
    plan = Plan.from_toml(first["plan"], f"{files[0]} (its plan)")
    if plan.world_size != first["world_size"]:
        raise _broken(files[0], f"its plan has {plan.world_size} ranks, and {first['world_size']} ran")
    recorded = first.get("numerics")
    numerics = recorded_numerics(plan) if recorded is None else RecordedNumerics.from_json(recorded)
    if numerics.mode != plan.numerics.mode:
        raise _broken(files[0], f"its numerics are {numerics.mode}, and those of its plan {plan.numerics.mode}")
    return SavedLedger(folder, run, plan, numerics, environments)


_FILE = re.compile(r"rank-(0|[1-9][0-9]{0,6})\.jsonl")


def _rank_of(file: Path) -> int:
    return int(file.stem.partition("-")[2])


def _read_file(path: Path) -> tuple[dict[str, object], RankLedger]:
    lines = read_lines(path)
    header = parse_json(next(lines, ""), f"{path}:1")
    if problem := header_problem(header):
        raise _broken(path, problem)
    if header["rank"] != _rank_of(path):
        raise _broken(path, f"it is the file of rank {header['rank']}")
    return header, RankLedger(tuple(_entries(path, header["rank"], lines)))


def _entries(path: Path, global_rank: int, lines: Iterable[str]) -> Iterator[tuple[Key, Piece]]:
    for number, line in enumerate(lines, start=2):
        if not line.endswith("\n"):
            return  # a rank that was killed may have left half a line at the end
        value = parse_json(line, f"{path}:{number}")
        try:
            yield entry_of(global_rank, value)
        except ValueError as error:
            raise _broken(f"{path}:{number}", str(error)) from None


def _broken(place: Path | str, problem: str) -> PlanError:
    return PlanError(f"{place}: this is no file of a ledger, or broken: {problem}. Write the ledger again.")


def _line(key: Key, piece: Piece) -> str:
    """One line of JSON, put together here because the general encoder takes twice as long."""
    summary, sample = piece.summary, "null" if key.sample is None else key.sample
    shape, region = ",".join(map(str, piece.shape)), ",".join(f"[{lo},{hi}]" for lo, hi in piece.region)
    numbers = [summary.largest, *summary.sums]
    largest, *sums = (
        map(repr, numbers) if math.isfinite(sum(numbers)) else (json.dumps(_written(each)) for each in numbers)
    )
    return (
        f'[{key.step},"{key.phase}",{json.dumps(key.tensor)},{sample},[{shape}],[{region}],"{to_hex(summary.digest)}","{summary.value_digest:016x}",'
        f"{largest},[{','.join(sums)}]]\n"
    )


def _written(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _file_name(global_rank: int) -> str:
    return f"rank-{global_rank}.jsonl"
