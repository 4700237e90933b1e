"""The verb `plan`: the options of a search, its progress, and its report as a table or as JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..core.base.bounds import shown
from ..core.base.errors import PlanError
from ..core.base.files import write_text
from ..core.base.terminal import ranking, say, table
from ..core.base.units import SIZE_RULE, format_bytes, format_count, format_s, size_of
from ..core.commands.commands import Command, service
from ..core.commands.options import (
    SearchSpace,
    add_output,
    add_plan,
    assign,
    check_output,
    emit,
    option_values,
    read_search_space,
    whole_number,
)
from ..core.plan.plan import Plan
from ..core.plan.rules import RULES
from .search.freed import SHORT, STAGES, free_values, word
from .search.parts import merged, part_of
from .search.progress import watching
from .search.question import OBJECTIVES, Question
from .search.search import REASONS, search
from .search.simplicity import complexity
from .search.why import reasons
from .titles import of_last_batch

SHORT_KEYS = {"micro": "batch.micro", "recompute": "recompute.mode", "schedule": "schedule.name", **SHORT}
"""What --fix takes besides whole keys and those of [layout]."""

PICTURES = (".svg", ".png")
"""Suffixes of -o that ask for the layouts by time and memory on paper."""

FIRST_CHOICE = 3
"""Columns of the table before the choices: place, step and MFU."""

TOKEN_SCALES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
"""Suffixes of --batch-tokens: sequences are powers of two, so batches are."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options that describe a plan, those of the search, and those of the output."""
    add_plan(parser)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a value that is not searched: tp=8 (repeatable)",
    )
    group.add_argument(
        "--free",
        action="append",
        default=[],
        metavar="KEY[=VALUES]",
        help=f"what is searched besides: {', '.join(SHORT)}, or overlap for all of these; dtype=bf16,fp8 says which "
        "values (repeatable)",
    )
    group.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="time",
        help="what is to be least (default: time); money and energy need cluster.device_price_per_hour or device_watts",
    )
    group.add_argument(
        "--pareto", action="store_true", help="the layouts that none beats in time, memory and simplicity together"
    )
    group.add_argument("--max-memory", metavar="BYTES", help="most that the worst rank may hold, such as 72GiB")
    group.add_argument(
        "--batch-tokens", metavar="N", help="tokens of the global batch, such as 4M (K and M are powers of 1,024)"
    )
    group.add_argument("--top", type=whole_number, default=10, metavar="N", help="rows of the answer (default: 10)")
    group.add_argument(
        "--part", metavar="I/N", help="decide only a part of the space; --json prints what --merge puts together"
    )
    group.add_argument("--merge", nargs="+", metavar="FILE", help="put the JSON reports of all parts together")
    add_output(parser)


def run_plan(args: argparse.Namespace) -> int:
    """Ranks layouts; `-o plan.toml` writes the best, `-o front.svg` draws all. Exit code 1 when none fits, and then
    nothing is written."""
    if args.top < 1:
        raise PlanError(f"--top {args.top}: ask for at least one row.")
    check_output(args.output, ".toml", *PICTURES)
    if args.merge:
        report, plans = merged(args.merge)
        title = _title(plans[0]) if plans else "no layout fits"
    else:
        report, plans, title = _searched(args)
    report = {**report, "picture": {"title": title, "mechanisms": [complexity(plan)[0] for plan in plans]}}
    if args.output is not None and args.output.endswith(".toml"):
        target, args.output = args.output, None
        if plans:
            write_text(target, plans[0].to_toml())
        else:
            say(f"shardproof plan: no layout fits, so {target} is not written.", sys.stderr)
    elif args.output is not None and args.output.endswith(PICTURES):
        target, args.output = args.output, None
        service("draw_front")(report, target)
        say(f"written: {target}", sys.stderr)
    emit(args, partial(plan_text, title, report), report)
    return 0 if plans else 1


def _searched(args: argparse.Namespace) -> tuple[dict[str, Any], list[Plan], str]:
    """The report of a search, its plans, and a title."""
    for each in args.fix:
        key, equals, value = each.partition("=")
        key = key.strip()
        dotted = key if "." in key else SHORT_KEYS.get(key, f"layout.{key}")
        if not equals or not key:
            raise PlanError(f"--fix {shown(each)}: write KEY=VALUE, such as --fix tp=8.")
        assign(args, dotted, value, f"--fix {key}")
    if args.batch_tokens is not None:
        assign(args, "batch.global", str(_sequences(args)), "--batch-tokens")
    space = read_search_space(args)
    fixed = {f"{section}.{key}" for section, keys in option_values(args).items() for key in keys}
    space = replace(space, free=free_values(args.free, space, fixed))
    part = (1, 1) if args.part is None else part_of(args.part)
    if args.part is not None and (args.pareto or args.objective == "memory"):
        raise PlanError("--part ranks by the step's time, as --merge does. Leave out --pareto and --objective memory.")
    limit = _limit(args.max_memory)
    with watching(sys.stderr) as watch:
        question = Question(args.objective, args.pareto, args.top, limit, part, watch)
        result = search(space, question)
    report = dict(result.report)
    if space.assumed:
        report["assumed"] = dict(space.assumed)
    if args.part is not None:
        rows = zip(report["candidates"], result.plans, strict=True)
        report["candidates"] = [{**row, "plan": plan.to_toml()} for row, plan in rows]
        given = {
            f"{section}.{key}": str(each.value)
            for section, keys in option_values(args).items()
            for key, each in keys.items()
        }
        report |= {
            "part": list(part),
            "top": args.top,
            "options": {"plan": args.plan, "max-memory": args.max_memory, "free": sorted(args.free), **given},
        }
    elif not args.pareto:
        report["why"] = [each._asdict() for each in reasons(result.plans, limit) if each.peak_memory_bytes]
    return report, list(result.plans), _title(space)


def _title(of: SearchSpace | Plan) -> str:
    batch = of.batch
    return (
        f"{of.model.name} on {of.cluster.num_devices} devices of {of.cluster.name}, {batch.global_size} x "
        f"{batch.sequence} tokens{of_last_batch(batch)}"
    )


def _limit(text: str | None) -> int | None:
    """Bytes that --max-memory says."""
    if text is None:
        return None
    found = None if text.endswith("%") else size_of(text, 0)
    if not found:
        raise PlanError(f"--max-memory {text[:40]}: {SIZE_RULE}")
    return found


def _sequences(args: argparse.Namespace) -> int:
    """The global batch that --batch-tokens says, in sequences."""
    text = args.batch_tokens
    scale = TOKEN_SCALES.get(text[-1:].upper() if not text[-1:].isdecimal() else "")
    number = text if text[-1:].isdecimal() else text[:-1]
    if scale is None or not number.isdecimal() or len(number) > 15:
        raise PlanError(f"--batch-tokens {text[:40]}: write a whole number, such as 4194304 or 4M.")
    if args.global_batch is not None:
        raise PlanError("--batch-tokens and --global-batch both say how large the batch is. Leave out one of them.")
    if args.sequence is None or args.sequence < 1:
        raise PlanError("--batch-tokens needs --sequence, the tokens of each of its sequences.")
    tokens = int(number) * scale
    if tokens % args.sequence:
        raise PlanError(
            f"--batch-tokens {text} is {tokens} tokens, which are not whole sequences of {args.sequence}. "
            f"Use {tokens // args.sequence * args.sequence or args.sequence}."
        )
    return tokens // args.sequence


def plan_text(title: str, report: Mapping[str, Any], width: int | None = None) -> str:
    """The report of `plan` for people: the ranked table, why the best is the best, then why the others lost."""
    header, rows = _rows(report["candidates"])
    lines = [title, *_assumptions(report), ""]
    lines += ranking(header, _collapsed(header, rows), width) if rows else ["no layout fits"]
    lines += [*_uneven([candidate["layout"] for candidate in report["candidates"]]), *_why(report, width), ""]
    counts = (
        f"{report['evaluated']} layouts decided, {report['simulated']} simulated, in {format_s(report['elapsed_s'])}"
    )
    lines.append(f"{counts}. The others lost because:")
    docs = {**{rule.name: f"not so: {rule.doc}" for rule in RULES}, **REASONS}
    most_first = sorted(report["rejected"].items(), key=lambda item: (-item[1], item[0]))
    lost = [(str(count), reason, docs.get(reason, "")) for reason, count in most_first]
    return "\n".join([*lines, *table(lost, width)])


def _assumptions(report: Mapping[str, Any]) -> list[str]:
    """What nobody said, and how to say otherwise, and what was searched on demand."""
    assumed = report.get("assumed", {})
    return [
        *(f"not said, so {key}={value}: --set {key}=... for others" for key, value in assumed.items()),
        *(_freed(key, values) for key, values in report.get("free", {}).items()),
    ]


def _freed(key: str, values: Sequence[Any]) -> str:
    """What was searched on demand."""
    tried = "the usual cut, and that by min-max" if key == STAGES else ", ".join(map(word, values))
    return f"searched too: {key} ({tried}{'; not the same bits' if key == 'precision.dtype' else ''})"


def _rows(candidates: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and cells of the table; the first three and the last are no choices."""
    layouts = [candidate["layout"] for candidate in candidates]
    names = ["tp", "pp", "vpp", "dp", *(name for name in ("cp", "ep") if any(layout[name] > 1 for layout in layouts))]
    names += ["etp"] if any(layout["etp"] != layout["tp"] for layout in layouts) else []
    costs = [name for name in ("step_price", "step_energy_j") if candidates and name in candidates[0]]
    titles = {"step_price": "price", "step_energy_j": "energy"}
    free = [candidate.get("free", {}) for candidate in candidates]
    freed = [key for key in (free[0] if free else ()) if any(each.get(key) is not None for each in free)]
    freed_names = [key.partition(".")[2] for key in freed]
    header = ("", "step", "MFU", *names, "sp", "zero", "micro", "recompute", "schedule", *freed_names)
    rows = []
    for place, candidate in enumerate(candidates, start=1):
        layout = candidate["layout"]
        choices = (
            "yes" if layout["sequence_parallel"] else "no",
            str(layout["zero"]),
            str(candidate["batch"]["micro"]),
            candidate["recompute"],
            candidate["schedule"],
            *(word(candidate["free"].get(key)) for key in freed),
        )
        cells = (str(place), format_s(candidate["step_time_s"]), f"{candidate['mfu']:.1%}")
        paid = [
            f"{candidate[name]:.4g}" if name == "step_price" else f"{format_count(candidate[name])}J" for name in costs
        ]
        degrees = (str(layout[name]) for name in names)
        rows.append((*cells, *degrees, *choices, *paid, format_bytes(candidate["peak_memory_bytes"])))
    return (*header, *(titles[name] for name in costs), "peak"), rows


def _collapsed(header: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows with the same step and peak that differ in one choice only are one, with the values of that choice."""
    found: list[list[str]] = []
    merged_at: list[int | None] = []
    for row in rows:
        for i, known in enumerate(found):
            if (known[1], known[-1]) != (row[1], row[-1]):
                continue
            differ = [at for at in range(FIRST_CHOICE, len(row) - 1) if row[at] not in known[at].split(", ")]
            if len(differ) == 1 and merged_at[i] in (None, differ[0]):
                known[differ[0]] += f", {row[differ[0]]}"
                merged_at[i] = differ[0]
                break
        else:
            found.append(list(row))
            merged_at.append(None)
    return [tuple(row) for row in found]


def _why(report: Mapping[str, Any], width: int | None) -> list[str]:
    """Why the first row is the best: what differs from it in one choice, or comes next."""
    rows = [
        (each["change"], format_s(each["step_time_s"]), format_bytes(each["peak_memory_bytes"]), each["text"])
        for each in report.get("why", ())
    ]
    return ["", "against the first, what else would be:", *table(rows, width)] if rows else []


def _uneven(layouts: Sequence[Mapping[str, Any]]) -> list[str]:
    """How the stages of the first layout are cut where pp*vpp does not divide the layers."""
    if not layouts or layouts[0]["stages"] is None:
        return []
    return ["", f"stages of the first: {layouts[0]['stages']} (E embedding, t layer, L head)"]


PLAN = Command(
    "plan",
    "shardproof plan --model llama3-70b --cluster dgx-h100 --devices 512 --global-batch 1024 --sequence 8192 -o "
    "plan.toml",
    configure,
    run_plan,
)
