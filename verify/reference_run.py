"""What the one device of a proof does beyond its steps, so that it can be checked itself: it keeps its values, and what sequences of
its last step were made from, and goes forward twice more.

Both are forwards of one step whose weights are moved along a direction and against it; what the losses then differ by is what the
gradients of that step have to say. The direction is drawn at random, so that every element has a part in it, and leans towards the
gradient, so that the losses differ by more than rounding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.parameters import expert_biases, parameters
from ..core.plan import Plan
from .bounds import section_of
from .forward import Recorded, activation_names, gradient_names, samples_checked
from .kept import Kept
from .ledger import ACTIVATION, ACTIVATION_GRADIENT, GRADIENT, NO_STEP, OPTIMIZER, WEIGHT, Key, RankLedger
from .proof_run import ProofJob, trained

COUNTED_FILE = "counted.npy"
SEQUENCES_FILE = "sequences.npz"
MOVED_FILE = "moved.json"

CAPTURE_BYTES = 2**30
"""Values of the one device that are kept: gradients, moments and weights of as many steps as there is room for, the first in any case."""

LARGEST_MOVE = 1e-3
"""Root mean square of what elements are moved by at random: a twentieth of what weights start with (0.02, GPT-2)."""


@dataclass(frozen=True)
class Reach:
    """How far weights are moved: until the loss changes by `change`; the gradient has `lean` times the random direction's part in that.
    `tolerance` is the share of it that curvature and rounding may take: in right runs of the plans of mutants at most a fifth of that."""

    change: float
    lean: float
    tolerance: float


REACH = {"fp32": Reach(1.5e-3, 3.0, 1e-2), "bf16": Reach(0.05, 50.0, 0.2), "fp16": Reach(0.05, 50.0, 0.2)}


def steps_kept(plan: Plan, steps: int) -> int:
    """Of how many steps values are kept."""
    return max(1, min(steps, CAPTURE_BYTES // (16 * plan.model.num_parameters)))


def kept_keys(plan: Plan, steps: int) -> frozenset[Key]:
    """Everything that a check of so many steps looks at."""
    names = [each.name for each in parameters(plan.model)]
    moments = [f"{name}.{moment}" for name in names for moment in ("exp_avg", "exp_avg_sq")]
    weights = names + [each.name for each in expert_biases(plan.model)]
    found = {Key(step, WEIGHT, name) for step in range(NO_STEP, steps) for name in weights}
    for step in range(steps):
        found |= {Key(step, GRADIENT, name) for name in names} | {Key(step, OPTIMIZER, name) for name in moments}
        for phase in (ACTIVATION, ACTIVATION_GRADIENT):
            found |= {Key(step, phase, name, sample) for name in loss_names(plan) for sample in range(plan.batch.global_size)}
    for phase, names in ((ACTIVATION, activation_names(plan)), (ACTIVATION_GRADIENT, gradient_names(plan))):
        found |= {Key(steps - 1, phase, name, sample) for name in names for sample in samples_checked(plan)}
    return frozenset(found)


def loss_names(plan: Plan) -> list[str]:
    """The losses of tokens: the model's, then those of multi-token prediction."""
    return ["head.losses", *(f"mtp.{depth}.losses" for depth in range(plan.model.num_mtp_layers))]


def moved_names(plan: Plan, *, own_block: bool) -> list[str]:
    """The parameters along which the loss is smooth: all of them; with experts those behind the last router, which may send tokens
    elsewhere, and with somebody's own layers those behind them."""
    model, names = plan.model, [each.name for each in parameters(plan.model)]
    routers = [name for name in names if name.endswith(".mlp.router.weight")]
    if not routers and not own_block:
        return names
    behind = [] if model.tied_embeddings else ["head.output.weight"]
    if not model.num_mtp_layers:
        last = f"layers.{model.num_layers - 1}.mlp."
        experts = (f"{last}experts.", f"{last}shared.") if f"{last}router.weight" in routers and not own_block else ()
        behind = [name for name in names if experts and name.startswith(experts)] + ["head.norm.weight", "head.norm.bias", *behind]
    return [name for name in names if name in behind]


def reference_steps(transport: Any, job: ProofJob) -> RankLedger:
    """A `Scenario`: the trainer's steps, and what is written beside the ledger into the job's folder."""
    rank, writer = trained(transport, job)
    ledger = writer.finish()
    assert job.folder is not None and isinstance(job.plan, Plan)
    kept = {key: piece.kept for key, piece in ledger.entries if isinstance(piece.kept, Kept)}
    last = max(key.step for key in kept)
    counted = np.stack([_counted(rank, step) for step in range(last + 1)])
    np.save(job.folder / COUNTED_FILE, counted)
    np.savez(job.folder / SEQUENCES_FILE, allow_pickle=False, **_sequences(rank, last))
    with_gradients = [key.step for key in kept if key.phase == GRADIENT]
    if with_gradients:
        moves = _Moves(rank, job.plan, max(with_gradients), kept, counted[max(with_gradients)])
        (job.folder / MOVED_FILE).write_text(json.dumps(moves.told(own_block=job.block is not None)))
    return ledger


def _counted(rank: Any, step: int) -> np.ndarray:
    """[samples, tokens]: which tokens of a step have a target that counts."""
    targets = np.concatenate([each.targets.cpu().numpy() for each in rank.batches.training(step, 1.0)])
    ignored = rank.plan.train.ignore_token
    return np.ones(targets.shape, bool) if ignored is None else targets != ignored


def _sequences(rank: Any, step: int) -> dict[str, np.ndarray]:
    """What the first and the last sequence of a step are made from: the fields of a microbatch that say so, with the sample's number."""
    microbatches, found = list(rank.batches.training(step, 1.0)), dict[str, np.ndarray]()
    for sample, microbatch in zip(samples_checked(rank.plan), (microbatches[0], microbatches[-1]), strict=False):
        parts = {name: getattr(microbatch, name) for name in Recorded.INPUTS}
        found |= {f"{name}.{sample}": part[0].cpu().numpy() for name, part in parts.items() if part is not None}
    return found


def minimised(plan: Plan, losses: Mapping[str, np.ndarray], num_counted: int) -> float:
    """The loss that gradients are taken of, but for what routers add: the model's, and the mean over modules of multi-token prediction
    times its weight, per token that counts (DeepSeek-V3, arXiv 2412.19437, equation 25)."""
    own, *ahead = (float(losses[name].sum()) for name in loss_names(plan))
    return (own + (plan.train.mtp_loss_weight * sum(ahead) / len(ahead) if ahead else 0.0)) / num_counted


@dataclass
class _Losses:
    """An observer that keeps the losses of tokens."""

    found: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def activation(self, name: str, microbatch: Any, tokens: Sequence[slice], tensor: Any) -> None:
        if name.endswith(".losses"):
            self.found.setdefault(name, []).append(tensor.detach().cpu().double().numpy())


@dataclass
class _Moves:
    """Forwards of one step from weights that were moved. `kept` is where values lie."""

    rank: Any
    plan: Plan
    step: int
    kept: Mapping[Key, Kept]
    counted: np.ndarray

    def told(self, *, own_block: bool) -> dict[str, Any]:
        """What all parameters together say and, where that is not what the loss does, the wrong parameter nearest to the end of the model,
        or its section where none of it is wrong alone."""
        names = [name for name in moved_names(self.plan, own_block=own_block) if Key(self.step, GRADIENT, name) in self.kept]
        if not names:
            return {}
        told = {"step": self.step, "parameters": len(names), **self._moved(names), "wrong": {}}
        if not is_right(self.plan, told):
            sections = dict.fromkeys(section_of(name) for name in reversed(names))
            wrong = self._first_wrong({section: [name for name in names if section_of(name) == section] for section in sections})
            within = [name for name in reversed(names) if section_of(name) == wrong]
            each = self._first_wrong({name: [name] for name in within})
            told["wrong"] = {"name": each or wrong, **self._moved([each] if each else within or names)}
        return told

    def _first_wrong(self, groups: Mapping[str, list[str]]) -> str | None:
        return next((group for group, names in groups.items() if not is_right(self.plan, self._moved(names))), None)

    def _moved(self, names: Sequence[str]) -> dict[str, float]:
        """How much the loss changes from one end of the way to the other: as gradients say, and as it does."""
        gradients = {name: self._load(GRADIENT, name, self.step) for name in names}
        weights = {name: self._load(WEIGHT, name, self.step - 1) for name in names}
        reach, random = REACH[self.plan.precision.dtype], np.random.default_rng(0)
        usual = reach.change / 2 / reach.lean / math.sqrt(len(names))  # how far, where every parameter has an equal part in the change
        sizes = {name: max(math.sqrt(float((each * each).sum())), usual / LARGEST_MOVE) for name, each in gradients.items()}
        leaning = reach.lean / math.sqrt(sum(float((each * each).sum()) / sizes[name] ** 2 for name, each in gradients.items()) or math.inf)
        way = {name: (random.standard_normal(each.shape) + leaning / sizes[name] * each) / sizes[name] for name, each in gradients.items()}
        slope = abs(sum(float((way[name] * gradients[name]).sum()) for name in names))
        step = min(reach.change / 2 / slope if slope else math.inf, 2 * usual)
        ends = [{name: (weights[name] + sign * step * way[name]).astype(np.float32) for name in names} for sign in (1, -1)]
        said = sum(float((gradients[name] * (ends[0][name].astype(float) - ends[1][name])).sum()) for name in names)
        there, back = (self._loss(each) for each in ends)
        return {"said": said, "found": there - back, "loss": there}

    def _loss(self, moved: Mapping[str, np.ndarray]) -> float:
        """The loss of the step from the weights before it, of which some were moved."""
        import torch

        losses, context = _Losses(), self.rank.stages[0].context
        observer, context.observer = context.observer, losses
        try:
            with torch.no_grad():
                for held in self.rank.optimizer.held:
                    before = moved[held.name] if held.name in moved else self._load(WEIGHT, held.name, self.step - 1)
                    held.tensor.copy_(torch.from_numpy(before))
                for router in self.rank.stages[0].routers:
                    if router.expert_bias is not None:
                        router.expert_bias.copy_(torch.from_numpy(self._load(WEIGHT, router.bias_name, self.step - 1)))
                self.rank.refresh()
                for microbatch in self.rank.batches.training(self.step, 1.0):
                    self.rank.stages[0](microbatch, None)
        finally:
            context.observer = observer
        sums = {name: np.concatenate(each) for name, each in losses.found.items()}
        return minimised(self.plan, sums, max(1, int(self.counted.sum())))

    def _load(self, phase: str, name: str, step: int) -> np.ndarray:
        return self.kept[Key(step, phase, name)].load().astype(np.float64)


def is_right(plan: Plan, told: Mapping[str, Any]) -> bool:
    """Whether the loss changes by what gradients say, but for curvature and rounding."""
    tolerance = REACH[plan.precision.dtype].tolerance
    return bool(abs(told["found"] - told["said"]) <= tolerance * abs(told["said"]) + noise(plan, told["loss"]))


def noise(plan: Plan, loss: float) -> float:
    """What rounding of the losses themselves may make of a difference of two of them."""
    return (5e-7 if plan.precision.dtype == "fp32" else 2e-3) * abs(loss)
