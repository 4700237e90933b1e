"""What every rank of a real step computes and sends, against what `core.program` says: per action, as
multisets and to the byte."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from shardproof import Plan, lower
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.program import Operation, load_batch, operations
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
        here = plan.layout.coordinates(global_rank)
        recorded: defaultdict[Action | None, Counter[Operation]] = defaultdict(Counter)
        for action, operation in filter(lambda event: only(event[1]), events):
            recorded[action][operation] += 1
        assert recorded.pop(None, Counter()) == Counter(filter(only, load_batch(plan, here["tp"])))
        # weights of a stage may be gathered again
        times = Counter(part for each in schedule.row(here["pp"]) for part in each.parts)
        for action in times:
            replica = plan.placement.replica_of(action.stage, here["pp"])
            program = operations(
                plan, action.kind, action.stage, here["tp"], here["dp"], cp_rank=here["cp"], replica=replica
            )
            expected = Counter([*filter(only, program)] * times[action])
            assert recorded.pop(action, Counter()) == expected, f"rank {global_rank}, {action}"
            everything += expected
        assert not recorded, f"rank {global_rank} computed or sent something outside of its schedule's actions"
    return everything
