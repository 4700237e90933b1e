"""Whether training grows: many steps of `shardproof train` as a user starts it, its processes watched through /proc.

    python benchmarks/endurance.py [--steps 2000] [--everything] [--growth-bytes 1048576] [--json] [-- OPTIONS OF TRAIN]

Two ranks of a small model in shared memory unless options of `train` are given. `--everything` adds what a long run
has: a batch that is ramped up, a WSD schedule, a blend of two token files with packed documents, held-out losses,
metrics, timers, and every twentieth of the run a checkpoint that is written meanwhile, of which two are kept.

At a hundred places of the run the command, the server of ranks and every rank are asked for their resident bytes, the
shared ones among them, what they map of memfds and /dev/shm, their open files and threads. The first fifth of the run
is left out: caches fill and the batch grows in it. Printed are the first, the middle and the last value, and the slope
a step by the median of all pairs of values (Theil 1950, Sen 1968), which no single value moves. Exit code 1 where a
process has more open files, threads or shared memory in the last tenth than in the first one that counts, where its
slope over all steps is more resident bytes than `--growth-bytes`, where something of this program stays in /dev/shm, or
where checkpoints or lines of metrics are not as many as `--everything` should leave. Numbers are in
docs/measurements.md.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from itertools import combinations
from pathlib import Path
from statistics import median

PLAN = ("--model", "tiny-llama", "--tp", "2", "--dtype", "fp32", "--transport", "shm")
NUM_RETAINED = 2
"""Checkpoints that stay with `--everything`."""
NUM_SAMPLES = 100
WARM_UP = NUM_SAMPLES // 5
SHARED = Path("/dev/shm")


def everything(folder: Path, steps: int) -> list[str]:
    """Options of `train` that switch on what a long run has; its data, checkpoints and metrics lie in `folder`."""
    for name, words in (("news", 5), ("books", 90)):
        documents = [" ".join(f"{name}{(i * j) % 997}" for j in range(1 + i % words)) for i in range(3000)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
        command = [sys.executable, "-m", "shardproof", "tokenize", str(folder / f"{name}.jsonl"), "--append-eod"]
        subprocess.run([*command, "--tokenizer", "bytes", "-o", str(folder / name)], check=True, capture_output=True)
    settings = {
        "model.vocab_size": 258,
        "batch.global": 8,
        "batch.rampup": [4, 2, 9 * steps // 10],  # over at 0.19 of the steps: a larger batch may hold more
        "optimizer.schedule": "wsd",
        "optimizer.warmup_steps": steps // 20,
        "optimizer.decay_steps": steps,
        "optimizer.wsd_decay_steps": steps // 5,
        "optimizer.wsd_decay": "minus_sqrt",
        "train.data": f"0.3 {folder / 'news'} 0.7 {folder / 'books'}",
        "train.packed": "true",
        "train.eval_every": steps // 20,
        "checkpoint.folder": folder / "saved",
        "checkpoint.every": steps // 20,
        "checkpoint.keep": NUM_RETAINED,
        "log.timers": 2,
    }
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def left_undone(folder: Path, steps: int) -> list[str]:
    """What `everything` should have left in its folder, and has not."""
    saved = sorted(path.name for path in (folder / "saved").iterdir() if path.name.startswith("step-"))
    lines = len((folder / "saved" / "metrics.jsonl").read_text().splitlines())
    wanted = [f"step-{number:08d}" for number in (steps - steps // 20, steps)]
    wrong = [] if saved == wanted else [f"checkpoints {saved} instead of {wanted}"]
    return wrong + ([] if lines >= steps else [f"{lines} lines of metrics of {steps} steps"])


@dataclass(frozen=True)
class Sample:
    """What a process holds at one time."""

    resident_bytes: int
    shared_resident_bytes: int
    shared_mapped_bytes: int
    open_files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Sample:
        """The sample of a process now. Raises `OSError` when it has ended."""
        process = Path("/proc") / str(pid)
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        maps = (line.split() for line in (process / "maps").read_text().splitlines())
        ends = [fields[0].split("-") for fields in maps if re.match(r"/memfd:|/dev/shm/", "".join(fields[5:6]))]
        return cls(
            resident_bytes=_kilobytes(status["VmRSS"]),
            shared_resident_bytes=_kilobytes(status["RssShmem"]),
            shared_mapped_bytes=sum(int(end, 16) - int(begin, 16) for begin, end in ends),
            open_files=sum(1 for _ in (process / "fd").iterdir()),
            threads=int(status["Threads"]),
        )


@dataclass(frozen=True)
class Course:
    """One quantity of one process over the steps that count."""

    process: str
    quantity: str
    first: int
    middle: int
    last: int
    slope_per_step: float
    grows: bool


def _kilobytes(text: str) -> int:
    return int(text.split()[0]) * 1024


def processes_of(command: int) -> dict[int, str]:
    """The command and its descendants: process id to `command`, `server` and `rank 0`, `rank 1` in the order of their
    start."""
    found = {command: "command"}
    for server in _children(command):
        ranks = _children(server)
        found |= {server: "server"} | {rank: f"rank {number}" for number, rank in enumerate(ranks)}
    return found


def _children(pid: int) -> list[int]:
    tasks = (Path("/proc") / str(pid) / "task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())


def watched(steps: int, options: Sequence[str]) -> Iterator[tuple[int, dict[str, Sample]]]:
    """Trains, and yields a step and the samples of all processes by name, a hundred times. Raises `SystemExit` with
    what the command wrote where it fails."""
    training = [sys.executable, "-m", "shardproof", "train", *options, "--set", f"train.steps={steps}"]
    lines: list[str] = []
    with subprocess.Popen(training, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as command:
        assert command.stderr is not None
        for line in command.stderr:
            lines = [*lines[-20:], line]
            found = re.match(r"step (\d+)/", line)
            if found and int(found[1]) < steps and int(found[1]) % max(1, steps // NUM_SAMPLES) == 0:
                yield (
                    int(found[1]),
                    {name: Sample.of(pid) for pid, name in processes_of(command.pid).items()},
                )
    if command.returncode:
        raise SystemExit("".join(lines))


def courses(samples: Sequence[tuple[int, dict[str, Sample]]], growth_bytes: int) -> list[Course]:
    """Every quantity of every process that is there in all samples."""
    steps = [step for step, _ in samples]
    return [
        _course(name, quantity.name, steps, [getattr(of[name], quantity.name) for _, of in samples], growth_bytes)
        for name in samples[0][1]
        for quantity in fields(Sample)
    ]


def _course(name: str, quantity: str, steps: Sequence[int], values: Sequence[int], growth_bytes: int) -> Course:
    slopes = [
        (later - earlier) / (to - at) for (at, earlier), (to, later) in combinations(zip(steps, values, strict=True), 2)
    ]
    slope, tenth = median(slopes), max(1, len(values) // 10)
    if quantity == "resident_bytes":
        grows = slope * steps[-1] > growth_bytes
    else:
        grows = min(values[-tenth:]) > max(values[:tenth])
    return Course(name, quantity, values[0], values[len(values) // 2], values[-1], slope, grows)


def main() -> int:
    """Trains, prints the courses, and says by its exit code whether one grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--everything", action="store_true")
    parser.add_argument("--growth-bytes", type=int, default=1 << 20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("options", nargs="*", help="of `shardproof train`, after `--`")
    args = parser.parse_args()
    if args.steps < 5 * NUM_SAMPLES:
        parser.error(f"--steps {args.steps}: slopes need {NUM_SAMPLES} samples. Use at least {5 * NUM_SAMPLES}.")
    before = {each.name for each in SHARED.iterdir()}
    options, undone = list(args.options or PLAN), []
    with tempfile.TemporaryDirectory(prefix="endurance-") as folder:
        if args.everything:
            options += everything(Path(folder), args.steps)
        samples = list(watched(args.steps, options))
        if args.everything:
            undone = left_undone(Path(folder), args.steps)
    found = courses(samples[WARM_UP:], args.growth_bytes)
    left = sorted(each.name for each in SHARED.iterdir() if each.name not in before and "shardproof" in each.name)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    grows = [f"{each.process}: {each.quantity}" for each in found if each.grows] + [f"{SHARED / name}" for name in left]
    grows += undone
    if args.json:
        report = {"steps": args.steps, "courses": [asdict(each) for each in found], "left": left, "grows": grows}
        print(json.dumps(report | {"processor_s": used.ru_utime + used.ru_stime}))
        return bool(grows)
    print(f"{'process':10}{'quantity':24}{'first':>14}{'middle':>14}{'last':>14}{'a step':>12}")
    for each in found:
        name, quantity, first, middle, last, slope, is_growing = astuple(each)
        print(f"{name:10}{quantity:24}{first:14,}{middle:14,}{last:14,}{slope:12.2f}{'  GROWS' if is_growing else ''}")
    print(f"{args.steps:,} steps, {used.ru_utime + used.ru_stime:.0f} processor seconds: {', '.join(grows) or 'flat'}")
    return bool(grows)


if __name__ == "__main__":
    sys.exit(main())
