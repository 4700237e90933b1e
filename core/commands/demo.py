"""`shardproof demo`: everything once on this machine, in about two minutes, and a folder of pictures to keep."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from statistics import mean
from typing import Any, TextIO

from ..base.errors import MissingExtraError, PlanError
from ..base.files import write_bytes
from ..base.terminal import say
from ..base.units import format_bytes, format_count, format_s
from ..model.parameters import count_parameters
from ..plan.plan import Plan
from ..schedule.timeline import Timeline
from .commands import Command, service

PLANS = {"big": "llama70b_512.toml", "proof": "tiny_tp2_pp2_dp2.toml", "training": "byte_lm.toml"}
"""The three plans of the demo, in `examples/`; all are ordinary plan files and are copied into the folder."""

PAGE = "step.html"

QUICK_STEPS = 20
NUM_STEPS = 5


@dataclass
class Demo:
    """One run of the demo: where it writes, where it talks, and what it found so far."""

    folder: Path
    out: TextIO
    quick: bool
    started_s: float = field(default_factory=time.perf_counter)
    report: dict[str, Any] = field(default_factory=dict)
    paragraphs: list[str] = field(default_factory=list)
    num_headings: int = 0

    def heading(self, title: str) -> None:
        """Opens the next step, on the terminal and in the report."""
        self.num_headings += 1
        self._print(f"\n{self.num_headings}/{NUM_STEPS}  {title}")
        self.paragraphs.append(f"## {title}")

    def say(self, line: str) -> None:
        """One line of a step."""
        self._print(f"     {line}")
        self.paragraphs.append(line)

    def show(self, *names: str) -> None:
        """Names files just written; pictures appear in the report."""
        self._print("     -> " + ", ".join(str(self.folder / name) for name in names))
        self.paragraphs += [f"![{name}]({name})" for name in names if name.endswith(".svg")]
        self.paragraphs.append("Files: " + ", ".join(f"[{name}]({name})" for name in names))

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table in the report; the terminal has had its rows already."""
        lines = [header, ["---"] * len(header), *rows]
        self.paragraphs.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))

    def plan(self, which: str) -> Plan:
        """One of the three plans; its file is copied into the folder."""
        text = files(__package__.partition(".")[0]).joinpath("examples", PLANS[which]).read_text()
        write_bytes(self.folder / PLANS[which], text.encode())
        return Plan.from_toml(text, PLANS[which])

    def pictures(self, timeline: Timeline, name: str, compare: Timeline | None = None) -> None:
        """Draws a timeline as SVG and PNG."""
        names = [f"{name}{suffix}" for suffix in (".svg", ".png")]
        for file in names:
            service("draw")(timeline, self.folder / file, compare=compare)
        self.show(*names)

    def _print(self, line: str) -> None:
        say(line, self.out, flush=True)


def simulate_big(demo: Demo) -> Any:
    """Step 1: how long one step of the large plan takes, and where the time goes."""
    plan = demo.plan("big")
    layout = plan.layout
    demo.heading(f"Simulate {plan.model.name} on {layout.world_size} H100: {plan.layout.degrees}, {plan.schedule.name}")
    simulation = service("simulate")(plan)
    demo.report["simulation"] = numbers = simulation.report
    demo.say(
        f"step {format_s(numbers['step_time_s'])}, {format_count(numbers['tokens_per_s'])} tokens/s, MFU "
        f"{numbers['mfu']:.1%}, "
        f"bubble {numbers['bubble_fraction']:.1%}, peak {format_bytes(numbers['peak_memory_bytes'])} "
        f"of {format_bytes(numbers['capacity_bytes'])} usable per GPU"
    )
    parts = sorted(((s, name) for name, s in numbers["time_s"].items() if s > 0), reverse=True)
    demo.say("where it goes: " + ", ".join(f"{name} {s / numbers['step_time_s']:.1%}" for s, name in parts))
    demo.show(PLANS["big"])
    return simulation


def draw_big(demo: Demo, simulation: Any) -> None:
    """Step 2: the Gantt chart of that step, and its page to zoom in."""
    demo.heading("Draw that step: every action of one tensor-parallel rank per pipeline rank, and its memory")
    demo.pictures(simulation.timeline, "llama70b_512")
    service("draw_step")(simulation, demo.folder / PAGE)
    demo.say("the same as a page, in any browser: it zooms to one action and says why a rank waits")
    demo.show(PAGE)


def prove_tiny(demo: Demo) -> bool:
    """Step 3: three axes at once against one device, bit for bit."""
    plan = demo.plan("proof")
    steps = 1 if demo.quick else plan.train.steps
    demo.heading(
        f"Prove {plan.layout.degrees} right: {plan.layout.world_size} processes against one device, bit for bit"
    )
    proof = service("prove")(plan, steps=steps)
    demo.report["proof"] = proof.report
    report = proof.report
    steps_said = f"{steps} step{'s' if steps > 1 else ''}"
    demo.say(f"{report['bits_different']} different bits in {report['tensors_compared']} tensors after {steps_said}")
    demo.say(
        "activations, gradients, gradient norm, optimizer state, weights; loss "
        + " ".join(f"{loss:.6f}" for loss in report["losses"])
    )
    for finding in proof.findings:
        demo.say(str(finding))
    demo.show(PLANS["proof"])
    return proof.ok


def train_bytes(demo: Demo) -> tuple[Plan, Timeline, bool]:
    """Step 4: a small language model learns real text; True when the losses on seen and on held-out text fell."""
    plan = demo.plan("training")
    if demo.quick:
        plan = replace(plan, train=replace(plan.train, steps=QUICK_STEPS))
    steps = plan.train.steps
    tokens = plan.batch.global_size * plan.batch.sequence * steps
    size, ranks = format_count(count_parameters(plan.model)), plan.layout.world_size
    demo.heading(f"Train a byte-level language model of {size} parameters: {ranks} processes, {plan.layout.degrees}")
    demo.say(
        f"{format_count(tokens)} bytes of the Python standard library's own text, {steps} steps of {plan.schedule.name}"
    )
    on_step = functools.partial(print_step, steps, demo.out is sys.stderr)
    result = service("trainer")(plan, on_step=on_step).fit()
    demo.report["training"] = result.report
    first, last = mean(result.losses[:3]), mean(result.losses[-10:])
    validation = dict(zip(result.validation_steps, result.validation_losses, strict=True))
    recent = [mean(result.losses[max(0, step - 10) : step] or result.losses[:1]) for step in validation]
    rows = [
        (str(step), f"{loss:.3f}", f"{held:.3f}") for (step, held), loss in zip(validation.items(), recent, strict=True)
    ]
    demo.table(("after steps", "loss, mean of the last 10", "validation loss"), rows)
    demo.say(
        f"loss {first:.2f} -> {last:.2f} nats per byte, on text it never saw {validation[0]:.2f} -> "
        f"{validation[steps]:.2f}; "
        f"{format_count(result.tokens_per_s)} bytes/s"
    )
    demo.show(PLANS["training"])
    return plan, result.timeline, last < first and validation[steps] < validation[0]


def print_step(num_steps: int, to_stderr: bool, result: Any) -> None:
    """A progress line, from the process of rank 0: the first step, eight on the way, and each that
    has a validation loss."""
    number = result.step + 1
    if number == 1 or number % max(1, num_steps // 8) == 0 or result.validation_loss is not None:
        validation = "" if result.validation_loss is None else f"   validation {result.validation_loss:.3f}"
        say(
            f"     step {number:>4}   loss {result.loss:.3f}{validation}",
            sys.stderr if to_stderr else sys.stdout,
            flush=True,
        )


def compare_runs(demo: Demo, plan: Plan, measured: Timeline) -> bool:
    """Step 5: what the simulator said about that training step, above what happened; True when both ran the
    same actions in order."""
    demo.heading("Compare: one step of that run, predicted above measured")
    predicted = service("simulate")(plan).timeline
    shown = set(predicted.global_ranks)
    measured = Timeline.from_spans(
        [span for span in measured.spans if span.global_rank in shown],
        "measured",
        [sample for sample in measured.memory if sample.global_rank in shown],
        measured.title,
    )
    num_actions = [len(predicted.select(rank)) for rank in sorted(shown)]
    same = all(
        [s.action for s in predicted.select(rank)] == [s.action for s in measured.select(rank)] for rank in shown
    )
    demo.report["comparison"] = {
        "predicted_s": predicted.makespan_s,
        "measured_s": measured.makespan_s,
        "same_order": same,
    }
    demo.say(
        f"predicted {format_s(predicted.makespan_s)} from this host's nominal rates, measured "
        f"{format_s(measured.makespan_s)}"
    )
    if same:
        demo.say(
            f"the same {sum(num_actions)} compute actions in the same order on ranks "
            f"{', '.join(map(str, sorted(shown)))}"
        )
    else:
        demo.say("DIFFERENT: the two runs did not execute the same actions in the same order")
    demo.pictures(predicted, "predicted_and_measured", measured)
    return same


def run_demo(folder: Path, out: TextIO, *, quick: bool = False) -> tuple[dict[str, Any], bool]:
    """Runs the five steps and writes `report.md` and `report.json` last. Returns the report, and whether
    all of it came out right."""
    if folder.exists() and not folder.is_dir():
        raise PlanError(f"-o {folder}: this is a file. Give a folder, which may be new.")
    folder.mkdir(parents=True, exist_ok=True)
    demo = Demo(folder, out, quick)
    say("shardproof: plan it, prove it, run it.", out)
    draw_big(demo, simulate_big(demo))
    proved = prove_tiny(demo)
    plan, measured, learned = train_bytes(demo)
    same_order = compare_runs(demo, plan, measured)
    demo.report = {
        "ok": proved and learned and same_order,
        **demo.report,
        "elapsed_s": time.perf_counter() - demo.started_s,
    }
    text = "# shardproof demo\n\n" + "\n\n".join(demo.paragraphs) + "\n"
    write_bytes(folder / "report.md", text.encode())
    write_bytes(folder / "report.json", (json.dumps(demo.report, indent=2) + "\n").encode())
    verdict = "All of it came out right" if demo.report["ok"] else "NOT all of it came out right"
    say(f"\n{verdict}, in {format_s(round(demo.report['elapsed_s']))}. Report: {folder / 'report.md'}", out)
    return demo.report, bool(demo.report["ok"])


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        default="shardproof-demo",
        metavar="FOLDER",
        help="where pictures and report go",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=(f"one proved step and {QUICK_STEPS} training steps: under a minute, for CI"),
    )
    parser.add_argument(
        "--json", action="store_true", help=("print the report as one JSON object; the story goes to standard error")
    )


def _run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("torch") is None:  # reported now rather than after the first half
        raise MissingExtraError(
            "demo proves and trains, which needs torch, and that is not installed. Run `pip install "
            "'shardproof[train]'`. "
            "Without it there are simulate, plan, fit, draw and verify without --dynamic."
        )
    report, ok = run_demo(Path(args.output), sys.stderr if args.json else sys.stdout, quick=args.quick)
    if args.json:
        print(json.dumps(report))
    return 0 if ok else 1


DEMO = Command("demo", "shardproof demo -o my-demo", _configure, _run)
