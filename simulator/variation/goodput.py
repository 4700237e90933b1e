"""Goodput: what failures and checkpoints leave of the time. Exponential failures of single devices, any of
which stops the whole run.

Young 1974, "A first order approximation to the optimum checkpoint interval" (CACM 17); Daly 2006, "A higher order
estimate of the optimum checkpoint interval for restart dumps" (FGCS 22): its complete cost function for the time,
equation 37 for the interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...core.plan.plan import Plan


@dataclass(frozen=True)
class Goodput:
    """`share` of the time goes into steps that count; the rest is checkpoints, restarts, and
    work that failures undo."""

    job_mtbf_s: float
    interval_s: float
    young_interval_s: float
    daly_interval_s: float
    share: float
    step_time_s: float
    tokens_per_s: float

    def report(self) -> dict[str, float]:
        """The JSON keys."""
        return {
            "job_mtbf_s": self.job_mtbf_s,
            "checkpoint_interval_s": self.interval_s,
            "young_interval_s": self.young_interval_s,
            "daly_interval_s": self.daly_interval_s,
            "goodput": self.share,
            "step_time_s": self.step_time_s,
            "tokens_per_s": self.tokens_per_s,
        }


def goodput_of(plan: Plan, step_s: float) -> Goodput:
    """The goodput of a plan whose steps take `step_s` on average. All devices fail equally often, so the run fails as
    often as all together."""
    variation = plan.variation
    assert variation.device_mtbf_s is not None
    mtbf_s = variation.device_mtbf_s / plan.layout.world_size
    daly_s = daly_interval_s(variation.checkpoint_s, mtbf_s)
    interval_s = daly_s if variation.checkpoint_every_s is None else variation.checkpoint_every_s
    share = interval_s / expected_s(
        interval_s, checkpoint_s=variation.checkpoint_s, restart_s=variation.restart_s, mtbf_s=mtbf_s
    )
    tokens_per_s = plan.batch.global_size * plan.batch.sequence / step_s * share
    return Goodput(
        mtbf_s, interval_s, young_interval_s(variation.checkpoint_s, mtbf_s), daly_s, share, step_s, tokens_per_s
    )


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Time between checkpoints that loses least, to first order (Young 1974).

    >>> young_interval_s(50.0, 10_000.0)
    1000.0
    """
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Work between checkpoints that loses least, to higher order (Daly 2006, equation 37), for checkpoints shorter than
    twice the time between failures; that time beyond."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def expected_s(work_s: float, *, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Expected time of one interval of work and its checkpoint, failures during restarts included (Daly 2006)."""
    try:
        return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((work_s + checkpoint_s) / mtbf_s)
    except OverflowError:
        return math.inf
