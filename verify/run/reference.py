"""The single device of a proof, checked itself: against formulas in fp64 that share no code with the backend.

A sharded run that equals one device is wrong where both are: a clip coefficient that is the larger of two numbers,
gradients of the step before that nobody cleared. What one device computes in its steps is therefore held against what
it must be: losses are means of its tokens' losses, the norm is that of its gradients, moments and weights are AdamW's,
gradients are those of its loss, and the activations of two sequences are those of the model.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...backend.launching.launch import scratch_folder
from ...core.base.findings import Finding
from ...core.model.parameters import parameters
from ...core.plan.plan import Plan
from ..ledger.ledger import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GRADIENT,
    NO_STEP,
    OPTIMIZER,
    SCALAR,
    WEIGHT,
    Key,
    RunLedger,
)
from . import adamw
from .decoder import Inputs
from .forward import Made, Recorded, activation_names, gradient_names, made, router_gradients, samples_checked
from .gradient_parts import Measured, usual_size, whole
from .proof_run import ProofJob, run_ledger
from .reference_run import (
    COUNTED_FILE,
    DERIVATIVE_FILE,
    SEQUENCES_FILE,
    captured_keys,
    captured_steps,
    loss_names,
    reference_steps,
)
from .updates import WORDS, Tensors, expected_update, is_frozen, kind_of, moments_of, rate_and_decay

EXACT = 1e-9
"""Sums of exact numerics are rounded once, in fp64."""

ROUNDED = 1e-6
"""What rounding to fp32 once, or of a product of two such numbers, may change at most."""

NOTHING = -1
"""In place of the target of a token that counts for nothing."""

FORWARD = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2.5e-3}
"""An activation of a token may be off by this share of its norm (`Made.off`). In right runs of the matrix's models it
is by a sixth of it, in fp32 by a fiftieth."""

HINTS = {
    "reference-forward": (
        "Both sides have it so, from inputs that are right: look at the forward of this part, its order of features, "
        "mask, positions, scale and constants."
    ),
    "reference-data": (
        "Both sides read it so: look at how targets are shifted, at what ends a sequence or a document, and at "
        "the order in which sequences are cut."
    ),
    "reference-loss": (
        "Both sides report it so: look at what the sum of the token losses is divided by, and which tokens are in it."
    ),
    "reference-norm": "Both sides have it so: look at which parameters enter the norm, and how often.",
    "reference-update": (
        "Both sides do: look at the clip coefficient, the optimizer's call and step count, and at which tensors decay."
    ),
    "reference-gradient": (
        "Both sides have it so: look at the backward of this part, the division by the token count, and at sums that "
        "are not cleared between steps."
    ),
}


@dataclass(frozen=True)
class Reference:
    """What the check of one device found; `report` says what was checked (the JSON key `reference`)."""

    findings: tuple[Finding, ...]
    report: dict[str, Any]


def checked_ledger(job: ProofJob) -> tuple[RunLedger, Reference | None]:
    """What one device computes in a job, and whether that follows from its own values. Of several modules
    the latter is not asked."""
    if not isinstance(job.plan, Plan):
        return run_ledger(job, "memory"), None
    steps = captured_steps(job.plan, job.steps)
    with scratch_folder("reference-") as folder:
        capturing = replace(job, capture=captured_keys(job.plan, steps), folder=folder, scenario=reference_steps)
        ledger = run_ledger(capturing, "memory")
        return ledger, _Check(job.plan, ledger, folder, steps, job.block is not None).result()


def reference_words(report: Mapping[str, Any]) -> str:
    """One line of the text of a proof."""
    parts = "activations", "losses", "norms"
    what = f"{', '.join(f'{report[part]} {part}' for part in parts)} and {report['updates']} updates of tensors"
    derivative = report["derivative"]
    gradients = "gradients are not checked"
    if derivative is not None:
        gradients = (
            f"along each of {derivative['parameters']} of {derivative['of']} parameters the loss of step "
            f"{derivative['step']} changes by {derivative['found']:.4g} in all, gradients say {derivative['said']:.4g}"
        )
    verdict = "follow from its values" if report["ok"] else "DO NOT all follow from its values"
    return f"One device itself, by formulas in fp64: {what} {verdict}; {gradients}."


@dataclass
class _Check:
    plan: Plan
    ledger: RunLedger
    folder: Path
    steps: int
    own_block: bool
    num_updates: int = 0
    num_activations: int = 0

    def result(self) -> Reference:
        """The first finding of every rule, in the order of steps, with the number of those after it."""
        found: dict[str, list[Finding]] = {}
        for each in self._findings():
            found.setdefault(each.rule, []).append(each)
        findings = tuple(_with_rest(each) for each in found.values())
        report = {
            "ok": not findings,
            "steps": self.steps,
            "activations": self.num_activations,
            "losses": self.steps * (1 + bool(self.plan.model.num_mtp_layers)),
            "norms": sum(self._is_update(step) for step in range(self.steps)),
            "updates": self.num_updates,
            "derivative": self._derivative_report(),
        }
        return Reference(findings, report)

    def _findings(self) -> Iterator[Finding]:
        forward = [*self._forward(), *self._whole_loss()]
        yield from forward
        count = 0
        for step in range(self.steps):
            yield from self._loss(step)
            yield from self._loss_gradients(step)
            if self._is_update(step):
                count += 1
                yield from self._gradients_are_there(step)
                yield from self._norm(step)
                yield from self._update(step, count)
                yield from self._biases(step)
            else:
                yield from self._skipped(step)
        if not any(each.rule == "reference-forward" for each in forward):  # else formulas are those of another loss
            yield from self._gradient()

    def _is_update(self, step: int) -> bool:
        return Key(step, SCALAR, "grad_norm") in self.ledger.pieces

    @cached_property
    def _names(self) -> list[str]:
        """The parameters that training changes: those that weights were shown of at the start."""
        return [
            each.name
            for each in parameters(self.plan.model)
            if not self.own_block or self._has(Key(NO_STEP, WEIGHT, each.name))
        ]

    @cached_property
    def _frozen(self) -> set[str]:
        return {each.name for each in parameters(self.plan.model) if is_frozen(self.plan, each)}

    def _has(self, key: Key) -> bool:
        return key in self.ledger.pieces

    def _values(self, key: Key) -> np.ndarray:
        return self.ledger.pieces[key][0].load().astype(np.float64)

    def _number(self, step: int, name: str) -> float:
        return float(self.ledger.pieces[Key(step, SCALAR, name)][0].load())

    def _forward(self) -> Iterator[Finding]:
        """Activations of sequences of the last step, each from the recorded ones before it."""
        step = self.steps - 1

        def weight(name: str) -> np.ndarray:
            return self._before(Key(step, WEIGHT, name), np.zeros(()))

        for sample in samples_checked(self.plan.of_step(step)):
            keys = {name: Key(step, ACTIVATION, name, sample) for name in activation_names(self.plan)}
            values = {name: self._values(key) for name, key in keys.items() if self._has(key)}
            if not values:  # nothing but padding
                continue
            length = len(next(iter(values.values())))
            with np.load(self.folder / SEQUENCES_FILE) as parts:
                names = {name: f"{name}.{sample}" for name in Inputs.ARRAYS}
                arrays = {name: parts[at][:length] if at in parts else None for name, at in names.items()}
            inputs = Inputs(**arrays, step=step, sample=sample)  # type: ignore[arg-type]
            yield from self._data(inputs)
            recorded = Recorded(inputs, values, weight)
            for each in made(self.plan, recorded, own_block=self.own_block):
                self.num_activations += 1
                yield from self._activation("reference-forward", keys[each.name], each, values[each.name])
            keys = {name: Key(step, ACTIVATION_GRADIENT, name, sample) for name in gradient_names(self.plan)}
            values = {name: self._values(key) for name, key in keys.items() if self._has(key)}
            if not self.own_block and length == self.plan.batch.sequence:
                counted = self._counted(step)
                for each in router_gradients(self.plan, recorded, values, float(counted.mean())):
                    yield from self._activation("reference-gradient", keys[each.name], each, values[each.name])

    def _data(self, inputs: Inputs) -> Iterator[Finding]:
        """Targets are the tokens behind, those of multi-token prediction further behind in the same document, and
        documents begin where they say."""
        tokens, targets, places = inputs.tokens, inputs.targets, np.arange(len(inputs.tokens))
        begins = np.zeros_like(places) if inputs.documents is None else inputs.documents
        last = np.full(len(places), NOTHING)
        counts = self._counts(targets)
        known = counts[1:] if self.plan.train.padded else np.ones(len(places) - 1, bool)  # padding has no tokens
        right = {"target": (targets, np.append(np.where(known, tokens[1:], targets[:-1]), targets[-1:]))}
        right["beginning of the document"] = begins, np.where(begins == places, places, np.append(0, begins[:-1]))
        for depth in range(0 if inputs.later is None else self.plan.model.num_mtp_layers):
            assert inputs.later is not None
            ahead, expected = depth + 1, last.copy()
            inside = begins[ahead:] == begins[:-ahead]
            expected[:-ahead] = np.where(
                inside, np.where(self._counts(targets[ahead:]), targets[ahead:], NOTHING), NOTHING
            )
            own = inputs.later[:, depth]
            right[f"target of mtp.{depth}"] = np.where(self._counts(own), own, NOTHING), expected
        for name, (found, expected) in right.items():
            if (wrong := np.flatnonzero(found != expected)).size:
                token = int(wrong[0])
                what = (
                    f"that of token {token} must be {_id_words(expected[token])}, and it is {_id_words(found[token])}; "
                    f"so it is with {wrong.size} of {len(places)} tokens."
                )
                yield self._finding("reference-data", inputs.step, f"{name} in sample {inputs.sample}", what)

    def _counts(self, targets: np.ndarray) -> np.ndarray:
        ignored = self.plan.train.ignore_token
        return targets >= 0 if ignored is None else targets != ignored

    def _activation(self, rule: str, key: Key, expected: Made, found: np.ndarray) -> Iterator[Finding]:
        off = expected.off(found)
        tokens = np.flatnonzero(~(off <= FORWARD[expected.dtype]))
        if tokens.size:
            first = tokens[0]
            right, wrong = (each[first].reshape(-1) for each in (expected.values, found))
            column = int(np.abs(wrong - right).argmax())
            what = (
                f"what goes into it gives {right[column]:.6g} at token {first}, and it is {wrong[column]:.6g}; "
                f"{len(tokens)} of {len(off)} tokens differ, by up to {off[tokens].max():.2g} of their norm."
            )
            gradient = "gradient of " * (key.phase == ACTIVATION_GRADIENT)
            words = f"{gradient}{key.tensor} of sample {key.sample}"
            yield self._finding(rule, key.step, words, what, tensor=key.tensor)

    def _loss(self, step: int) -> Iterator[Finding]:
        own, *ahead = loss_names(self.plan)
        num_counted, total = self._num_counted(step), self._sum_of_losses(step, own)
        tokens = f"of the {num_counted} tokens that count"
        yield from self._number_finding(
            "reference-loss", step, "loss", total / num_counted, f"the mean of head.losses {tokens}"
        )
        if ahead and self._has(Key(step, SCALAR, "mtp_loss")):
            mean = math.fsum(self._sum_of_losses(step, name) for name in ahead) / num_counted / len(ahead)
            yield from self._number_finding(
                "reference-loss", step, "mtp_loss", mean, (f"the mean of the modules' losses {tokens}")
            )

    def _num_counted(self, step: int) -> int:
        return max(1, int(self._counted(step).sum()))

    def _counted(self, step: int) -> np.ndarray:
        """[samples, tokens] of a step: which count."""
        with np.load(self.folder / COUNTED_FILE) as of_steps:
            return np.asarray(of_steps[f"arr_{step}"])

    def _sum_of_losses(self, step: int, name: str) -> float:
        """Of the model's own losses those of tokens that count; padding may be all of a row."""
        masks = self._counted(step)
        keys = [Key(step, ACTIVATION, name, sample) for sample in range(len(masks))]
        every = name != "head.losses"
        losses = [(self._values(key), mask | every) for key, mask in zip(keys, masks, strict=True) if self._has(key)]
        return math.fsum(float(values[mask[: len(values)]].sum()) for values, mask in losses)

    def _loss_gradients(self, step: int) -> Iterator[Finding]:
        """What the losses of tokens count for in what is minimised: the model's one each, those of multi-token
        prediction their weight over the number of modules (DeepSeek-V3, arXiv 2412.19437, equation 25), in fp16 all
        times the loss scale, a power of 2."""
        own, *ahead = loss_names(self.plan)
        weights = {own: 1.0} | dict.fromkeys(ahead, self.plan.train.mtp_loss_weight / max(1, len(ahead)))
        scale = None if self.plan.precision.dtype == "fp16" else 1.0
        samples = range(self.plan.of_step(step).batch.global_size)
        for (name, weight), sample in itertools.product(weights.items(), samples):
            key = Key(step, ACTIVATION_GRADIENT, name, sample)
            if not self._has(key):  # nothing but padding
                continue
            found = self._values(key).reshape(-1)
            scale = 2.0 ** (math.frexp(found[0])[1] - 1) if scale is None else scale
            wrong = np.flatnonzero(~(np.abs(found - weight * scale) <= ROUNDED * weight * scale))
            if wrong.size:
                token = int(wrong[0])
                what = (
                    f"the loss of token {token} of sample {sample} counts {found[token]:.6g} times in what is "
                    "minimised, and ought to "
                    f"{weight * scale:.6g} times; so it is with {wrong.size} of {found.size} tokens."
                )
                yield self._finding("reference-gradient", step, f"{key.phase} {name}", what, tensor=name)
                return

    def _norm(self, step: int) -> Iterator[Finding]:
        keys = [Key(step, GRADIENT, name) for name in self._names]
        squares = math.fsum(float(np.square(self._values(key)).sum()) for key in keys if self._has(key))
        what = f"the root of the squares of {len(keys)} gradients"
        yield from self._number_finding("reference-norm", step, "grad_norm", math.sqrt(squares), what)

    def _number_finding(self, rule: str, step: int, name: str, expected: float, what: str) -> Iterator[Finding]:
        found = self._number(step, name)
        if not abs(found - expected) <= EXACT * abs(expected):
            times = f", {found / expected:.6g} times that" if expected else ""
            what += f" is {expected:.9g}, and {found:.9g} is reported{times}."
            yield self._finding(rule, step, name, what, tensor=name)

    def _gradients_are_there(self, step: int) -> Iterator[Finding]:
        for name in self._names:
            if not self._has(Key(step, GRADIENT, name)) and name not in self._frozen:
                what = "it is trained, and has no gradient and no update."
                yield self._finding("reference-update", step, f"weight {name}", what, tensor=name)

    def _update(self, step: int, count: int) -> Iterator[Finding]:
        """Each tensor from what was before it and, for weights, from the moments that are there: what
        is wrong is named once."""
        coefficient = adamw.clipping(self._number(step, "grad_norm"), self.plan.optimizer.clip_grad_norm)
        for parameter in (each for each in parameters(self.plan.model) if each.name in self._names):
            name = parameter.name
            if is_frozen(self.plan, parameter):
                yield from self._stays(step, parameter.name)
            if not self._has(Key(step, GRADIENT, name)):
                continue
            self.num_updates += 1
            gradient, weight = self._values(Key(step, GRADIENT, name)) * coefficient, Key(step, WEIGHT, name)
            moments = {moment: Key(step, OPTIMIZER, f"{name}.{moment}") for moment in moments_of(self.plan, parameter)}
            tensors = Tensors(
                gradient,
                self._before(weight, gradient),
                {moment: self._before(key, gradient) for moment, key in moments.items()},
                {moment: self._values(key) for moment, key in moments.items()},
            )
            keys = {**moments, "": weight}
            rate, decay = rate_and_decay(self.plan, parameter, step)
            for tensor, expected in expected_update(self.plan, parameter, tensors, rate, decay, count):
                yield from self._tensor(keys[tensor], expected, WORDS[kind_of(self.plan, parameter)])

    def _biases(self, step: int) -> Iterator[Finding]:
        """Biases of experts go up by the rate where an expert took less than the mean, and down where more (Wang et al.
        2024, arXiv 2408.15664, algorithm 1); of the step of which is known what routers chose."""
        if step != self._derivative.get("step"):
            return
        rate = self.plan.train.expert_bias_rate
        for name, taken in self._derivative["taken"].items():
            key, counts = Key(step, WEIGHT, name), np.array(taken)
            due = rate * np.sign(counts.sum() - counts * len(counts))
            found, expected = self._values(key), self._before(key, due) + due
            if (wrong := np.flatnonzero(~(np.abs(found - expected) <= ROUNDED * (np.abs(expected) + rate)))).size:
                expert = int(wrong[0])
                what = (
                    f"expert {expert} took {counts[expert]} of {counts.sum()} choices, so its bias must become "
                    f"{expected[expert]:.6g}, and it is {found[expert]:.6g}; so it is with {wrong.size} of "
                    f"{len(counts)} experts."
                )
                yield self._finding("reference-update", step, f"weight {name}", what, tensor=name)

    def _stays(self, step: int, name: str) -> Iterator[Finding]:
        """A frozen parameter has no gradient, and its weight is that of before."""
        key = Key(step, WEIGHT, name)
        changed = not self._has(key) or not np.array_equal(self._values(key), self._before(key, np.zeros(())))
        if changed or self._has(Key(step, GRADIENT, name)):
            what = "it is frozen, and it has changed." if changed else "it is frozen, and has a gradient."
            yield self._finding("reference-update", step, f"weight {name}", what, tensor=name)

    def _before(self, key: Key, like: np.ndarray) -> np.ndarray:
        """A tensor after the last step that changed it; moments begin with zeros."""
        for step in range(key.step - 1, NO_STEP - 1, -1):
            if self._has(key._replace(step=step)):
                return self._values(key._replace(step=step))
        return np.zeros_like(like)

    def _tensor(self, key: Key, expected: adamw.Expected, kind: str) -> Iterator[Finding]:
        found = self._values(key)
        wrong = ~(np.abs(found - expected.values) <= expected.bound)
        if wrong.any():
            index = tuple(int(each) for each in np.argwhere(wrong)[0])
            share = adamw.ratio_added(expected, found)
            what = (
                f"{kind} gives {expected.values[index]:.9g} at {list(index)}, to "
                f"{expected.bound[index]:.1g}, and it is {found[index]:.9g}; "
                f"{int(wrong.sum())} of {wrong.size} elements differ, and what was added to them is {share:.5g} "
                "times what is due."
            )
            yield self._finding("reference-update", key.step, f"{key.phase} {key.tensor}", what, tensor=key.tensor)

    def _skipped(self, step: int) -> Iterator[Finding]:
        """fp16 leaves out an update whose gradients are not finite, and nothing else does."""
        if self.plan.precision.dtype != "fp16":
            what = "there is no update, which only an overflow of fp16 may leave out."
            yield self._finding("reference-update", step, "grad_norm", what, tensor="grad_norm")
        for name in self._names:
            key = Key(step, WEIGHT, name)
            if not self._has(key) or not np.array_equal(self._values(key), self._before(key, np.zeros(()))):
                what = "the update was skipped, and it has changed."
                yield self._finding("reference-update", step, f"weight {name}", what, tensor=name)

    @cached_property
    def _derivative(self) -> dict[str, Any]:
        """What `reference_run` compared; nothing where formulas give no gradient."""
        file = self.folder / DERIVATIVE_FILE
        return dict(json.loads(file.read_text())) if file.exists() else {}

    @cached_property
    def _measured(self) -> list[Measured]:
        return [Measured(**each) for each in self._derivative.get("parts", [])]

    def _derivative_report(self) -> dict[str, object] | None:
        """Sums over the parameters of how fast the loss changes along each. Not tested are parts whose gradients are
        rounding alone; parts that the loss does not depend on, such as experts without a token, must have a gradient of
        zero."""
        if not self._measured:
            return None
        usual = usual_size(self._measured)
        lost = [each for each in self._measured if 0 < each.found <= each.allowed(self.plan, usual)]
        tested = [each for each in self._measured if each not in lost]
        return {
            "parameters": len({each.name for each in tested}),
            "said": math.fsum(each.said for each in tested),
            "found": math.fsum(each.found for each in tested),
            "step": self._derivative["step"] + 1,
            "of": len(list(parameters(self.plan.model))),
            "used": max(each.apart / each.allowed(self.plan, usual) for each in self._measured),
            "zero": [each.words for each in tested if not each.found],
            "untested": [each.words for each in lost],
        }

    def _whole_loss(self) -> Iterator[Finding]:
        """The losses of tokens by all formulas one after the other, with what routers chose, and no other recorded
        value."""
        if self._derivative and not self.own_block:
            step, (own, *ahead) = self._derivative["step"], loss_names(self.plan)
            later = math.fsum(self._sum_of_losses(step, name) for name in ahead) / max(1, len(ahead))
            found = (self._sum_of_losses(step, own) + self.plan.train.mtp_loss_weight * later) / self._num_counted(step)
            expected = self._derivative["loss"]
            if not abs(found - expected) <= FORWARD[self.plan.precision.dtype] * abs(expected):
                what = f"all formulas from tokens to losses give {expected:.9g} in the mean, and it is {found:.9g}."
                yield self._finding("reference-forward", step, "losses of tokens", what)

    def _gradient(self) -> Iterator[Finding]:
        """Every gradient, from the end of the model: a backward that is wrong somewhere is so for all that lies before.
        Parts are named where others of the same parameter are right."""
        usual = usual_size(self._measured)
        for name in dict.fromkeys(each.name for each in reversed(self._measured)):
            parts = [each for each in self._measured if each.name == name]
            wrong = [each for each in parts if not each.apart <= each.allowed(self.plan, usual)]
            right = [each for each in parts if each not in wrong and each.found > each.allowed(self.plan, usual)]
            for each in wrong if right or not wrong else [whole(parts)]:
                times, rounding = each.said / each.found if each.found else math.inf, each.allowed(self.plan, usual)
                what = (
                    f"along that of formulas the loss changes by {each.found:.4g}, and gradients say {each.said:.4g}"
                    f"{f', {times:.4g} times that' if each.found else ''}; "
                    f"the two are {each.apart:.4g} apart, of which rounding may be {rounding:.2g}."
                )
                step, words = self._derivative["step"], f"gradient {each.words}"
                yield self._finding("reference-gradient", step, words, what, tensor=name)

    def _finding(self, rule: str, step: int, words: str, what: str, *, tensor: str | None = None) -> Finding:
        return Finding(rule, "error", f"step {step + 1}, one device, {words}", what, HINTS[rule], tensor=tensor)


def _id_words(number: int) -> str:
    return "none" if number == NOTHING else str(number)


def _with_rest(found: list[Finding]) -> Finding:
    first, rest = found[0], len(found) - 1
    return replace(first, what=f"{first.what} So {rest} more.") if rest else first
