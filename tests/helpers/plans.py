"""One builder of the plans that tests run, simulate and prove: a test names what matters to it, the
rest is a tiny model's run."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

from shardproof import Layout, ModelSpec, Plan
from shardproof.core.base.errors import did_you_mean
from shardproof.core.machine.cluster import ClusterSpec
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.machine.variation import Variation
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.communicators import Communicators
from shardproof.core.plan.experimental import Experimental
from shardproof.core.plan.log import Log
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.runtime import Offload, Recompute, Runtime
from shardproof.core.plan.sections import Batch, DataParallel, Numerics, Precision, ScheduleChoice
from shardproof.core.plan.train import Checkpoint, Train

SECTIONS: dict[str, Any] = {
    "precision": Precision("fp32"),
    "numerics": Numerics("exact", gradient_token_block=8, reduction_token_block=4),
    "schedule": ScheduleChoice(),
    "recompute": Recompute(),
    "runtime": Runtime(),
    "data_parallel": DataParallel(),
    "communicators": Communicators(),
    "optimizer": Optimizer(),
    "train": Train(),
    "checkpoint": Checkpoint(),
    "log": Log(),
    "experimental": Experimental(),
    "variation": Variation(),
    "offload": Offload(),
}
# Whose each field is; of a name that several sections have, the first has it. `samples` is the batch's and `optimizer`
# a section, so `Variation` and `Offload` are given whole.
WHOLE = ("variation", "offload")
OWNERS = {
    entry.name: name for name, section in reversed(SECTIONS.items()) if name not in WHOLE for entry in fields(section)
}
OWNERS |= {entry.name: owner for owner, noun in (("model", ModelSpec), ("layout", Layout)) for entry in fields(noun)}
del OWNERS["name"]


def plan(
    layout: Layout | None = None,
    *,
    model: str | ModelSpec = "tiny-gpt",
    cluster: str | ClusterSpec = "this-host",
    samples: int | None = None,
    micro: int = 1,
    microbatches: int = 4,
    sequence: int = 24,
    schedule: str | ScheduleChoice | None = None,
    recompute: str | Recompute | None = None,
    **options: Any,
) -> Plan:
    """A plan of `layout` and `options`.

    An option is a field of a section by its name in a plan file (`tp=2`, `dtype="bf16"`, `clip_grad_norm=0.1`,
    `num_heads=6`), or a whole section (`train=Train(...)`), in which given fields then change. Of names that several
    sections have, `mode` is that of numerics, `num_layers` the model's and `seed` the training's. What `Variation`
    and `Offload` have is given as those sections only.

    The default is tiny-gpt (4 heads, hidden size 64, biases, learned positions): a step takes milliseconds. A tiny
    preset given by its name has two layers, or one per stage where there are more. Any other model keeps its layers,
    and gets one per stage where it has fewer and `stages` does not cut it. Sums are exact, in fp32, over blocks of 8
    and 4 tokens: a sequence of 24 has several of both. A batch has `samples` sequences, `micro` in a microbatch; by
    default `microbatches` for each data-parallel copy. The cluster has as many devices as the layout. The schedule is
    1F1B, or Interleaved1F1B where ranks have several stages.

    Raises `TypeError` where no section has an option, and `PlanError` as `Plan` does.
    """
    changes: dict[str, dict[str, Any]] = {}
    for name in sorted({*options} - {*SECTIONS}):
        if name not in OWNERS:
            raise TypeError(f"no section of a plan has {name!r}{did_you_mean(name, OWNERS)}")
        changes.setdefault(OWNERS[name], {})[name] = options[name]
    layout = replace(layout or Layout(), **changes.pop("layout", {}))
    given = {name: options.get(name, section) for name, section in SECTIONS.items()}
    given["recompute"] = Recompute(recompute) if isinstance(recompute, str) else recompute or Recompute()
    schedule = schedule or (
        "Interleaved1F1B" if layout.vpp > 1 and "file" not in changes.get("schedule", {}) else "1F1B"
    )
    given["schedule"] = ScheduleChoice(schedule) if isinstance(schedule, str) else schedule
    spec = model_for(model, layout, **changes.pop("model", {}))
    return Plan(
        spec,
        cluster_preset(cluster, layout.world_size) if isinstance(cluster, str) else cluster,
        layout,
        Batch(microbatches * micro * layout.dp if samples is None else samples, micro, sequence),
        **{name: replace(section, **changes.get(name, {})) for name, section in given.items()},
    )


def model_for(model: str | ModelSpec, layout: Layout, **changes: Any) -> ModelSpec:
    """The model with `changes`, and with as many layers as `plan` says where `num_layers` is not among them."""
    spec = model_preset(model) if isinstance(model, str) else model
    if isinstance(model, str) and model.startswith("tiny-"):
        changes = {"num_layers": max(2, layout.num_stages), **changes}
    elif layout.stages is None:
        changes = {"num_layers": max(spec.num_layers, layout.num_stages), **changes}
    return replace(spec, **changes)


# Clipping is active from the first step, and a second step from other weights would be far away.
training_plan = partial(plan, clip_grad_norm=0.1, steps=2, learning_rate=1e-2)
# The product's own numbers and sums, bf16 and in any order, for what is only priced or counted.
product_plan = partial(plan, precision=Precision(), numerics=Numerics())
