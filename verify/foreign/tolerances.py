"""How far two runs of layers that are not ours may be apart where bits are not promised: a convention
by format, and no bound.

A bound follows from the number of terms of every sum (`verify.run.bounds`), which of foreign layers is not known. What
other orders of the same sums do to a tensor of transformer size is some ten to a hundred roundings; `RELATIVE` allows a
thousand in fp32 and ten in bf16, of the norm of the tensor. Two runs drift apart from step to step: what is allowed
grows with the steps, and by what the weights are apart.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from ..ledger.compare import whole_summary
from ..ledger.ledger import GRADIENT, NO_STEP, OPTIMIZER, SCALAR, WEIGHT, Key, RunLedger

ROUNDOFF = Key(NO_STEP, SCALAR, "unit roundoff")
"""The entry with which a rank says the largest unit roundoff of the formats it has seen."""

RELATIVE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 4e-2}
"""What part of a tensor's norm the distance may be in the first step, by the lowest format of either run."""

UNIT_ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}

NOISE = 8
"""Roundings of the largest tensor of a kind (gradients, activations) that any tensor of that kind may be off by: a
gradient that is zero but for rounding, such as that of the bias of attention's keys, is nothing but them."""


def format_of(*ledgers: RunLedger) -> str:
    """The lowest format that any rank of some runs has seen; of runs that say nothing about it fp32."""
    roundoff = max((float(piece.load()) for run in ledgers for piece in run.pieces.get(ROUNDOFF, ())), default=0.0)
    return "bf16" if roundoff > 2.0**-11 else "fp16" if roundoff > 2.0**-24 else "fp32"


@dataclass(frozen=True)
class Tolerances:
    """What the tensors of `run` may be off by from those of `reference`, as Euclidean distances."""

    reference: RunLedger
    run: RunLedger
    dtype: str

    def of(self, key: Key, norm: float, num_elements: int) -> float:
        """What a piece of a tensor may be off by, from its right norm and size.

        State of the optimizer follows the gradient, whose share of rounding it has. An adaptive optimizer moves an
        element whose gradient is rounding alone by up to the learning rate either way, and the share of rounding is
        about the share of such elements.
        """
        match key.phase:
            case phase if phase == SCALAR and key.tensor == "grad_norm":
                return self._of_norm(key.step, norm)
            case phase if phase == SCALAR:
                return self._relative(key.step) * norm
            case phase if phase == OPTIMIZER:
                share = self._rounding_share(key, key.tensor.rpartition(".")[0])
                return (self._relative(key.step) + (2 + share) * share) * norm  # of a square, too
            case phase if phase == WEIGHT:
                moved = (
                    2
                    * self._rates[key.step]
                    * math.sqrt(num_elements * min(1.0, self._rounding_share(key, key.tensor)))
                )
                return self._relative(key.step) * norm + (key.step + 1) * moved
            case _:
                return self._relative(key.step) * norm + self._noise(key)

    def _of_norm(self, step: int, norm: float) -> float:
        """The norm of all gradients is off by no more than the norm of what they are off by, which the ledgers give by
        signed sums with a standard deviation of a half, and by the rounding of its own sum."""
        distances = [
            (off, right) for key, (off, right) in self._apart.items() if (key.step, key.phase) == (step, GRADIENT)
        ]
        off, right = (
            math.sqrt(math.fsum(each**2 for each in column)) for column in zip((0.0, 0.0), *distances, strict=True)
        )
        return (4 * off / right if right else 0.0) * norm + NOISE * UNIT_ROUNDOFF[self.dtype] * norm

    def _relative(self, step: int) -> float:
        """The part of a norm that is allowed in a step."""
        return max(1, step + 1) * RELATIVE[self.dtype] + min(1.0, self._drift[step - 1])

    def _noise(self, key: Key) -> float:
        """What rounding of its neighbours alone makes of a tensor that is zero."""
        return NOISE * UNIT_ROUNDOFF[self.dtype] * self._largest[key.step, key.phase]

    def _rounding_share(self, key: Key, parameter: str) -> float:
        """What part of a parameter's gradient may be rounding, in the worst step so far."""
        gradients = [Key(step, GRADIENT, parameter) for step in range(key.step + 1)]
        shares = [self._noise(each) / self._norms[each] for each in gradients if self._norms.get(each)]
        return max([RELATIVE[self.dtype], *shares])

    @cached_property
    def _norms(self) -> dict[Key, float]:
        norms = {
            key: whole_summary(pieces).norm for key, pieces in self.reference.pieces.items() if key.phase != SCALAR
        }
        return {key: norm if math.isfinite(norm) else 0.0 for key, norm in norms.items()}

    @cached_property
    def _largest(self) -> dict[tuple[int, str], float]:
        """The largest norm of a kind in a step."""
        found: dict[tuple[int, str], float] = defaultdict(float)
        for key, norm in self._norms.items():
            found[key.step, key.phase] = max(found[key.step, key.phase], norm)
        return found

    @cached_property
    def _apart(self) -> dict[Key, tuple[float, float]]:
        """Of gradients and weights, how far they are from the right ones, and the norm of these."""
        both = [key for key in self._norms if key.phase in (GRADIENT, WEIGHT) and key in self.run.pieces]
        apart = {
            key: whole_summary(self.run.pieces[key]).distance(whole_summary(self.reference.pieces[key])) for key in both
        }
        return {key: (off, self._norms[key]) for key, off in apart.items() if math.isfinite(off)}

    @cached_property
    def _drift(self) -> dict[int, float]:
        """What part of its norm a weight is off by after a step, at most."""
        found: dict[int, float] = defaultdict(float)
        for key, (off, right) in self._apart.items():
            if key.phase == WEIGHT and right:
                found[key.step] = max(found[key.step], off / right)
        return found

    @cached_property
    def _rates(self) -> dict[int, float]:
        """The largest learning rate of a step."""
        found: dict[int, float] = defaultdict(float)
        for key, pieces in self.reference.pieces.items():
            if key.phase == SCALAR and key.tensor.startswith("learning_rate"):
                found[key.step] = max(found[key.step], pieces[0].summary.largest)
        return found
