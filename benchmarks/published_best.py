"""The layouts that publications run, and the best that a search finds for the same model, machine and batch.

Usage: python benchmarks/published_best.py [--write docs/published_best.md] [ID ...]

Every row is a published run whose authors chose its layout. Everything but the layout, the microbatch, recomputation
and the schedule is as they had it, and both are predicted by one model, so a ratio says nothing about the model's
error. `all` is the ratio of the published step to that of the best layout, `restricted` to that of the best one with
the ZeRO stage, the recomputation and the sequence parallelism that were published, as the software of the time may
have had no other. Where `restricted` is above 1.03, or the published layout does not fit as modelled, the last column
says what it has otherwise than that best one, and what that costs or holds. DeepSeek's own run is not among the rows:
of its paper at ISCA 2025 (`deepseek_isca25`) the published runs have the latencies of messages of 64 bytes, no layout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from time import process_time
from typing import Any, NamedTuple

from shardproof.benchmarks.published.plans import plan_of
from shardproof.benchmarks.published.row import read_rows
from shardproof.core.base.files import write_text
from shardproof.core.base.units import format_s
from shardproof.core.commands.options import SHARED_WITH_PLANS, SearchSpace
from shardproof.core.plan.plan import Plan
from shardproof.simulator.search.fit import fit
from shardproof.simulator.search.question import Question
from shardproof.simulator.search.search import search
from shardproof.simulator.search.why import reasons
from shardproof.simulator.simulation.simulate import simulate

ROWS = (
    *("sc21_narayanan_0004", "sc21_narayanan_0006", "sc21_narayanan_0017"),
    *("korthikanti_2022_0006", "korthikanti_2022_0010", "mt_nlg_530b_2201_11990_0001", "megascale_nsdi24_0004"),
    *("llama_3_herd_0001", "llama_3_herd_0002", "mlperf_training_v4_1_0001", "mlperf_training_v5_0_0008"),
    *("dgxc_benchmarking_0011", "dgxc_benchmarking_0163", "dgxc_benchmarking_0160"),
    *("moe_parallel_folding_2504_14_0025", "moe_parallel_folding_2504_14_0042", "megatron_bridge_perf_summary_0041"),
    *("torchtitan_benchmarks_0002", "torchtitan_benchmarks_0012", "ibm_pytorch_fsdp_blog_0007"),
)
"""Runs of each source, model and size of which the authors chose the layout: of papers and submissions the fastest."""

NEAR = 1.03
"""A ratio up to which nothing is to be explained."""


class Compared(NamedTuple):
    """A published run and what a search finds: ratios of steps, its place among the rows of the search (None below
    them), and in words what it has otherwise than the best like it."""

    source: str
    plan: Plan
    step_s: float
    fits: bool
    best: Plan
    ratio: float
    place: int | None
    restricted: float
    reason: str
    processor_s: float


def main() -> int:
    """Prints the table, or writes it as a page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ids", nargs="*", metavar="ID", help="rows (default: all)")
    parser.add_argument("--write", metavar="FILE", help="the page to write")
    args = parser.parse_args()
    rows = {row.id: row for row in read_rows()}
    found = []
    for name in args.ids or ROWS:
        found.append(compared(rows[name].source, plan_of(rows[name]).plan))
        print(" | ".join(_cells(found[-1])), f"{found[-1].processor_s:.0f} s", sep=" | ", flush=True)
    if args.write:
        write_text(args.write, page(found))
    return 0


def compared(source: str, plan: Plan) -> Compared:
    """A published plan and the best of two searches."""
    started = process_time()
    step_s, fits = float(simulate(plan).report["step_time_s"]), fit(plan).fits
    order = {"layout.order": plan.layout.order}
    report, plans = _searched(plan, order)
    restricted = {"layout.zero": plan.layout.zero, "recompute.mode": plan.recompute.mode}
    if not plan.layout.sequence_parallel and (plan.layout.tp > 1 or plan.layout.zero < 2):
        restricted["layout.sequence_parallel"] = False
    if plan.recompute.mode == "selective":
        restricted["recompute.modules"] = plan.recompute.modules
    restricted_report, restricted_plans = _searched(plan, {**order, **restricted})
    steps_s = [each["step_time_s"] for each in report["candidates"]]
    place = 1 + sum(each < step_s * (1 - 1e-9) for each in steps_s)
    ratio, restricted_ratio = (
        step_s / min(each["step_time_s"] for each in found["candidates"]) if found["candidates"] else float("nan")
        for found in (report, restricted_report)
    )
    reason = ""
    if restricted_ratio > NEAR or not fits or restricted_ratio != restricted_ratio:
        of_plan = reasons([restricted_plans[0] if restricted_plans else plans[0], plan])
        reason = next((f"{each.change}: {each.text}" for each in of_plan), "")
    return Compared(
        source,
        plan,
        step_s,
        fits,
        plans[0],
        ratio,
        place if place <= len(steps_s) else None,
        restricted_ratio,
        reason,
        process_time() - started,
    )


def _searched(plan: Plan, pinned: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[Plan, ...]]:
    shared = {name: getattr(plan, name) for name in SHARED_WITH_PLANS}
    result = search(SearchSpace(**shared, pinned=pinned), Question(top=20))
    return result.report, result.plans


def words(plan: Plan) -> str:
    """A layout in a cell."""
    layout = plan.layout
    etp = f" etp{layout.expert_tp}" if plan.model.is_moe and layout.expert_tp != layout.tp else ""
    return (
        f"{layout.degrees}{etp} zero{layout.zero} micro {plan.batch.micro_size}, {plan.recompute.mode}, "
        f"{plan.schedule.name}"
    ).replace("etp1 etp1", "etp1")


def _cells(each: Compared) -> tuple[str, ...]:
    plan = each.plan
    what = f"{plan.model.name} on {plan.world_size} {plan.cluster.name}, {plan.precision.dtype}"
    place = "below" if each.place is None else str(each.place)
    fits = "" if each.fits else " (does not fit as modelled)"
    return (
        f"{each.source}: {what}",
        words(plan) + fits,
        format_s(each.step_s),
        words(each.best),
        f"{each.ratio:.3f}",
        place,
        f"{each.restricted:.3f}",
        each.reason,
    )


HEADER = ("run", "published layout", "its step", "best layout", "all", "place of 20", "restricted", "what costs it")


def page(found: list[Compared]) -> str:
    """The page of all rows."""
    near = sum(each.restricted <= NEAR for each in found)
    about = __doc__.split("\n\n", 2)[2].strip().replace("\n", " ")
    lines = [
        "# Published layouts and the best that a search finds",
        "",
        "Generated by `python benchmarks/published_best.py --write docs/published_best.md`; not edited by hand.",
        "",
        about,
        "",
        f"{near} of {len(found)} are within 3% of the best layout so restricted, "
        f"{sum(each.ratio <= NEAR for each in found)} of the best of all.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "| " + " | ".join("---" for _ in HEADER) + " |",
        *("| " + " | ".join(_cells(each)) + " |" for each in found),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
