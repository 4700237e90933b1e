"""The `[optimizer]` section of a plan: how weights follow from gradients, and which parameters follow otherwise."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Literal

from ..base.bounds import FACTOR
from ..base.option import Bounded, FieldProblem, noun, option
from ..model.parameters import Parameter

OptimizerName = Literal["adamw", "sgd"]

USED_BY: Mapping[str, tuple[OptimizerName, ...]] = {
    "betas": ("adamw",),
    "eps": ("adamw",),
    "momentum": ("sgd",),
    "nesterov": ("sgd",),
}
"""Keys that not every optimizer uses, and those that do."""

MOMENTUM: Mapping[str, float] = {"sgd": 0.9}
"""Where a plan says nothing: that of Megatron-LM's `--sgd-momentum`."""

STATES: Mapping[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
}
"""Update -> the tensors that it keeps of a parameter, each of its shape, by torch's names."""


@dataclass(frozen=True)
class Update:
    """How one parameter follows from its gradient: by the update `name`, a key of `STATES`, which keeps the tensors
    `states`. `decays` says whether the weight decay of a step is its own."""

    name: str
    states: tuple[str, ...]
    decays: bool

    @property
    def is_counted(self) -> bool:
        """Whether it goes by the number of updates before."""
        return self.name == "adamw"

    def learning_rate(self, of_step: float) -> float:
        """Its learning rate, from that of a step."""
        return of_step

    def weight_decay(self, of_step: float) -> float:
        """Its weight decay, from that of a step."""
        return of_step if self.decays else 0.0


@noun()
class Optimizer(Bounded, section="optimizer"):
    """AdamW (Loshchilov & Hutter 2019) or SGD with momentum (as `torch.optim.SGD`), and global-norm clipping;
    `clip_grad_norm=0` turns clipping off."""

    name: OptimizerName = option(
        "the optimizer",
        default="adamw",
        read_by="core.plan.optimizer",
    )
    betas: tuple[float, float] = option(
        "adamw: decay of the moment estimates",
        default=(0.9, 0.95),
        minimum=0,
        below=1,
        bound=FACTOR,
        read_by="backend.optimizers.updates",
    )
    eps: float = option(
        "adamw: added to the root of the second moment",
        default=1e-8,
        above=0,
        bound=FACTOR,
        read_by="backend.optimizers.updates",
    )
    weight_decay: float = option(
        "weight decay, decoupled but for sgd",
        default=0.1,
        minimum=0,
        bound=FACTOR,
        more="SGD adds it times the weight to the gradient, as torch does.",
        read_by="backend.optimizers.sharded",
    )
    clip_grad_norm: float = option(
        "largest global gradient norm; 0 turns clipping off",
        default=1.0,
        minimum=0,
        bound=FACTOR,
        read_by="backend.ranks.training_rank",
    )
    _: KW_ONLY
    momentum: float | None = option(
        "sgd: what is left of the momentum buffer",
        default=None,
        minimum=0,
        below=1,
        bound=FACTOR,
        default_note="0.9",
        more="SGD without momentum keeps no state.",
        read_by="core.plan.optimizer",
    )
    nesterov: bool | None = option(
        "sgd: the gradient is added to its momentum once more",
        default=None,
        default_note="false",
        read_by="core.plan.optimizer",
    )

    @cached_property
    def own_momentum(self) -> float:
        """The momentum of this optimizer; 0 for one that has none."""
        return MOMENTUM.get(self.name, 0.0) if self.momentum is None else self.momentum

    @cached_property
    def own_nesterov(self) -> bool:
        """Whether it is Nesterov's."""
        return bool(self.nesterov)

    @property
    def keeps_moments(self) -> bool:
        """Whether it keeps something of every parameter between steps."""
        return self.name == "adamw" or self.own_momentum > 0

    def update_of(self, parameter: Parameter) -> Update:
        """How a parameter follows from its gradient."""
        states = STATES[self.name] if self.keeps_moments else ()
        return Update(self.name, states, parameter.decay)

    def unused(self, given: Iterable[str]) -> Iterable[FieldProblem]:
        """What is wrong with keys that are given and that this optimizer does not use."""
        for key in given:
            if self.name not in USED_BY.get(key, (self.name,)):
                yield (
                    key,
                    (
                        f'{key} has no meaning with optimizer.name="{self.name}": it is a key of '
                        f"{' and '.join(USED_BY[key])}. Leave it out."
                    ),
                )

    def _problems(self, wrong: Collection[str]) -> Iterable[FieldProblem]:
        if "name" in wrong:
            return
        yield from self.unused(key for key in USED_BY if getattr(self, key, None) != getattr(type(self), key, None))
        if self.nesterov and self.momentum == 0:
            yield "nesterov", "nesterov=true needs a momentum, and momentum=0. Set optimizer.momentum=0.9, say."
