"""How long proofs take: bit for bit of 8 and of 64 ranks, and static of 16,384. Each in a process of its own, its start
included, which finds its modules compiled, as an installed package's are: the smallest proof of its kind runs first,
with a cache of its own.

    python benchmarks/verify.py [--only 8|64|16384] [--json]

Seconds on the clock and of all processors together: the second separates the work from the load of a shared machine.
Exit code 1 when a proof fails, or takes longer than promised. Numbers are in docs/measurements.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SMALL = """
[model]
preset = "tiny-gpt"
num_layers = 4
[layout]
tp = {tp}
pp = {pp}
dp = {dp}
[batch]
global = {samples}
micro = 1
sequence = 32
[precision]
dtype = "fp32"
[numerics]
mode = "exact"
"""
LARGE = """
[model]
preset = "gpt3-175b"
[cluster]
preset = "dgx-h100"
num_devices = 16384
[layout]
tp = 8
pp = 16
dp = 128
sequence_parallel = true
zero = 1
[batch]
global = 4096
micro = 1
sequence = 2048
[precision]
dtype = "bf16"
"""


@dataclass(frozen=True)
class Case:
    """A plan of so many ranks, the options of `verify`, and the seconds that it may take."""

    num_ranks: int
    plan: str
    options: tuple[str, ...]
    most_s: float


CASES = (
    Case(8, SMALL.format(tp=2, pp=2, dp=2, samples=4), ("--dynamic",), 10.0),
    Case(64, SMALL.format(tp=4, pp=4, dp=4, samples=16), ("--dynamic",), 60.0),
    Case(16384, LARGE, (), 1.0),
)


def measure(case: Case) -> dict[str, object]:
    """One proof by the command line."""
    smallest = next(other for other in CASES if other.options == case.options)
    with tempfile.TemporaryDirectory() as folder:
        path, first = Path(folder, "plan.toml"), Path(folder, "first.toml")
        path.write_text(case.plan)
        first.write_text(smallest.plan)
        command = [sys.executable, "-m", "shardproof", "verify", "--json", *case.options]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = str(Path(folder, "compiled"))
        subprocess.run(
            [*command, str(first)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, check=True
        )
        command.append(str(path))
        before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True, check=False
        )
        elapsed_s, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads(done.stdout)
    assert report["ok"] and report.get("world_size", case.num_ranks) == case.num_ranks, report["findings"]
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"ranks": case.num_ranks, "elapsed_s": elapsed_s, "processor_s": used_s, "promised_s": case.most_s}


def main() -> int:
    """Prints a line, or one JSON object, for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, choices=[case.num_ranks for case in CASES])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    late = False
    for case in CASES:
        if args.only not in (None, case.num_ranks):
            continue
        report = measure(case)
        late |= report["elapsed_s"] > case.most_s  # type: ignore[operator]
        text = (
            "{ranks:>6} ranks: {elapsed_s:.2f} s, {processor_s:.2f} processor seconds; promised {promised_s:g} s"
        ).format(**report)
        print(json.dumps(report) if args.json else f"{text}; load {os.getloadavg()[0]:.1f}", flush=True)
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
