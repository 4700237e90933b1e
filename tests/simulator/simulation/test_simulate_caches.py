"""What a process remembers of the plans it has simulated changes no answer: every key of a plan file that changes a
prediction is part of what the prediction is remembered by."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from helpers.gates import sampled
from helpers.plans import plan, product_plan
from shardproof.core.base.errors import ShardproofError
from shardproof.core.plan.keys import KEYS, Key
from shardproof.core.plan.plan import Plan
from shardproof.simulator.simulation.simulate import simulate

CASES = {
    "experts": (product_plan(model="tiny-moe", tp=2, ep=2, dp=2, microbatches=2), ("train", "runtime", "precision")),
    "exact": (plan(tp=2, pp=2, dp=2, microbatches=2), None),
    "fast": (product_plan(tp=2, pp=2, dp=2, microbatches=2), None),
    "experts, all keys": (product_plan(model="tiny-moe", tp=2, ep=2, dp=2, microbatches=2), None),
    "GPUs": (product_plan(model="tiny-llama", cluster="dgx-h100", tp=2, cp=2, pp=2, dp=2, zero=1, sequence=64), None),
    "ZeRO 3": (
        product_plan(model="tiny-llama", cluster="dgx-h100", profile="torchtitan", dp=4, zero=3, sequence=64),
        None,
    ),
}
"""A plan, and the sections whose keys are changed; None for all."""
EFFECTIVE = {"train.label_smoothing", "train.z_loss"}
"""Keys that change what is predicted of every one of them."""


def forget() -> None:
    """Empties every cache of the simulator, and of the programs that it prices."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("shardproof.simulator", "shardproof.core.program")):
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def other_values(key: Key, value: Any) -> tuple[Any, ...]:
    """Some that a key may have instead; none for files, names and tables, which are no one's to make up."""
    if key.type == "bool":
        return (not value,)
    if key.choices:
        others = [each for each in key.choices if each != value]
        return ((others[-1],),) if key.type == "list of texts" else (others[0], others[-1]) if others else ()
    if isinstance(value, str):
        return ()
    if key.type in ("int", "size"):
        return (2 * int(value or 1),)
    return (0.5 if value != 0.5 else 0.25,) if key.type == "float" else ()


def neighbours(base: Plan, sections: tuple[str, ...] | None) -> Iterator[tuple[str, Plan]]:
    """The legal plans that differ in one key, each with the key."""
    for key in KEYS:
        if key.attribute is None or (sections is not None and key.section not in sections):
            continue
        noun = getattr(base, key.section)
        for value in other_values(key, getattr(noun, key.attribute)):
            try:
                yield key.dotted, replace(base, **{key.section: replace(noun, **{key.attribute: value})})
            except (ShardproofError, ValueError):
                continue


def answer(plan: Plan) -> str:
    """All that is predicted, to the last digit."""
    try:
        simulation = simulate(replace(plan))  # a plan remembers what is its own
    except ShardproofError as error:
        return str(error)
    return repr((simulation.report, simulation.memory, simulation.run.end_s.tolist()))


@sampled("name", CASES, on_push=1)
def test_no_key_is_missing_from_what_predictions_are_remembered_by(name):
    base, sections = CASES[name]
    plans = [("none", base), *neighbours(base, sections)]
    fresh = []
    for _, changed in plans:
        forget()
        fresh.append(answer(changed))
    effective = {key for (key, _), text in zip(plans, fresh, strict=True) if text != fresh[0]}
    assert effective >= EFFECTIVE
    # after the base plan, and before it
    for order in (range(len(plans)), reversed(range(len(plans)))):
        forget()
        assert [plans[number][0] for number in order if answer(plans[number][1]) != fresh[number]] == []
