"""`predicted`: the step that the simulator expects of the plan that is about to run, where it knows the machine."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.base.errors import ShardproofError
from ...core.commands.commands import service
from ...core.plan.plan import AnyPlan
from ..watch.rank_messages import ON_GPUS, TransportName


@dataclass(frozen=True)
class Prediction:
    """A modelled step: its seconds, its MFU (model FLOPs of whole attention over the peak of all devices) and the
    tokens of its batch. `cluster` is the name of the machine that was modelled."""

    step_time_s: float
    mfu: float
    num_tokens: int
    cluster: str

    def mfu_of(self, num_tokens: int, elapsed_s: float) -> float:
        """The MFU of a measured step of so many tokens."""
        return self.mfu * self.step_time_s / self.num_tokens * num_tokens / elapsed_s


def predicted(plan: AnyPlan, transport: TransportName) -> Prediction | None:
    """What `simulate` says of the plan; None where its cluster does not describe the machine that runs it, or the plan
    is not simulated.

    On processors a cluster describes it that was measured (`shardproof calibrate`, `cluster.file`). On GPUs one that
    the plan names does.
    """
    if not _is_described(plan, transport):
        return None
    try:
        report = service("simulate")(plan).report
    except ShardproofError:  # a plan that the backend runs and nobody models trains all the same
        return None
    num_tokens = plan.batch.global_size * plan.batch.sequence
    return Prediction(report["step_time_s"], report["mfu"], num_tokens, plan.cluster.name)


def _is_described(plan: AnyPlan, transport: TransportName) -> bool:
    if transport in ON_GPUS:
        return plan.cluster.name != "this-host"
    return plan.cluster.sources.get("peak_flops_per_s", "").startswith("measured")
