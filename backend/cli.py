"""`shardproof train`: runs a plan on real ranks of this machine, or as one rank under torchrun."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys

from ..core.base.errors import FileError, MissingExtraError, PlanError, RankFailure, ScheduleError
from ..core.base.files import check_place, write_text
from ..core.base.findings import has_errors
from ..core.base.interrupts import SIGNAL_EXIT
from ..core.base.terminal import say
from ..core.base.units import format_bytes
from ..core.commands.commands import Command, service
from ..core.commands.options import add_output, add_plan, check_output, emit, read_any_plan
from ..core.plan.plan import AnyPlan, only_model
from .checkpoint.resume import Resumption
from .data.vocabulary import other_tokens
from .dry_run import dry_run_report, dry_run_text, planned_products
from .group_transports import group_transports
from .huggingface.config import check_load, check_save
from .monitoring.experimental import experimental_lines
from .monitoring.metrics import ELSEWHERE
from .monitoring.shown import Display
from .trainer import Trainer, TrainResult, usual_transport
from .unsupported import unsupported
from .watch.rank_messages import ON_GPUS

TIMELINE_SUFFIX = ".timeline.json"
SHOW_CURSOR = "\x1b[?25h"

FAILURE_REPORT = "train-failure.json"
"""Where a failure is written without --failure-report."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `train`."""
    add_plan(parser)
    parser.add_argument(
        "--transport",
        choices=("shm", "gloo", "memory", "nccl", "kernels"),
        help=(
            "shm: processes on CPUs, through memory that the ranks of a host share, and over gloo between hosts "
            "(default, unless cluster.collective_library is gloo); gloo: the same over gloo alone; nccl: one GPU per "
            "rank; kernels: the same, with our kernels where the GPUs of a group reach each other's memory; memory: "
            "all ranks as threads of one process"
        ),
    )
    parser.add_argument(
        "--live-memory",
        action="store_true",
        help=(
            "count every tensor's bytes in the last step (slower), so that the timeline and the result show the "
            "peak of every rank"
        ),
    )
    parser.add_argument(
        "--save-huggingface",
        metavar="DIR",
        help=(
            "write the trained weights as safetensors with a config.json to a new or empty folder; train.load reads "
            "such folders"
        ),
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help=(
            "go on from the newest checkpoint in checkpoint.folder, whatever layout saved it; from the start where "
            "there is none"
        ),
    )
    parser.add_argument(
        "--ledger",
        metavar="DIR",
        help=(
            "write what every rank computes, as digests, to a new or empty folder; `shardproof verify DIR --against "
            "DIR` compares two"
        ),
    )
    parser.add_argument(
        "--failure-report",
        metavar="FILE",
        default=FAILURE_REPORT,
        help="where it is written what every rank was doing, when one dies or all wait (default: %(default)s)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what every rank would run, and start nothing")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Trains, or with --dry-run prints the ranks. Exit code 0, or 128 and the number of the signal after which the run
    saved and left; errors are raised and end with 2."""
    plan = read_any_plan(args)
    problems, tokens = unsupported(plan), other_tokens(plan)
    if problems or (tokens and not args.dry_run):
        raise PlanError([*problems, *tokens])
    if args.save_huggingface is not None:
        check_save(only_model(plan, "--save-huggingface"), args.save_huggingface)
    for part in plan.parts:
        check_load(part)
    _refuse_broken(plan)
    if args.dry_run:
        for notice in tokens:
            say(f"without --dry-run this is refused: {notice}", sys.stderr)
        transport = args.transport or usual_transport(plan)
        for line in experimental_lines(plan, transport):
            say(line, sys.stderr)
        ways, products = (
            group_transports(plan, transport, os.environ),
            planned_products(plan, on_gpus=transport in ON_GPUS),
        )
        emit(args, dry_run_text(plan, ways, products), dry_run_report(plan, ways, products))
        return 0
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("train needs torch, which is not installed. Run `pip install 'shardproof[train]'`.")
    check_output(args.output, TIMELINE_SUFFIX)
    if args.failure_report != FAILURE_REPORT:
        check_place(args.failure_report)
    trainer = Trainer(
        plan,
        transport=args.transport,
        live_memory=args.live_memory,
        save_huggingface=args.save_huggingface,
        resume=args.resume,
        metrics=ELSEWHERE,
        display=_display(),
        observer=None if args.ledger is None else service("ledger_observers")(plan, args.ledger),
    )
    left = plan.train.steps - (0 if trainer.resumption is None else trainer.resumption.saved.steps)
    if left == 0 and args.output is not None and args.output.endswith(TIMELINE_SUFFIX):
        raise PlanError(
            f"no step of train.steps={plan.train.steps} is left to measure for -o {args.output}. Use more steps, or "
            "no timeline."
        )
    if args.resume and os.environ.get("RANK", "0") == "0":
        say(resumption_text(plan, trainer.resumption), sys.stderr)
    try:
        result = trainer.fit()
    except RankFailure as failure:
        if _display() == "live":  # a rank that was killed leaves the terminal without its cursor
            print(SHOW_CURSOR, end="", file=sys.stderr, flush=True)
        _write_failure(failure, args.failure_report)
        raise
    if os.environ.get("RANK", "0") == "0":
        _write(args, result)
        if result.stopped_by is not None:
            say(stopped_text(plan, result), sys.stderr)
        elif args.save_huggingface is not None:
            say(f"written: {args.save_huggingface}", sys.stderr)
    return 0 if result.stopped_by is None else SIGNAL_EXIT + signal.Signals[result.stopped_by]


def _write_failure(failure: RankFailure, path: str) -> None:
    """What all ranks were doing, to a file; a failure of which that is unknown leaves none."""
    if failure.report is None:
        return
    try:
        write_text(path, json.dumps(failure.report, indent=2) + "\n")
    except (OSError, FileError) as error:  # the failure itself is what counts
        say(f"not written: {path}: {getattr(error, 'strerror', error)}", sys.stderr)
    else:
        say(f"written: {path}", sys.stderr)


TRAIN = Command(
    "train",
    "shardproof train --model tiny-llama --tp 2 --pp 2 --dtype fp32 --set train.steps=20 -o run.timeline.json",
    configure,
    run,
)


def _display() -> Display:
    """How steps are shown on standard error: standard output is for the result alone."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stderr.isatty()
    return "lines" if plain else "live"


def resumption_text(plan: AnyPlan, resumption: Resumption | None) -> str:
    """What `--resume` found."""
    if resumption is None:
        return f"resume: no checkpoint in {plan.checkpoint.folder} yet, so training starts from the beginning"
    changes = "".join(
        (f"\nother than in the run that saved it, so bits will differ from that run's: {each}")
        for each in resumption.changes
    )
    damaged = "".join(f"resume: {each} Going on from {resumption.saved.path}.\n" for each in resumption.damaged[-1:])
    return f"{damaged}resume: {resumption.saved.path}, after {resumption.saved.steps} steps{changes}"


def stopped_text(plan: AnyPlan, result: TrainResult) -> str:
    """Why a run has left before its last step, and how it goes on."""
    saved = "nothing was trained yet" if result.checkpoint is None else f"saved in {result.checkpoint}"
    left = f"after {result.first_step + result.steps} of {plan.train.steps} steps"
    return f"shardproof train: ended by {result.stopped_by} {left}: {saved}; --resume goes on."


def result_text(result: TrainResult) -> str:
    """What training came to, for people."""
    points = zip(result.validation_steps, result.validation_losses, strict=True)
    validation = ", ".join(f"{loss:.4f} after {step}" for step, loss in points)
    resumed = f" after the first {result.first_step}" if result.first_step else ""
    return (
        f"trained {result.steps} steps{resumed} on {result.world_size} ranks at {result.tokens_per_s:,.0f} tokens/s\n"
        + (f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}\n" if result.losses else "")
        + f"validation loss {validation} steps"
        + (f"\ncheckpoint {result.checkpoint}" if result.checkpoint else "")
        + "".join(
            f"\nrank {peak.global_rank} held at most {format_bytes(peak.num_bytes)} of "
            "tensors" + f" in {peak.action}" * bool(peak.action)
            for peak in result.peak_memory
        )
    )


def _refuse_broken(plan: AnyPlan) -> None:
    """Raises `ScheduleError` for a schedule that would stop halfway: a file may hold anything."""
    findings = service("check_plan")(plan)
    if has_errors(findings):
        raise ScheduleError("\n".join(str(finding) for finding in findings))


def _write(args: argparse.Namespace, result: TrainResult) -> None:
    """The result, and with `-o FILE.timeline.json` the measured timeline instead of the report."""
    if args.output is not None and args.output.endswith(TIMELINE_SUFFIX):
        if result.timeline is not None:
            result.timeline.save(args.output)
            say(f"written: {args.output}", sys.stderr)
        args.output = None
    emit(args, result_text(result), result.report)
