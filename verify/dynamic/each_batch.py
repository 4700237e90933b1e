"""A run whose batches change, so that a proof of few steps goes through several of them."""

from __future__ import annotations

from dataclasses import replace

from ...core.plan.batch_sizes import batch_at, stretches
from ...core.plan.plan import Plan


def through_batches(plan: Plan, steps: int) -> tuple[Plan, list[str]]:
    """The plan with another batch in each of the first `steps` steps, as many of its own as there are, spread over the
    run, the first and the last among them; and a sentence that says so. The plan itself and [] where it does that."""
    sizes = list(dict.fromkeys(each.size for each in stretches(plan.batch)))
    wanted = min(steps, len(sizes))
    if wanted < 2 or len({batch_at(plan.batch, step) for step in range(steps)}) == wanted:
        return plan, []
    chosen = [sizes[place * (len(sizes) - 1) // (wanted - 1)] for place in range(wanted)]
    if chosen[-1] != plan.batch.global_size:  # the last batch of a list may be one that it had before
        chosen = [size for size in chosen if size != plan.batch.global_size] + [plan.batch.global_size]
    begins = [sum(chosen[:place]) for place in range(len(chosen))]
    listed = " ".join(f"{begin}:{size}" for begin, size in zip(begins, chosen, strict=True))
    key = "schedule" if plan.batch.rampup is None else "rampup"
    batch = replace(plan.batch, rampup=None, schedule=listed, schedule_unit="samples")
    changed = replace(plan, batch=batch, optimizer=plan.rates.fixed)
    what = f"batch.{key} -> schedule = {listed!r}"
    return changed, [f"{what}: so {steps} steps run {len(chosen)} of the {len(sizes)} batches that training has."]
