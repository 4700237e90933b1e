"""`check_graphs`: whether a rank replays its steps as CUDA graphs."""

from __future__ import annotations

from ...core.base.errors import PlanError
from ...core.plan.plan import Plan
from ..transport.base import Transport


def check_graphs(plan: Plan, transport: Transport) -> bool:
    """Whether the plan wants graphs. Raises `PlanError` where ranks have no GPUs of their own, and hand over tensors by
    the host: that is no work of a stream."""
    if not plan.runtime.cuda_graphs:
        return False
    if not transport.is_work_of_streams:
        raise PlanError(
            f"runtime.cuda_graphs=true needs ranks with a GPU each and NCCL between them, and these ranks compute on "
            f"{transport.device}. Use --transport nccl, or runtime.cuda_graphs=false."
        )
    return True
