"""What every rank of a real step computes and sends, against what `core.program` says: per action, as
multisets and to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from shardproof import Plan, lower
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.program import Operation
from shardproof.core.program.of_rank import differences, recorded_by_action, step_of_rank
from shardproof.core.schedule.action import Action


def recorded_step(transport, plan: Plan) -> list[tuple[Action | None, Operation]]:
    """`(action, operation)` in the order of one rank's first step; None for what belongs to no action."""
    transport.recorder.enabled = True
    rank = TrainingRank(transport, plan)
    rank.step(0)
    rank.settle()
    return transport.recorder.events


def assert_every_action_records_the_program(
    plan: Plan, only: Callable[[Operation], bool] = lambda operation: True
) -> Counter[Operation]:
    """Runs one step with all ranks as threads; of its operations those are compared, and counted in the result,
    that `only` lets through.

    Whatever a rank does outside of its schedule's actions is what `load_batch` says, and nothing else.
    """
    schedule = lower(schedule_for(plan), max_active_stages=plan.schedule.max_active_stages)
    everything: Counter[Operation] = Counter()
    for global_rank, events in enumerate(
        run_threads(MemoryWorld(plan.layout.world_size, timeout_s=60), recorded_step, plan)
    ):
        expected = {
            action: Counter({each: count for each, count in program.items() if only(each)})
            for action, program in step_of_rank(plan, schedule, global_rank).items()
        }
        recorded = recorded_by_action(event for event in events if only(event[1]))
        assert not differences(expected, recorded), f"rank {global_rank}"
        everything += sum((program for action, program in expected.items() if action is not None), Counter())
    return everything
