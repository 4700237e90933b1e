"""The `verify` verb: static rules over the schedule of a plan or a CSV file, and on request the dynamic proof."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from ..core.base.errors import MissingExtraError, PlanError
from ..core.base.files import write_text
from ..core.base.findings import Finding
from ..core.base.terminal import say, table
from ..core.commands.commands import Command
from ..core.commands.github import annotation
from ..core.commands.options import (
    add_output,
    add_plan,
    asked_reading,
    check_output,
    emit,
    option_values,
    read_any_plan,
)
from ..core.plan.plan import AnyPlan, ModularPlan, only_model
from ..core.plan.schedule_of import schedule_for
from ..core.schedule import lower
from ..core.schedule.schedule import Schedule, read_csv
from .causes.against import compare_saved
from .foreign.compare import compare_recorded
from .ledger.file import SavedLedger, is_ledger, read_ledger
from .matrix.portions import add_portions, parse_part
from .schedule.facts import Facts
from .schedule.facts_file import read_facts
from .schedule.locations import location_of
from .schedule.plan_facts import plan_calls
from .schedule.rules import RULES, Rule
from .symbolic.static import StaticProof, check_schedule, prove_static

if TYPE_CHECKING:
    from ..core.plan.plan import Plan
    from .dynamic.proof import Proof

DEFAULT_STEPS = 3
"""Optimizer steps of a dynamic proof without --steps."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    add_plan(parser, "a plan.toml, a schedule CSV, or the folder of a ledger (train --ledger)")
    parser.add_argument("--list", action="store_true", help="print the static rules and stop")
    parser.add_argument(
        "--facts", metavar="FILE", help=("TOML with more to check: buffers, layers, message formats, collectives")
    )
    parser.add_argument(
        "--write-collectives", metavar="FILE", help=("write the collectives of every rank of a plan as CSV and stop")
    )
    parser.add_argument(
        "--against", metavar="DIR", help=("the ledger of a right run, with which the ledger PLAN is compared")
    )
    dynamic = parser.add_argument_group(
        "dynamic proof", ("runs the plan's backend and one device, and compares bits; needs the train extra")
    )
    dynamic.add_argument(
        "--dynamic", action="store_true", help=("prove that the plan computes what one device computes, bit for bit")
    )
    dynamic.add_argument("--steps", type=_positive, metavar="N", help=("optimizer steps to compare (default: 3)"))
    dynamic.add_argument(
        "--transport",
        choices=("shm", "gloo", "memory", "nccl", "kernels"),
        help=(
            "ranks are processes (shm: through shared memory; gloo), or threads of one (memory), of which 64 run "
            "as they are (default: as in train; of 9 to 64 ranks memory)"
        ),
    )
    dynamic.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where it is computed: with cuda ranks are threads that share a GPU (default: cpu; cuda with nccl)",
    )
    dynamic.add_argument(
        "--inject", metavar="FAULT", help=("break the sharded run on purpose: drop-reduction:RANK:TENSOR")
    )
    mutations = parser.add_argument_group(
        "mutation score", ("breaks the backend as real bugs did, and counts what a proof sees")
    )
    mutations.add_argument(
        "--mutations", action="store_true", help=("run every mutant of the catalog; needs the train extra")
    )
    mutations.add_argument("--only", metavar="ID,ID", help="these mutants alone, such as MR01,LS05")
    add_portions(mutations, "mutants", "every subject, class, phase and scenario of the catalog")
    add_output(parser, findings=True)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when nothing is wrong, 1 with findings; bad input raises and ends with 2."""
    check_output(args.output)
    if args.list:
        emit(args, list_rules, {"rules": [_described(rule) for rule in RULES]})
        return 0
    if args.mutations or args.only is not None or args.sample or args.part is not None:
        return _score(args)
    if args.against is not None or (args.plan is not None and is_ledger(args.plan)):
        return _compare(args)
    if not args.dynamic:
        _refuse_dynamic(args)
    given = None if args.plan is not None and args.plan.lower().endswith(".csv") else read_any_plan(args)
    if isinstance(given, ModularPlan):
        for option, value in (("--facts", args.facts), ("--write-collectives", args.write_collectives)):
            if value is not None:
                only_model(given, option)
        return _run_plan(args, given, Facts())
    plan, schedule = _read(args, given)
    if args.write_collectives is not None:
        return _write_collectives(args, plan, schedule)
    facts = Facts() if args.facts is None else read_facts(args.facts, schedule, plan)
    return _report_proof(args, check_schedule(schedule, facts)) if plan is None else _run_plan(args, plan, facts)


def _refuse_dynamic(args: argparse.Namespace) -> None:
    """Raises `PlanError` for an option of the dynamic proof, which nobody asks for."""
    given = {"--inject": args.inject, "--steps": args.steps, "--transport": args.transport, "--device": args.device}
    if name := next((name for name, value in given.items() if value is not None), None):
        raise PlanError(f"{name} is an option of the dynamic proof. Add --dynamic.")


def _run_plan(args: argparse.Namespace, plan: AnyPlan, facts: Facts) -> int:
    """The proofs of a plan: the static ones, and with --dynamic that of real ranks."""
    if not args.dynamic:
        return _report_proof(args, prove_static(plan, facts))
    proof = _prove(args, plan, facts)
    _report(args, proof.text(), proof.report)
    return 0 if proof.ok else 1


def _report_proof(args: argparse.Namespace, proof: StaticProof) -> int:
    _report(args, proof.text, proof.report)
    return 0 if proof.ok else 1


def _score(args: argparse.Namespace) -> int:
    """How many faults on purpose a proof sees."""
    if not args.mutations:
        given = f"--only {args.only}" if args.only is not None else "--sample" if args.sample else f"--part {args.part}"
        raise PlanError(f"{given} chooses mutants. Add --mutations.")
    if args.plan is not None or args.dynamic or args.against is not None:
        raise PlanError("--mutations brings its own plans and runs them. Leave out PLAN, --dynamic and --against.")
    try:
        from .mutations.catalog import chosen
        from .mutations.report import report_of, text_of
        from .mutations.run import judge_mutants

        mutants = chosen(args.only, sampled=args.sample, part=parse_part(args.part))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError(
            "--mutations runs the backend, which needs torch. Run `pip install 'shardproof[train]'`."
        ) from error
    report = report_of(judge_mutants(mutants, progress=lambda line: say(line, sys.stderr)))
    _report(args, text_of(report), report)
    return 0 if report["ok"] else 1


def _compare(args: argparse.Namespace) -> int:
    """Two ledgers after the fact."""
    if args.plan is None or args.against is None:
        what = "--against" if args.plan is None else f"{args.plan}, a folder,"
        missing = "Give PLAN, the ledger to look at" if args.plan is None else "Give the other one by --against"
        raise PlanError(
            f"{what} is one ledger, and two are compared. {missing}, as in: shardproof verify run.ledger --against "
            "right.ledger"
        )
    if given := [
        flag
        for flag, value in (("--dynamic", args.dynamic), ("--facts", args.facts), ("--inject", args.inject))
        if value
    ]:
        raise PlanError(
            f"{given[0]} belongs to a plan, and --against compares two runs that are over. Leave one of them out."
        )
    run, reference = read_ledger(args.plan), read_ledger(args.against)
    if isinstance(run, SavedLedger) and isinstance(reference, SavedLedger):
        comparison = compare_saved(run, reference)
    else:
        comparison = compare_recorded(run, reference)
    _report(args, comparison.text, comparison.report)
    return 0 if comparison.ok else 1


def _report(args: argparse.Namespace, text: str, report: dict[str, Any]) -> None:
    """Prints a result, and with --format github its findings as annotations, too."""
    emit(args, text, report)
    if args.format == "github":
        for each in report["findings"]:
            finding = Finding(**each)
            print(annotation(finding, location_of(finding, args.plan, asked_reading(args))))


def list_rules(width: int | None = None) -> str:
    """The table of rules as text."""
    needs = {rule.name: "" if rule.needs is None else f" Needs [{rule.needs}]." for rule in RULES}
    return "\n".join(table([(rule.name, f"{rule.doc}{needs[rule.name]}") for rule in RULES], width, indent=0))


def _read(args: argparse.Namespace, plan: Plan | None) -> tuple[Plan | None, Schedule]:
    """The plan, if one was given, and the schedule, of the plan or else of a CSV file."""
    if plan is not None:
        return plan, schedule_for(plan)
    given = ["--dynamic"] * args.dynamic + [
        value.origin for table in option_values(args).values() for value in table.values()
    ]
    if given:
        raise PlanError(
            f"{given[0]} belongs to a whole plan, and {args.plan} is only a schedule. Give a plan and "
            f"--schedule {args.plan}."
        )
    return None, read_csv(args.plan)


def _write_collectives(args: argparse.Namespace, plan: Plan | None, schedule: Schedule) -> int:
    if plan is None:
        raise PlanError(
            f"--write-collectives needs a plan, and {args.plan} is only a schedule. Give a plan and "
            f"--schedule {args.plan}."
        )
    calls = plan_calls(plan, lower(schedule))
    write_text(args.write_collectives, calls.to_csv())
    num_calls = sum(len(calls.of_rank(rank)) for rank in range(plan.layout.world_size))
    text = f"{args.write_collectives}: {num_calls} collectives of {plan.layout.world_size} ranks."
    emit(args, text, {"file": args.write_collectives, "num_calls": num_calls, "num_ranks": plan.layout.world_size})
    return 0


def _described(rule: Rule) -> dict[str, str | None]:
    return {"name": rule.name, "severity": rule.severity, "needs": rule.needs, "doc": rule.doc, "hint": rule.hint}


def _prove(args: argparse.Namespace, plan: AnyPlan, facts: Facts) -> Proof:
    try:
        from .dynamic.proof import prove
        from .mutations import parse_fault

        fault = None if args.inject is None else parse_fault(args.inject)
        return prove(
            plan,
            transport=args.transport,
            device=args.device,
            steps=DEFAULT_STEPS if args.steps is None else args.steps,
            fault=fault,
            facts=facts,
            progress=lambda line: say(line, sys.stderr),
        )
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError(
            "--dynamic runs the backend, which needs torch. Run `pip install 'shardproof[train]'`."
        ) from error


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


VERIFY = Command("verify", "shardproof verify --model tiny-llama --tp 2 --pp 2 --dtype fp32 --dynamic", configure, run)
