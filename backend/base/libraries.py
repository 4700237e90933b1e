"""Modules that ranks of some plans need and of others do not: a second and more of torch's code, loaded once for
all of a plan's ranks."""

from __future__ import annotations

from ...core.plan.plan import AnyPlan

CHECKPOINTS = ("shardproof.backend.checkpoint.saver",)
"""With `torch.distributed.checkpoint`."""
FULLY_SHARD = ("shardproof.backend.data_parallel.torch_fsdp", "torch._dynamo")
"""torch loads the second at the first call of the first."""


def libraries_of(plan: AnyPlan, *, saves: bool) -> tuple[str, ...]:
    """What `launch.preload` should be given before ranks train a plan; `saves` says whether
    checkpoints are theirs to write."""
    sharded = plan.data_parallel.library == "torch"
    return (*(FULLY_SHARD if sharded else ()), *(CHECKPOINTS if saves else ()))
