"""Runs the matrix: layouts in which every pair of features meets, each through all floors of `prove`: refused by no
rule, the mathematics of one device on symbols, and 0 different bits against one device that follows its formulas.

`python -m shardproof.verify.matrix` runs all of it; `--only tp=3` what has that feature, `--sample` the few in which
every pair of kinds of features meets (`kinds`), `--part 1/3` the first of three parts. Layouts whose problem and sizes
are the same share one reference, which is run once. Exit code 1 when a bit differs or a rank fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ...core.base.errors import InternalError, PlanError, RankFailure, ShardproofError, did_you_mean
from ...core.base.findings import Finding
from ...core.base.terminal import say
from ...core.commands.cli import exit_code, run_program
from ...core.commands.options import add_output, check_output, emit
from ...core.plan.plan import AnyPlan, Plan
from ..dynamic.proof import prove
from ..run.proof_run import ON_GPUS, TransportName
from ..run.references import References
from .covering import Covering, Feature, Row
from .kinds import sample
from .layouts import MAX_RANKS, expected_cost, features, keys_of, matrix, plan_of, reference_of, refusals
from .portions import WHOLE, Part, add_portions, parse_part, part_of

STEPS = 3


@dataclass(frozen=True)
class Outcome:
    """What one layout showed. `clipped` says that every step was; `elapsed_s` counts the reference where
    this layout is its first."""

    row: Row
    world_size: int
    tensors_compared: int
    tensors_different: int
    clipped: bool
    findings: tuple[Finding, ...]
    elapsed_s: float

    @property
    def ok(self) -> bool:
        """True when no bit differs and every step was clipped."""
        return not self.findings and not self.tensors_different and self.clipped

    @property
    def line(self) -> str:
        """One line for people."""
        bits = (
            f"{self.tensors_different} of {self.tensors_compared} tensors DIFFER"
            if self.tensors_different
            else "0 different bits"
        )
        verdict = "ok    " if self.ok else "FAILED"
        words = (
            f"{verdict} {label(self.row):<78} {self.world_size:>2} ranks  {self.tensors_compared:>6} tensors  {bits}"
        )
        if not self.clipped and not self.findings:
            words += "  (a step was not clipped)"
        return "\n".join([f"{words}  {self.elapsed_s:.1f} s", *(f"    {finding}" for finding in self.findings)])

    @property
    def report(self) -> dict[str, object]:
        """The JSON form."""
        return {
            **self.row,
            "ok": self.ok,
            "world_size": self.world_size,
            "tensors_compared": self.tensors_compared,
            "tensors_different": self.tensors_different,
            "findings": [finding.to_dict() for finding in self.findings],
        }


def label(row: Row) -> str:
    """A row in a few words: what differs from one device.

    >>> label({"problem": "gpt", "pipeline": "ZBH2 2x1", "tp": 3, "sequence": "cut", "micro": 1, "overlap": "tp"})
    'gpt, ZBH2 2x1, tp3, sp, micro1, overlap'
    """
    if "modules" in row:  # of `matrix_modules`
        return f"modules {row['modules']}"
    words = [f"{row['problem']}, {row['pipeline']}"]
    words += [f"{name}{row[name]}" for name in ("tp", "dp", "cp", "ep", "etp") if row.get(name, 1) not in (1, "tp")]
    words += ["sp"] if row["sequence"] == "cut" else []
    words += [f"micro{row['micro']}"]
    words += ["uneven"] if row.get("split") == "uneven" and row["dp"] != 1 else []
    words += [f"recompute {row['recompute']}"] if row.get("recompute", "none") != "none" else []
    words += [f"offload {row['offload']}"] if row.get("offload", "nothing") != "nothing" else []
    words += ["overlap"] if row["overlap"] == "tp" else []
    words += [f"messages {row['messages']}"] if row.get("messages", "overlapped") != "overlapped" else []
    words += [f"zero{row['zero']}"] if row.get("zero", 0) != 0 else []
    words += ["hybrid"] if row.get("shard") == "some" and row["dp"] != 1 and row.get("zero", 0) != 0 else []
    words += (
        [f"buckets {row['buckets']}"]
        if row.get("buckets", "one") != "one" and row["dp"] != 1 and row["cp"] == 1
        else []
    )
    words += [keys_of(row)] if keys_of(row) != "all_gather" and row["cp"] != 1 else []
    words += ["groups given"] if row.get("groups") == "given" else []
    return ", ".join([*words, *(["pp fastest"] if str(row.get("order")).startswith("pp") else [])])


def run_row(row: Row, references: References, *, steps: int = STEPS, transport: TransportName = "memory") -> Outcome:
    """One layout through every floor. A rank that fails is a finding, too. Groups are given between processes: where
    ranks would be threads they share memory instead. Over NCCL they are not given."""
    plan = plan_of(row)
    assert isinstance(plan, Plan), f"{label(row)} is not run: {plan}"
    if row.get("groups") != "given" or transport in ON_GPUS:
        return prove_plan(plan, row, references, steps=steps, transport=transport)
    between = "shm" if transport == "memory" else transport
    return prove_plan(plan, row, references, steps=steps, transport=between, brings_groups=True)


def prove_plan(
    plan: AnyPlan,
    row: Row,
    references: References,
    *,
    steps: int = STEPS,
    transport: TransportName = "memory",
    brings_groups: bool = False,
) -> Outcome:
    """The same for any plan that the backend runs; `row` only names it."""
    outcome = Outcome(row, plan.world_size, 0, 0, True, (), 0.0)
    start_s = time.perf_counter()
    try:
        proof = prove(
            plan,
            transport=transport,
            steps=steps,
            references=references,
            most_ranks=MAX_RANKS,
            brings_groups=brings_groups,
        )
    except InternalError:
        raise  # no verdict on the layout: the matrix ends with it
    except ShardproofError as error:
        notes = "\n".join([str(error), *getattr(error, "__notes__", ())])
        rank = error.global_rank if isinstance(error, RankFailure) else None
        return replace(outcome, findings=(Finding("run-failed", "error", label(row), notes, rank=rank),))
    assert not proof.changes, f"{label(row)} is not run as it is: {proof.changes}"
    outcome = replace(outcome, findings=proof.findings, elapsed_s=time.perf_counter() - start_s)
    if not proof.static.ok:
        return outcome
    return replace(
        outcome,
        tensors_compared=proof.report["tensors_compared"],
        tensors_different=proof.report["tensors_different"],
        clipped=all(norm > plan.optimizer.clip_grad_norm for norm in proof.report["grad_norms"]),
    )


def run_rows(
    rows: Sequence[Row], *, steps: int, transport: TransportName, jobs: int, show: Callable[[Outcome], None]
) -> list[Outcome]:
    """Every row's outcome, `jobs` of them at a time, shown in the order of the rows."""
    references = References(most=len(rows))
    outcomes = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run_row, row, references, steps=steps, transport=transport) for row in rows]
        try:
            for future in futures:
                outcomes.append(future.result())
                show(outcomes[-1])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return outcomes


# Choosing rows


def chosen_rows(
    rows: Sequence[Row], only: Iterable[str] = (), *, sampled: bool = False, part: Part = WHOLE
) -> list[Row]:
    """The rows that have every feature of `only` (`tp=3`, `schedule=DualPipe`), of them the sample of kinds where one
    is asked for, and of that a part. Rows with one reference are in one part.

    Raises `PlanError` for a feature that no row has.
    """
    wanted = [_feature(rows, text) for text in only]
    found = [row for row in rows if all(feature in _named_features(row) for feature in wanted)]
    return part_of(sample(found) if sampled else found, part, expected_cost, reference_of)


def _named_features(row: Row) -> set[tuple[str, str]]:
    named = (*features(row), ("problem", row["problem"]), ("pipeline", row["pipeline"]))
    return {(name, str(value)) for name, value in named}


def _feature(rows: Sequence[Row], text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    known: dict[str, set[str]] = {}
    for row in rows:
        for key, found in _named_features(row):
            known.setdefault(key, set()).add(found)
    if name not in known:
        raise PlanError(
            f"--only {text}: {name!r} is no axis of the matrix{did_you_mean(name, known)} Axes: "
            f"{', '.join(sorted(known))}."
        )
    if value not in known[name]:
        raise PlanError(
            f"--only {text}: no layout has that{did_you_mean(value, known[name])} Use one of "
            f"{', '.join(sorted(known[name]))}."
        )
    return name, value


# Words


def coverage_text(rows: Sequence[Row], covering: Covering) -> str:
    """How many layouts have each value, and how many pairs of values meet."""
    counts = Counter(feature for row in rows for feature in features(row))
    names = dict.fromkeys(name for name, _ in counts)
    lines = ["Layouts with each value:"]
    for name in names:
        values = ", ".join(
            f"{value} {counts[name, value]}" for value in _sorted(value for other, value in counts if other == name)
        )
        lines.append(f"  {name:<10} {values}")
    lines.append(
        f"All {len(covering.covered):,} pairs of values that can be combined meet in {len(covering.rows)} layouts."
    )
    return "\n".join(lines)


def _sorted(values: Iterable[str | int]) -> list[str | int]:
    return sorted(values, key=lambda value: (isinstance(value, str), value))


def refusals_text(covering: Covering) -> str:
    """The refusals, those with the same sentences together, and how many pairs are only too large to try."""
    grouped: dict[tuple[str, ...], list[str]] = {}
    for given, refusal in refusals():
        grouped.setdefault(refusal.problems, []).append(_words(given))
    too_large = len(covering.impossible) + len(covering.left) - len(refusals())
    lines = [
        (f"Refused: {len(refusals())} values or pairs of values. {too_large} pairs need more than {MAX_RANKS} ranks.")
    ]
    for problems, whats in grouped.items():
        lines.append(f"  {'; '.join(whats[:4])}{f'; {len(whats) - 4} more' if len(whats) > 4 else ''}")
        lines += [f"    {problem}" for problem in problems]
    return "\n".join(lines)


def _words(features: Iterable[Feature]) -> str:
    """`tp=3 with cp=2`, `ep=2`."""
    return " with ".join(f"{name}={value}" for name, value in features)


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the options choose. 0 when every layout has the bits of one device, 1 when one differs, else as
    the command line ends."""
    args = _parser().parse_args(arguments)

    def run() -> int:
        check_output(args.output)
        return _run(args)

    answer = run_program if arguments is None else exit_code
    return answer("python -m shardproof.verify.matrix", run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shardproof.verify.matrix", description=("Layouts against one device, bit for bit.")
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="AXIS=VALUE",
        help=("layouts that have this, as tp=3 (repeatable)"),
    )
    add_portions(parser, "layouts", "every pair of kinds of features")
    parser.add_argument(
        "--list", action="store_true", help=("print the layouts, their coverage and what is refused, and run nothing")
    )
    parser.add_argument(
        "--transport",
        choices=("gloo", "shm", "memory", "nccl", "kernels"),
        default="memory",
        help="how ranks talk (default: memory)",
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N", help=(f"optimizer steps to compare (default: {STEPS})")
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help=("layouts at a time (default: the cores)")
    )
    add_output(parser)
    return parser


def _run(args: argparse.Namespace) -> int:
    part = parse_part(args.part)
    covering = matrix()
    rows = chosen_rows(covering.rows, args.only, sampled=args.sample, part=part)
    words = [coverage_text(rows, covering), refusals_text(covering)]
    report: dict[str, Any] = {
        "num_layouts": len(rows),
        "num_pairs": len(covering.covered),
        "refused": [{"what": _words(given), "problems": list(refusal.problems)} for given, refusal in refusals()],
    }
    if args.list:
        emit(args, "\n".join([*map(label, rows), *words]), {**report, "layouts": [dict(row) for row in rows]})
        return 0
    start_s = time.perf_counter()
    stream = sys.stderr if args.json else sys.stdout

    def show(outcome: Outcome) -> None:
        say(outcome.line, stream, flush=True)

    outcomes = run_rows(rows, steps=args.steps, transport=args.transport, jobs=max(1, args.jobs), show=show)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    seconds = f"{time.perf_counter() - start_s:.0f} s"
    words.append(
        f"{len(outcomes) - len(failed)} of {len(outcomes)} layouts at 0 different bits, {args.steps} steps, {seconds}."
    )
    report |= {"ok": not failed, "steps": args.steps, "transport": args.transport}
    emit(args, "\n".join(words), {**report, "layouts": [outcome.report for outcome in outcomes]})
    return 0 if report["ok"] else 1
