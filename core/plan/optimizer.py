"""The `[optimizer]` section of a plan: how weights follow from gradients, and which parameters follow otherwise."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Literal

from ..base.bounds import FACTOR
from ..base.option import Bounded, FieldProblem, noun, option
from ..model.parameters import Parameter
from .parameter_groups import ParameterGroup

OptimizerName = Literal["adamw", "sgd", "muon"]

USED_BY: Mapping[str, tuple[OptimizerName, ...]] = {
    "betas": ("adamw", "muon"),
    "eps": ("adamw", "muon"),
    "momentum": ("sgd", "muon"),
    "nesterov": ("sgd", "muon"),
    "muon_scale": ("muon",),
    "muon_steps": ("muon",),
}
"""Keys that not every optimizer uses, and those that do."""

MOMENTUM: Mapping[str, float] = {"sgd": 0.9, "muon": 0.95}
"""Where a plan says nothing: that of Megatron-LM's `--sgd-momentum`, and that of Jordan 2024."""

STATES: Mapping[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "muon": ("momentum_buffer",),
}
"""Update -> the tensors that it keeps of a parameter, each of its shape, by torch's names."""


@dataclass(frozen=True)
class Update:
    """How one parameter follows from its gradient: by the update `name`, a key of `STATES`, which keeps the tensors
    `states`. `decays` says whether it has the weight decay of a step, unless its `group` has another."""

    name: str
    states: tuple[str, ...]
    decays: bool
    group: ParameterGroup | None = None

    @property
    def is_counted(self) -> bool:
        """Whether it goes by the number of updates before."""
        return self.name == "adamw"

    def learning_rate(self, of_step: float) -> float:
        """Its learning rate, from that of a step."""
        return of_step if self.group is None else of_step * self.group.learning_rate_multiplier

    def weight_decay(self, of_step: float) -> float:
        """Its weight decay, from that of a step."""
        if self.group is not None and self.group.weight_decay is not None:
            return self.group.weight_decay
        return of_step if self.decays else 0.0

    @property
    def is_frozen(self) -> bool:
        """Whether the parameter is not trained."""
        return self.group is not None and self.group.frozen


def is_orthogonalised(parameter: Parameter) -> bool:
    """Whether Muon updates it: the matrices of layers, of experts each its own, and no table and no output head."""
    return len(parameter.shape) == 2 + parameter.expert and parameter.name.startswith(("layers.", "mtp."))


@noun()
class Optimizer(Bounded, section="optimizer"):
    """AdamW (Loshchilov & Hutter 2019), SGD with momentum (as `torch.optim.SGD`) or Muon (Jordan 2024), and global-norm
    clipping; `clip_grad_norm=0` turns clipping off."""

    name: OptimizerName = option(
        "the optimizer",
        default="adamw",
        more="Muon orthogonalises the matrices of layers; all else, the tables and the output head follow its AdamW.",
        read_by="core.plan.optimizer",
    )
    betas: tuple[float, float] = option(
        "adamw, muon: decay of the moment estimates",
        default=(0.9, 0.95),
        minimum=0,
        below=1,
        bound=FACTOR,
        read_by="backend.optimizers.updates",
    )
    eps: float = option(
        "adamw, muon: added to the root of the second moment",
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
        "sgd, muon: what is left of the momentum buffer",
        default=None,
        minimum=0,
        below=1,
        bound=FACTOR,
        default_note="0.9, for muon 0.95",
        more="SGD without momentum keeps no state.",
        read_by="core.plan.optimizer",
    )
    nesterov: bool | None = option(
        "sgd, muon: the gradient is added to its momentum once more",
        default=None,
        default_note="with muon",
        read_by="core.plan.optimizer",
    )
    muon_scale: Literal["match_rms", "original"] = option(
        "muon: what an orthogonal matrix of A rows and B columns is scaled by",
        default="match_rms",
        more=(
            "`match_rms`: 0.2 sqrt(max(A, B)), so that an update is as large as one of AdamW (Liu et al. 2025, "
            "arXiv 2502.16982, equation 4). `original`: sqrt(max(1, A / B)) (Jordan 2024)."
        ),
        read_by="backend.optimizers.orthogonal",
    )
    muon_steps: int = option(
        "muon: iterations of Newton and Schulz",
        default=5,
        minimum=1,
        maximum=20,
        read_by="backend.optimizers.orthogonal",
    )
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = option(
        "how the learning rate falls after the warm-up",
        default="constant",
        more=(
            "From `train.learning_rate` to `minimum_learning_rate`; `wsd` (warm-up, stable, decay) stays at the top "
            "until `wsd_decay_steps` before the end. The first step has the rate of 0 steps before it."
        ),
        read_by="core.plan.rates",
    )
    warmup_steps: int = option(
        "steps in which the learning rate rises in a line", default=0, minimum=0, read_by="core.plan.rates"
    )
    warmup_fraction: float | None = option(
        "the same as a share of decay_steps",
        default=None,
        minimum=0,
        below=1,
        default_note="warmup_steps",
        read_by="core.plan.rates",
    )
    initial_learning_rate: float = option(
        "the learning rate that the warm-up begins with",
        default=0.0,
        minimum=0,
        bound=FACTOR,
        read_by="core.plan.rates",
    )
    minimum_learning_rate: float = option(
        "the learning rate at the end, and after it", default=0.0, minimum=0, bound=FACTOR, read_by="core.plan.rates"
    )
    decay_steps: int | None = option(
        "steps, those of the warm-up too, until the learning rate is the least",
        default=None,
        minimum=1,
        default_note="train.steps",
        read_by="core.plan.rates",
    )
    wsd_decay: Literal["linear", "cosine", "exponential", "minus_sqrt"] = option(
        "with wsd: the form of the decay",
        default="exponential",
        more="Of the share q of it: 1-q, (1+cos pi q)/2, 2/2^q - 1, or 1 - sqrt q is left.",
        read_by="core.plan.rates",
    )
    wsd_decay_steps: int | None = option(
        "with wsd: the last steps of decay_steps, in which the learning rate falls",
        default=None,
        minimum=1,
        default_note="none",
        read_by="core.plan.rates",
    )
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = option(
        "how the weight decay becomes end_weight_decay", default="constant", read_by="core.plan.rates"
    )
    end_weight_decay: float | None = option(
        "the weight decay at the end of its schedule",
        default=None,
        minimum=0,
        bound=FACTOR,
        default_note="weight_decay",
        read_by="core.plan.rates",
    )
    weight_decay_steps: int | None = option(
        "steps until the weight decay is end_weight_decay",
        default=None,
        minimum=1,
        default_note="train.steps",
        read_by="core.plan.rates",
    )
    counted_in: Literal["steps", "samples"] = option(
        "what warmup_steps and the like count",
        default="steps",
        more="With samples all keys of this section that end in `_steps` are numbers of sequences.",
        read_by="core.plan.rates",
    )
    groups: tuple[ParameterGroup, ...] = option(
        "parameters that are treated otherwise, by their names",
        default=(),
        more=(
            "[[optimizer.groups]], each with `match`, a regular expression that matches whole names such as "
            "`layers.3.mlp.up.weight`, and `weight_decay`, `learning_rate_multiplier` or `frozen`. The first that "
            "matches a name has it."
        ),
        read_by="core.plan.optimizer",
    )

    @cached_property
    def own_momentum(self) -> float:
        """The momentum of this optimizer; 0 for one that has none."""
        return MOMENTUM.get(self.name, 0.0) if self.momentum is None else self.momentum

    @cached_property
    def own_nesterov(self) -> bool:
        """Whether it is Nesterov's."""
        return self.name == "muon" if self.nesterov is None else self.nesterov

    @property
    def keeps_moments(self) -> bool:
        """Whether it keeps something of every parameter between steps."""
        return self.name != "sgd" or self.own_momentum > 0

    def update_of(self, parameter: Parameter) -> Update:
        """How a parameter follows from its gradient."""
        name = self.name if self.name != "muon" or is_orthogonalised(parameter) else "adamw"
        group = next((each for each in self.groups if each.has(parameter.name)), None)
        is_frozen = group is not None and group.frozen
        states = STATES[name] if self.keeps_moments and not is_frozen else ()
        return Update(name, states, parameter.decay, group)

    @property
    def elementwise(self) -> Optimizer:
        """What updates tensors element by element: Muon's AdamW, else the optimizer itself."""
        if self.name != "muon":
            return self
        return Optimizer("adamw", self.betas, self.eps, self.weight_decay, self.clip_grad_norm)

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
