"""`Check`, its `Result`, and how one runs: in a process of its own, so that one that crashes or hangs has failed.

A check that ends a CUDA context or the interpreter ends nothing but itself. What it has started ends with it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

from ...core.base.errors import error_words
from .machine import Machine

Status = Literal["ok", "failed", "skipped"]
Needs = Callable[[Machine], str]
"""Why a check has nothing to look at on a machine; empty where it has."""

LAST_WORDS = 3
"""Lines of a crashed check's standard error that its reason repeats."""


@dataclass(frozen=True)
class Table:
    """Measured rows under the names of their columns; a cell is a text or a number."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]


@dataclass(frozen=True)
class Result:
    """What a check found. `why` says of a failed or skipped check what is missing; `value` is its figure in `unit`."""

    status: Status
    why: str = ""
    value: float | None = None
    unit: str = ""
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Check:
    """`function`, `module:name` in this folder, or of a module's whole name, takes a `Machine` and gives a `Result`,
    within `limit_s` seconds."""

    name: str
    what: str
    function: str
    limit_s: float = 60.0
    needs: Needs = field(default=lambda machine: "")
    environment: tuple[tuple[str, str], ...] = ()
    on_gpu: bool = False


def run_check(check: Check, machine: Machine) -> Result:
    """What a check finds here; one that has nothing to look at is skipped, one that crashes or is late has failed."""
    if why := check.needs(machine):
        return Result("skipped", why)
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main({check.function!r})"
    limit_s = check.limit_s * machine.patience
    read, write = os.pipe()
    environment = {**os.environ, **dict(check.environment), RESULT_VARIABLE: str(write)}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        pass_fds=(write,),
        start_new_session=True,
    )
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        try:
            _, words = process.communicate(json.dumps(asdict(machine)).encode(), timeout=limit_s)
            return _result(process.returncode, answer.read() if process.returncode == 0 else b"", words)
        except subprocess.TimeoutExpired:
            return Result("failed", f"not done within {limit_s:g} s", limit_s, "s")
        finally:
            _end(process)


RESULT_VARIABLE = "SHARDPROOF_DOCTOR_RESULT"
"""In a check's process: the number of the pipe that its result goes to."""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a check's process and all that it has started, whatever interrupted it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stderr):  # not read to their ends: what is being killed may still have them
        if pipe is not None:
            pipe.close()


def _result(code: int, answer: bytes, words: bytes) -> Result:
    if code or not answer:
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        last = words.decode("utf-8", "replace").strip().splitlines()[-LAST_WORDS:]
        return Result("failed", ": ".join([ended, *last]))
    return result_from(json.loads(answer))


def result_from(value: Mapping[str, Any]) -> Result:
    """The inverse of `asdict`."""
    tables = tuple(
        Table(each["title"], tuple(each["columns"]), tuple(map(tuple, each["rows"]))) for each in value["tables"]
    )
    return Result(cast(Status, value["status"]), value["why"], value["value"], value["unit"], tables)


def main(function: str) -> None:
    """A check's process: the machine comes on standard input, the result goes to its pipe."""
    given = json.loads(sys.stdin.buffer.read())
    links = tuple((one, other) for one, other in given["links"])
    machine = Machine(**{**given, "gpus": tuple(given["gpus"]), "links": links})
    module, name = function.split(":")
    try:
        result = getattr(importlib.import_module(module if "." in module else f".{module}", __package__), name)(machine)
    except Exception as error:
        result = Result("failed", error_words(error))
    with os.fdopen(int(os.environ[RESULT_VARIABLE]), "wb") as pipe:
        pipe.write(json.dumps(asdict(result)).encode())


def seconds_of(call: Callable[[], object], *, least_s: float = 0.05, most: int = 1000) -> float:
    """Seconds of one call: the least of three rounds, each of about `least_s` seconds. Ranks that meet in the call must
    give the same `most` and make equally many calls; they pass `least_s=0`, which makes `most` calls a round."""
    start = time.perf_counter()
    call()
    once = time.perf_counter() - start
    times = max(1, min(most, int(least_s / max(once, 1e-9)))) if least_s else most
    rounds = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(times):
            call()
        rounds.append((time.perf_counter() - start) / times)
    return min(rounds)
