"""The matrix of modules: every pair of layouts joined by a bridge, and branches that join, each at 0 different bits
against modules that are not cut.

`python -m shardproof.verify.matrix_modules` runs all of it, `--only tp4` what has that layout, `--sample` the few that
show every layout before and after a bridge, `--part 1/3` the first of three parts. Exit code 1 when a bit differs or a
rank fails. All pairs have one problem, hence one reference.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ...core.base.terminal import say
from ...core.layout.layout import Layout
from ...core.machine.cluster_presets import cluster_preset
from ...core.model.model_presets import model_preset
from ...core.plan.module import Module
from ...core.plan.optimizer import Optimizer
from ...core.plan.plan import ModularPlan
from ...core.plan.sections import Batch, Numerics, Precision, ScheduleChoice
from ...core.plan.train import Train
from ..run.references import References
from .matrix import Outcome, prove_plan
from .portions import WHOLE, Part, add_portions, parse_part, part_of, smallest_cover

LAYOUTS: Mapping[str, Layout] = {
    "one": Layout(),
    "tp2": Layout(tp=2),
    "tp3-sp": Layout(tp=3, sequence_parallel=True),
    "tp4": Layout(tp=4),
    "tp5": Layout(tp=5),
    "cp2": Layout(cp=2),
    "cp3-tp2-sp": Layout(cp=3, tp=2, sequence_parallel=True),
    "pp2": Layout(pp=2),
    "pp2-tp2-cp2": Layout(pp=2, tp=2, cp=2),
    "dp2": Layout(dp=2),
    "dp3": Layout(dp=3),
    "dp5": Layout(dp=5),
    "dp2-tp2-sp": Layout(dp=2, tp=2, sequence_parallel=True),
    "dp3-zero1": Layout(dp=3, zero=1),
}
"""Cuts of tensors (unevenly: 6 heads), sequences, the batch (unevenly: 7 samples) and layers,
on at most eight ranks."""

JOINED: Sequence[tuple[str, str, str]] = (
    ("tp2", "pp2", "tp3-sp"),
    ("dp2", "dp3", "cp2"),
    ("cp3-tp2-sp", "one", "dp2-tp2-sp"),
)
"""Layouts of two branches and of the module where they join."""


def plans() -> Iterator[tuple[str, ModularPlan]]:
    """`tp4 -> tp2` and its plan, for every pair; then what joins."""
    for first, second in itertools.product(LAYOUTS, repeat=2):
        yield f"{first} -> {second}", modular([("first", first, ()), ("second", second, ("first",))])
    for left, right, last in JOINED:
        modules = [("left", left, ()), ("right", right, ()), ("last", last, ("right", "left"))]
        yield f"{left} + {right} -> {last}", modular(modules)


def modular(given: Sequence[tuple[str, str, tuple[str, ...]]]) -> ModularPlan:
    """A plan of modules of two layers each, from names, layouts by name, and inputs. Clipping is active."""
    modules: list[Module] = []
    for name, written, inputs in given:
        first, layout = modules[-1].last_rank + 1 if modules else 0, LAYOUTS[written]
        model = replace(model_preset("tiny-gpt-6h"), num_layers=2)
        modules.append(Module(name, first, first + layout.world_size - 1, model, layout, inputs))
    same_dp = len({module.layout.dp for module in modules}) == 1
    return ModularPlan(
        tuple(modules),
        cluster_preset("this-host", modules[-1].last_rank + 1),
        Batch(7, 1, 24),
        precision=Precision("fp32"),
        schedule=ScheduleChoice("1F1B" if same_dp else "GPipe"),
        numerics=Numerics("exact", gradient_token_block=2, reduction_token_block=2),
        optimizer=Optimizer(clip_grad_norm=0.05),
        train=Train(steps=2, learning_rate=1e-2),
    )


def chosen_plans(
    only: str | None = None, *, sampled: bool = False, part: Part = WHOLE
) -> list[tuple[str, ModularPlan]]:
    """The plans with a layout, of them the sample where one is asked for, and of that a part."""
    found = [(name, plan) for name, plan in plans() if only is None or only in name.replace("+", "->").split(" -> ")]

    def cost(named: tuple[str, ModularPlan]) -> float:
        return named[1].world_size

    return part_of(smallest_cover(found, shows, cost) if sampled else found, part, cost, lambda named: named[0])


def shows(named: tuple[str, ModularPlan]) -> list[tuple[str, str]]:
    """What a sample has to show: layouts before a bridge and after one, whole joins."""
    first, _, second = named[0].partition(" -> ")
    return [("join", named[0])] if "+" in first else [("before", first), ("after", second)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the options choose."""
    parser = argparse.ArgumentParser(
        prog="python -m shardproof.verify.matrix_modules", description="Modules against uncut ones, bit for bit."
    )
    parser.add_argument(
        "--only", metavar="LAYOUT", choices=tuple(LAYOUTS), help=(f"plans with this layout: {', '.join(LAYOUTS)}")
    )
    add_portions(parser, "plans", "every layout before a bridge and after one, and every join")
    parser.add_argument(
        "--transport",
        choices=("gloo", "shm", "memory", "nccl", "kernels"),
        default="memory",
        help="how ranks talk (default: memory)",
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help=("plans at a time (default: the cores)")
    )
    args = parser.parse_args(arguments)
    chosen = chosen_plans(args.only, sampled=args.sample, part=parse_part(args.part))
    references = References(most=len(chosen))
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [
            pool.submit(prove_plan, plan, {"modules": name}, references, steps=2, transport=args.transport)
            for name, plan in chosen
        ]
        outcomes: list[Outcome] = []
        for run in runs:
            outcomes.append(run.result())
            say(outcomes[-1].line, flush=True)
    exact = sum(outcome.ok for outcome in outcomes)
    say(f"{exact} of {len(outcomes)} plans of modules at 0 different bits.")
    return 0 if exact == len(outcomes) else 1
