"""Random runs: a problem with everything switched on that a long run has, two layouts for it, and how the first leaves.

Layouts and kinds of layers are drawn from the factors of the matrix (`verify.matrix`), the rest is drawn here. What a
rule refuses, or the backend does not run, is drawn anew.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardproof.backend.unsupported import unsupported
from shardproof.core.base.errors import PlanError
from shardproof.core.plan.optimizer import Optimizer, OptimizerName
from shardproof.core.plan.parameter_groups import ParameterGroup
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Offload
from shardproof.core.plan.sections import Precision
from shardproof.core.plan.train import Checkpoint
from shardproof.verify.matrix.layouts import FACTORS, plan_of
from shardproof.verify.matrix.problems import PROBLEMS

STEPS = 5
MAX_RANKS = 4
TRIES = 20_000

Leaves = Literal["signal", "end", "crash"]
"""How the first layout leaves: it is asked to stop, its steps are over, or it is lost two steps after an asynchronous
save, and what it saved after that with it."""

BATCHES: tuple[dict[str, Any], ...] = (
    {"rampup": (4, 2, 10)},
    {"rampup": (4, 4, 12)},
    {"rampup": (2, 2, 14)},
    {"schedule": "0:4 8:8 16:6 22:8"},
    {"schedule": "0:8 16:4 24:8"},
    {"schedule": "0:4 120:8", "schedule_unit": "tokens"},
    {},
)
GLOBAL = 8

GROUPS: tuple[ParameterGroup, ...] = (
    ParameterGroup(r"layers\.0\..*", frozen=True),
    ParameterGroup(r"embedding\..*", frozen=True),
    ParameterGroup(r".*mlp.*weight", weight_decay=0.3, learning_rate_multiplier=0.5),
    ParameterGroup(r"layers\.2\..*", learning_rate_multiplier=3.0),
    ParameterGroup(r".*norm\.weight", weight_decay=0.2),
)


@dataclass(frozen=True)
class RandomRun:
    """`first` has taken `stop` steps when it leaves in the way `leaves`, as rank `asked` sees it; `second` goes on. No
    plan has a folder of checkpoints yet; `saves` is their section."""

    first: Plan
    second: Plan
    stop: int
    leaves: Leaves
    asked: int
    saves: Checkpoint

    @property
    def words(self) -> str:
        """What it is made of, for who reads a failure."""
        plan, options = self.first, self.first.optimizer
        batch = plan.batch.rampup or plan.batch.schedule or plan.batch.global_size
        rate = f"{options.schedule} {options.wsd_decay if options.schedule == 'wsd' else ''}".strip()
        packed = " packed" * plan.train.packed
        groups = f", {len(options.groups)} groups" if options.groups else ""
        return (
            f"{plan.model.name} {plan.precision.dtype}{packed}, {options.name}, {rate} in {options.counted_in}, weight "
            f"decay {options.weight_decay_schedule}{groups}, batches {batch}, {plan.train.data.split()[-1]}: "
            f"{_layout(plan)} until {self.stop} ({self.leaves}), then {_layout(self.second)}"
        )


def _layout(plan: Plan) -> str:
    layout = plan.layout
    degrees = "".join(
        f" {name}{getattr(layout, name)}"
        for name in ("tp", "pp", "vpp", "dp", "cp", "ep", "zero")
        if getattr(layout, name) > (name != "zero")
    )
    return f"{plan.schedule.name}{degrees} micro{plan.batch.micro_size}"


def random_run(seed: int, data: tuple[str, ...]) -> RandomRun:
    """The run of a seed. `data` are what `train.data` may be, each with documents."""
    draw = random.Random(seed)
    for _ in range(TRIES):
        first = _layout_of(draw, draw.choice(tuple(PROBLEMS)))
        if first is None or (run := _with_features(draw, first, draw.choice(data))) is None:
            continue
        for _ in range(TRIES // 20):
            second = _layout_of(draw, _problem_of(first))
            moved = None if second is None else _moved(run, second)
            if moved is not None and moved.layout != run.layout:
                stop = draw.randint(2, STEPS - 2)
                leaves: Leaves = draw.choice(("signal", "end", "crash"))
                saves = Checkpoint(every=stop if leaves == "crash" else None, keep=draw.choice((None, 1)))
                return RandomRun(run, moved, stop, leaves, draw.randrange(run.layout.world_size), saves)
    raise AssertionError(f"seed {seed}: no two layouts in {TRIES} tries")


def _layout_of(draw: random.Random, problem: str) -> Plan | None:
    """The plan of a row of the matrix, which is at several places another than the plain one."""
    row = {name: draw.choice((values[0], draw.choice(values))) for name, values in FACTORS.items()}
    found = plan_of({**row, "problem": problem}, MAX_RANKS)
    return found if isinstance(found, Plan) and found.layout.world_size > 1 else None


def _problem_of(plan: Plan) -> str:
    return next(name for name in sorted(PROBLEMS, key=len, reverse=True) if plan.model.name.startswith(f"{name}-"))


def _with_features(draw: random.Random, plan: Plan, data: str) -> Plan | None:
    """The plan with a long run's features, or None where they do not go together."""
    name: OptimizerName = draw.choice(("adamw", "muon", "sgd"))
    train = replace(
        plan.train,
        steps=STEPS,
        data=data,
        split=draw.choice((None, "8,2,1")),
        eval_every=draw.choice((2, 3)),
        packed=plan.train.packed or draw.random() < 0.5,
        seed=draw.randrange(1 << 16),
        learning_rate=1e-2,
    )
    dtype = draw.choice(("bf16", "fp16")) if plan.precision.dtype == "bf16" else plan.precision.dtype
    scaled = {"initial_loss_scale": 2.0**11, "loss_scale_window": 2, "loss_scale_hysteresis": 1}
    precision = Precision(dtype, **scaled) if dtype == "fp16" else plan.precision
    batch = replace(plan.batch, global_size=GLOBAL, **draw.choice(BATCHES))
    try:
        return _runnable(
            replace(
                plan,
                batch=batch,
                train=train,
                precision=precision,
                optimizer=_optimizer(draw, name),
                offload=Offload(plan.offload.activations) if name == "muon" else plan.offload,
            )
        )
    except PlanError:
        return None


def _optimizer(draw: random.Random, name: OptimizerName) -> Optimizer:
    counted, unit = draw.choice((("steps", 1), ("samples", 6)))
    schedule = draw.choice(("wsd", "wsd", "cosine", "linear", "inverse_sqrt"))
    decay = draw.choice(("constant", "linear", "cosine"))
    return Optimizer(
        name,
        **({"momentum": draw.choice((0.0, 0.9)), "nesterov": False} if name == "sgd" else {}),
        schedule=schedule,
        warmup_steps=draw.choice((0, 2)) * unit,
        decay_steps=(STEPS - 1) * unit,
        minimum_learning_rate=1e-4,
        **(
            {"wsd_decay": draw.choice(("linear", "cosine", "exponential", "minus_sqrt")), "wsd_decay_steps": 2 * unit}
            if schedule == "wsd"
            else {}
        ),
        weight_decay=0.1,
        **({} if decay == "constant" else {"end_weight_decay": 0.4, "weight_decay_steps": 3 * unit}),
        weight_decay_schedule=decay,
        counted_in=counted,
        clip_grad_norm=draw.choice((0.05, 0.0)),
        groups=tuple(draw.sample(GROUPS, draw.randint(0, 2))),
    )


def _moved(run: Plan, layout: Plan) -> Plan | None:
    """The run under the layout of another plan of its problem, or None where that cannot cut it."""
    try:
        return _runnable(
            replace(
                layout,
                model=run.model,
                batch=replace(run.batch, micro_size=layout.batch.micro_size),
                precision=run.precision,
                numerics=run.numerics,
                train=run.train,
                optimizer=run.optimizer,
                offload=Offload(layout.offload.activations) if run.optimizer.name == "muon" else layout.offload,
            )
        )
    except PlanError:
        return None


def _runnable(plan: Plan) -> Plan | None:
    return None if unsupported(plan) else plan
