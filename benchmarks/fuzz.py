"""Tries damaged inputs of every kind of file, and of `--set`, on the command line, and groups what should
not happen by its place.

Each input runs in a process of its own, forked from one that has everything imported, with limits on time and memory.
Reported are exit code 3, exceptions that nobody caught, signals, more than 2 GB, more than 10 s, warnings of libraries,
messages that are too long, and lines that GitHub would take for a command. What fails is written to `--save DIR`, and
`--repeat FILE` runs it again.

Usage: python benchmarks/fuzz.py [--inputs 5000] [--seed 0] [--only KIND] [--save DIR] [--repeat FILE ...]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parent))

from fuzz_inputs import KINDS, RECORDED, TINY, Input, Sound, make_input, to_json, to_toml

from shardproof.core.commands.cli import exit_code, main
from shardproof.core.commands.commands import QUESTIONS, command
from shardproof.core.model.huggingface import read_config
from shardproof.core.model.huggingface_config import config_of
from shardproof.core.model.model_presets import model_preset

MOST_BYTES = 2 * 10**9
"""Resident, of one input."""

MOST_S = 10
"""Seconds of processor time that one input may take, and a third of the seconds on the clock, which
other processes delay."""

MOST_LINES, LONGEST_LINE = 120, 1000
"""Of a message. A schedule file names up to a hundred cells."""

DATA = Path(__file__).parents[1] / "tests" / "data"

LEVELS = "error|warning|notice"


@dataclass(frozen=True)
class Outcome:
    """How one input ended: the exit code (negative: the signal), what it wrote, and what it took."""

    code: int
    output: str
    error: str
    seconds: float
    num_bytes: int

    def complaints(self, given: Input) -> Iterator[str]:
        """What should not have happened, the same words for the same defect."""
        if self.seconds > MOST_S or self.code in (-signal.SIGKILL, -signal.SIGXCPU):
            yield f"more than {MOST_S} s"
        elif self.code < 0:
            yield f"signal {-self.code}"
        if self.num_bytes > MOST_BYTES:
            yield f"more than {MOST_BYTES / 1e9:g} GB"
        if self.code == 3:
            found = re.search(r"(\w+): [^\n]*, in (\S+ \([\w.]+:\d+)", self.error.partition(": ")[2])
            yield f"exit code 3: {found[1]} in {found[2]})" if found else f"exit code 3: {_plain(self.error[:200])}"
        if self.code > 3 or "Traceback (most recent call last)" in self.error:
            own = re.findall(r'File "[^"\n]*/(shardproof/[^"\n]*)", line (\d+)', self.error)
            last = _plain(self.error.strip().rpartition("\n")[2][:80])
            yield f"uncaught: {last} at {':'.join(own[-1]) if own else 'no place'}"
        if self.code == 2 and not self.error.strip():
            yield "exit code 2 without a word"
        if warned := re.search(r"^.*?([\w.]+\.py:\d+): (\w*Warning)", self.error, re.MULTILINE):
            yield f"{warned[2]} at {warned[1][-60:]}"
        lines = self.error.splitlines()
        if len(lines) > MOST_LINES or any(len(line) > LONGEST_LINE for line in lines):
            yield f"message of {len(lines)} lines, up to {max(map(len, lines))} characters: {_plain(lines[0][:60])}"
        if "github" in given.argv:
            yield from self._commands()
        if (
            re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", self.error + self.output)
            and "draw" not in given.argv
        ):
            yield f"control characters printed: {_plain(self.error[:60])}"

    def _commands(self) -> Iterator[str]:
        """Lines that the runner of GitHub Actions would take for commands of ours and are none (actions/runner,
        ActionCommand.cs: `::` after white space at the start of a line, `##[` anywhere)."""
        for line in re.split(r"[\r\n]+", self.output + "\n" + self.error):
            is_ours = re.match(rf"::({LEVELS}) [^:]*title=shardproof[^:]*::", line)
            if (line.lstrip().startswith("::") or "##[" in line) and not is_ours:
                yield f"workflow command: {_plain(line[:80])}"


def _plain(text: str) -> str:
    return re.sub(r"\d+", "N", text.encode("unicode_escape").decode())


def run_input(given: Input) -> Outcome:
    """Runs an input in a forked process, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="shardproof-fuzz-") as name:
        folder = Path(name)
        work = folder / "work"
        work.mkdir()
        given.write(work)
        started = perf_counter()
        child = os.fork()
        if not child:
            _child(given.argv, folder, work)
        code, usage = _wait(child)
        seconds = max(usage.ru_utime + usage.ru_stime, (perf_counter() - started) / 3)
        output, error = (
            (folder / each).read_bytes()[: 10**7].decode("utf-8", "surrogateescape") for each in ("output", "error")
        )
        return Outcome(code, output, error, seconds, usage.ru_maxrss * 1024)


def run_here(given: Input, folder: Path) -> Outcome:
    """The same in this process, without limits, in a folder that the caller owns."""
    given.write(folder)
    output, error = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        started = perf_counter()
        code = call(given.argv)
    return Outcome(code, output.getvalue(), error.getvalue(), (perf_counter() - started) / 3, 0)


def _child(argv: Sequence[str], folder: Path, work: Path) -> None:
    """Never returns. Memory that is asked for beyond twice the limit is refused, so that the
    machine is left in peace."""
    code = 70
    try:
        os.setsid()
        for name, number in (("output", 1), ("error", 2)):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(work)
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_S, MOST_S + 1))
        resource.setrlimit(resource.RLIMIT_AS, (_virtual_bytes() + 2 * MOST_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES // 10,) * 2)
        code = call(argv)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _wait(child: int) -> tuple[int, resource.struct_rusage]:
    handle = os.pidfd_open(child)
    try:
        if not select.select([handle], [], [], 3 * MOST_S)[0]:
            os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        return os.waitstatus_to_exitcode(status), usage
    finally:
        os.close(handle)


def call(argv: Sequence[str]) -> int:
    """The exit code of a verb, or of one of the two readers that have none."""
    try:
        if argv[0] == "validate":
            from shardproof.benchmarks.published.validation.command import main as validate

            return validate(argv[1:])
        if argv[0] == "load":
            return exit_code("load", lambda: _load(argv[1]))
        return main(argv)
    except SystemExit as ended:  # argparse has said what is wrong
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1


def _load(folder: str) -> int:
    """Everything that is checked of a folder of weights before any are copied."""
    from shardproof.backend.huggingface.load import load_weights

    load_weights(read_config(folder), folder, [])
    return 0


def make_sound() -> Sound:
    """The right files: a recorded step of the tiny plan, a ledger, published rows, and the weights of a
    small model in two files."""
    rows = (DATA / "published_sample.jsonl").read_bytes().splitlines()
    ledger = {file.name: file.read_bytes() for file in sorted((DATA / "fuzz" / "ledger").iterdir())}
    with tempfile.TemporaryDirectory(prefix="shardproof-fuzz-") as name:
        plan, recorded, calls = (str(Path(name) / each) for each in ("plan.toml", "t.timeline.json", "calls.csv"))
        for tree, argv in (
            (RECORDED, ("draw", plan, "-o", recorded)),
            (TINY, ("verify", plan, "--write-collectives", calls)),
        ):
            Path(plan).write_bytes(to_toml(tree))
            assert _quietly(argv) == 0, argv
        return Sound(Path(recorded).read_bytes(), Path(calls).read_bytes(), ledger, tuple(rows), _weights())


def _quietly(argv: Sequence[str]) -> int:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return main(argv)


def _weights() -> dict[str, bytes]:
    import dataclasses

    import torch
    from safetensors.torch import save

    from shardproof.backend.huggingface.names import sources
    from shardproof.backend.huggingface.parts import file_shapes

    small = {
        "num_layers": 1,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 4,
        "vocab_size": 16,
    }
    model = dataclasses.replace(model_preset("llama3-8b"), **small)
    config = config_of(model, "fp32")
    shapes = file_shapes(sources(model, config["model_type"]))
    names = sorted(shapes)
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    files = {file: save({name: torch.zeros(shapes[name]) for name in held}) for file, held in halves.items()}
    places = {name: file for file, held in halves.items() for name in held}
    index = {"metadata": {"total_size": sum(map(len, files.values()))}, "weight_map": places}
    return {"config.json": to_json(config), "model.safetensors.index.json": to_json(index), **files}


def preload() -> None:
    """Imports what verbs import when they run."""
    for verb in QUESTIONS:
        command(verb)
    for name in (
        "simulator.simulation.simulate",
        "simulator.search.search",
        "verify.symbolic.static",
        "viz.draw",
        "benchmarks.published.validation.command",
        "backend.cli",
    ):
        importlib.import_module(f"shardproof.{name}")


def main_fuzz() -> int:
    """Runs the inputs; exit code 1 when any of them has a complaint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=5000)
    parser.add_argument("--start", type=int, default=0, help="the first input's number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--save", type=Path, default=Path(tempfile.gettempdir()) / "shardproof-fuzz-failed")
    parser.add_argument(
        "--repeat", type=Path, nargs="+", metavar="FILE", help=("run saved inputs again, with all that they print")
    )
    args = parser.parse_args()
    preload()
    if args.repeat:
        return _repeat(args.repeat)
    sound = make_sound()
    numbered = (
        (number, make_input(args.seed, number, sound, args.only))
        for number in range(args.start, args.start + args.inputs)
    )
    return _report(args, numbered)


def _repeat(files: Sequence[Path]) -> int:
    bad = 0
    for file in files:
        given = Input.from_json(file.read_text(encoding="utf-8"))
        outcome = run_input(given)
        complaints = list(outcome.complaints(given))
        bad += bool(complaints)
        print(
            f"{file}: {given.argv}: exit code {outcome.code}, {outcome.seconds:.1f} s, "
            f"{outcome.num_bytes / 1e9:.2f} GB, {complaints}"
        )
        print(_shown(outcome.output[-2000:]) + "\n" + _shown(outcome.error[-4000:]))
    return 1 if bad else 0


def _shown(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _report(args: argparse.Namespace, numbered: Iterator[tuple[int, Input]]) -> int:
    found: dict[str, list[Path]] = {}
    codes: dict[int, int] = {}
    slowest, largest = 0.0, 0
    shutil.rmtree(args.save, ignore_errors=True)
    args.save.mkdir(parents=True)
    for number, given in numbered:
        outcome = run_input(given)
        codes[outcome.code] = codes.get(outcome.code, 0) + 1
        slowest, largest = max(slowest, outcome.seconds), max(largest, outcome.num_bytes)
        for complaint in outcome.complaints(given):
            file = args.save / f"{given.kind}-{args.seed}-{number}.json"
            file.write_text(given.to_json(), encoding="utf-8")
            if complaint not in found:
                print(_shown(f"{file}: {complaint}"), file=sys.stderr, flush=True)
            found.setdefault(complaint, []).append(file)
    for complaint, files in sorted(found.items(), key=lambda item: -len(item[1])):
        print(_shown(f"{len(files):5} x {complaint}  ({files[0].name})"))
    bad = len({file for files in found.values() for file in files})
    report = {
        "benchmark": "fuzz",
        "inputs": args.inputs,
        "seed": args.seed,
        "only": args.only,
        "bad": bad,
        "signatures": len(found),
    }
    print(
        json.dumps(
            {
                **report,
                "exit_codes": dict(sorted(codes.items())),
                "slowest_s": round(slowest, 2),
                "largest_bytes": largest,
            }
        )
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main_fuzz())
