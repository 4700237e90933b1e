"""What the single device of a proof does beyond its steps, so that it can be checked itself: it keeps its values,
and what sequences of its last step were made from, and computes the gradients of one step by formulas
(`derivative`) besides its own.

Where tokens are routed it goes forward once more from the weights before that step, and keeps what its routers chose.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.model.parameters import count_parameters, expert_bias_name, expert_biases, parameters
from ...core.plan.plan import Plan
from ..ledger.ledger import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GRADIENT,
    NO_STEP,
    OPTIMIZER,
    WEIGHT,
    Key,
    RankLedger,
)
from ..ledger.stored import StoredValues
from .decoder import Inputs
from .derivative import Step, derivative, tested_names
from .forward import activation_names, as_multiplied, gradient_names, samples_checked
from .gradient_parts import Measured, measure
from .proof_run import ProofJob, trained
from .updates import moments_of

if TYPE_CHECKING:
    from torch import Tensor

    from ...backend.base.microbatch import Microbatch
    from ...backend.ranks.training_rank import TrainingRank

COUNTED_FILE = "counted.npz"
SEQUENCES_FILE = "sequences.npz"
DERIVATIVE_FILE = "derivative.json"

CAPTURE_BYTES = 2**30
"""Values of the single device that are kept: gradients, moments and weights of as many steps as there is room for,
the first in any case."""


def captured_steps(plan: Plan, steps: int) -> int:
    """Of how many steps values are kept."""
    return max(1, min(steps, CAPTURE_BYTES // (16 * count_parameters(plan.model))))


def captured_keys(plan: Plan, steps: int) -> frozenset[Key]:
    """Everything that a check of so many steps looks at."""
    names = [each.name for each in parameters(plan.model)]
    moments = [f"{each.name}.{moment}" for each in parameters(plan.model) for moment in moments_of(plan, each)]
    weights = names + [each.name for each in expert_biases(plan.model)]
    found = {Key(step, WEIGHT, name) for step in range(NO_STEP, steps) for name in weights}
    for step in range(steps):
        found |= {Key(step, GRADIENT, name) for name in names} | {Key(step, OPTIMIZER, name) for name in moments}
        for phase in (ACTIVATION, ACTIVATION_GRADIENT):
            found |= {
                Key(step, phase, name, sample)
                for name in loss_names(plan)
                for sample in range(plan.of_step(step).batch.global_size)
            }
    for phase, names in ((ACTIVATION, activation_names(plan)), (ACTIVATION_GRADIENT, gradient_names(plan))):
        found |= {
            Key(steps - 1, phase, name, sample) for name in names for sample in samples_checked(plan.of_step(steps - 1))
        }
    return frozenset(found)


def loss_names(plan: Plan) -> list[str]:
    """The losses of tokens: the model's, then those of multi-token prediction."""
    return ["head.losses", *(f"mtp.{depth}.losses" for depth in range(plan.model.num_mtp_layers))]


def reference_steps(transport: Any, job: ProofJob) -> RankLedger:
    """A `Scenario`: the trainer's steps, and what is written besides the ledger into the job's folder."""
    rank, writer = trained(transport, job)
    ledger = writer.finish()
    assert job.folder is not None and isinstance(job.plan, Plan)
    stored = {key: piece.stored for key, piece in ledger.entries if isinstance(piece.stored, StoredValues)}
    last = max(key.step for key in stored)
    counted = [_counted(rank, step) for step in range(last + 1)]
    np.savez(job.folder / COUNTED_FILE, *counted, allow_pickle=False)
    sequences = _sequences(rank, last, samples_checked(job.plan.of_step(last)))
    parts = {f"{name}.{each.sample}": getattr(each, name) for each in sequences for name in Inputs.ARRAYS}
    there = {name: part for name, part in parts.items() if part is not None}
    np.savez(job.folder / SEQUENCES_FILE, allow_pickle=False, **there)
    with_gradients = [key.step for key in stored if key.phase == GRADIENT]
    if with_gradients:
        held = _Held(rank, job.plan, max(with_gradients), stored, job.block is not None)
        (job.folder / DERIVATIVE_FILE).write_text(json.dumps(held.compared(counted[held.step])))
    return ledger


def _counted(rank: TrainingRank, step: int) -> np.ndarray:
    """[samples, tokens]: which tokens of a step have a target that counts."""
    rank.begin_batches_of(step)
    targets = np.concatenate([each.targets.cpu().numpy() for each in rank.batches.training(step, 1.0)])
    ignored = rank.plan.train.ignore_token
    return np.ones(targets.shape, bool) if ignored is None else targets != ignored


def _sequences(rank: TrainingRank, step: int, samples: Collection[int] | None = None) -> Iterator[Inputs]:
    """What the sequences of a step are made from: all of them, or those of some samples."""
    rank.begin_batches_of(step)
    for microbatch in rank.batches.training(step, 1.0):
        parts = {name: getattr(microbatch, name) for name in Inputs.ARRAYS}
        for row in range(len(microbatch.tokens)):
            if samples is None or microbatch.first_sample + row in samples:
                arrays: dict[str, Any] = {
                    name: part[row].cpu().numpy() for name, part in parts.items() if part is not None
                }
                yield Inputs(**arrays, step=step, sample=microbatch.first_sample + row)


@dataclass
class _Routed:
    """An observer of one forward: of every layer and sample what its router computed, and what it gives."""

    logits: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    outputs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def activation(self, name: str, microbatch: Microbatch, tokens: Sequence[slice], tensor: Tensor) -> None:
        match name.split("."):
            case ["layers", layer, "mlp", "router"]:
                found = self.logits
            case ["layers", layer, "output"]:
                found = self.outputs
            case _:
                return
        for row, values in enumerate(tensor.detach().cpu().double().numpy()):
            found[int(layer), microbatch.first_sample + row] = values


@dataclass
class _Held:
    """Gradients of one step, held to those of formulas. `stored` is where values lie."""

    rank: Any
    plan: Plan
    step: int
    stored: Mapping[Key, StoredValues]
    own_block: bool

    def compared(self, counted: np.ndarray) -> dict[str, object]:
        """The loss by formulas, and the fields of `Measured` of every part of every gradient that formulas give."""
        names = tested_names(self.plan, own_block=self.own_block)
        names = [name for name in names if Key(self.step, GRADIENT, name) in self.stored]
        if not names:
            return {}
        step = self._as_made(max(1, int(counted.sum())))
        right = derivative(step, self.rank.transport.device)
        parts: list[Measured] = []
        for name in names:
            own = self._load(GRADIENT, name, self.step)
            parts += measure(self.plan, name, own, right.gradients[name], right.rounded[name])
        return {
            "step": self.step,
            "loss": right.loss,
            "parts": [asdict(part) for part in parts],
            "taken": self._taken(step.routed),
        }

    def _taken(self, routed: Mapping[tuple[int, int], np.ndarray]) -> dict[str, list[int]]:
        """How many tokens of the step each expert took, by the name of the biases that move by it; nothing where
        experts have room for a limited number, as those count that found none."""
        model, counts = self.plan.model, dict[str, np.ndarray]()
        if not model.expert_bias or model.expert_capacity_factor is not None:
            return {}
        for (layer, _), own in routed.items():
            name = expert_bias_name(layer)
            counts[name] = counts.get(name, 0) + own.sum(0)
        return {name: each.tolist() for name, each in counts.items()}

    def _as_made(self, num_counted: int) -> Step:
        model, dtype = self.plan.model, self.plan.precision.dtype
        before, held = self.step - 1, [each.name for each in (*parameters(model), *expert_biases(model))]
        names = [name for name in held if Key(before, WEIGHT, name) in self.stored]
        weights = {name: as_multiplied(name, self._load(WEIGHT, name, before), dtype) for name in names}
        observed, routed = _Routed(), dict[tuple[int, int], np.ndarray]()
        if model.is_moe or self.own_block:
            routed = self._forward(observed)
        return Step(
            self.plan.of_step(self.step),
            weights,
            list(_sequences(self.rank, self.step)),
            num_counted,
            loss_scale=self.rank.loss_scale.value,
            logits=observed.logits,
            routed=routed,
            outputs=observed.outputs,
            own_block=self.own_block,
        )

    def _forward(self, observed: _Routed) -> dict[tuple[int, int], np.ndarray]:
        """Goes forward once more from the weights before the step, lets `observed` see it, and returns which experts
        worked on tokens."""
        import torch

        self.rank.begin_batches_of(self.step)
        stage, routed = self.rank.stages[0], dict[tuple[int, int], np.ndarray]()

        def keep(router: Any, _: Any, routing: Any) -> None:
            layer, first = int(router.name.split(".")[1]), router.context.microbatch.first_sample
            all_experts = np.arange(self.plan.model.num_experts)
            for row, experts_SK in enumerate(routing.experts_BSK.cpu().numpy()):
                routed[layer, first + row] = (experts_SK[..., None] == all_experts).any(1)

        observer, stage.context.observer = stage.context.observer, observed
        hooks = [router.register_forward_hook(keep) for router in stage.routers]
        try:
            with torch.no_grad():
                for held in self.rank.optimizer.held:
                    held.tensor.copy_(torch.from_numpy(self._load(WEIGHT, held.name, self.step - 1)))
                for router in stage.routers:
                    if router.expert_bias is not None:
                        router.expert_bias.copy_(torch.from_numpy(self._load(WEIGHT, router.bias_name, self.step - 1)))
                self.rank.refresh()
                for microbatch in self.rank.batches.training(self.step, 1.0):
                    stage(microbatch, None)
        finally:
            stage.context.observer = observer
            for hook in hooks:
                hook.remove()
        return routed

    def _load(self, phase: str, name: str, step: int) -> np.ndarray:
        return self.stored[Key(step, phase, name)].load().astype(np.float64)
