"""Random faults at random places of random layouts: each is found, at the tensor that it changes first; and
without one nothing is."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from shardproof import Plan
from shardproof.backend.data.corpus import Corpus
from shardproof.backend.gradients.gradients import Gradients
from shardproof.backend.numerics.open_sums import OpenSums
from shardproof.backend.optimizers.sharded import ShardedOptimizer
from shardproof.backend.ranks.gradient_sums import GradientSums
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.transport.base import Channel
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.backend.unsupported import unsupported
from shardproof.verify.ledger.compare import Difference, compare
from shardproof.verify.ledger.ledger import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GRADIENT,
    WEIGHT,
    RunLedger,
)
from shardproof.verify.mutations.patches import Broken, Patches, rank_here
from shardproof.verify.mutations.plans import tiny
from shardproof.verify.run.proof_run import ProofJob, one_device, prove_rank

SAMPLES, MAX_RANKS = 6, 6
CUTS = [
    cut
    for cut in itertools.product((1, 2, 3, 6), range(1, 7), (1, 2, 3, 5, 6), (1, 2))
    if 1 < functools.reduce(int.__mul__, cut) <= MAX_RANKS
]
"""tp, pp, dp and cp of two to six ranks."""


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan that the backend runs; six samples, so that those of equally many stages share a reference."""
    tp, pp, dp, cp = draw(st.sampled_from(CUTS))
    degrees = {"tp": tp, "pp": pp, "dp": dp, "cp": cp, "zero": draw(st.integers(0, 2)) if dp > 1 else 0}
    schedule = draw(st.sampled_from(("1F1B", "GPipe", "ZBH1"))) if pp > 1 else "1F1B"
    plan = tiny(samples=SAMPLES, schedule=schedule, sequence_parallel=tp > 1 and draw(st.booleans()), **degrees)
    return plan if not unsupported(plan) else replace(plan, schedule=replace(plan.schedule, name="GPipe"))


@dataclass
class Fault:
    """A fault of one rank in a step, at a `place` among those that the rank has. What it did is
    entered in `changed`."""

    plan: Plan = field(repr=False)
    global_rank: int
    step: int
    place: int
    factor: float
    changed: str = ""
    now: int = -1

    def strikes(self) -> bool:
        """Whether the calling rank is the one, in its step."""
        return rank_here() == self.global_rank and self.now == self.step

    def follow_steps(self, patches: Patches) -> None:
        """`now` is the step that the rank is in."""

        def make(step: Callable[..., Any]) -> Callable[..., Any]:
            def stepped(rank: TrainingRank, number: int, **rest: Any) -> Any:
                if rank_here() == self.global_rank:
                    self.now = number
                return step(rank, number, **rest)

            return stepped

        patches.replace(TrainingRank, "step", make)


def scales_a_gradient(fault: Fault, patches: Patches) -> None:
    def make(finished: Callable[..., Any]) -> Callable[..., Any]:
        def scaled(sums: GradientSums) -> Any:
            gradients = finished(sums)
            if fault.strikes():
                places = [place for place, gradient in enumerate(gradients) if gradient.any()]
                place = places[fault.place % len(places)]
                fault.changed = sums.parameters[place].name
                gradients[place] = gradients[place] * fault.factor
            return gradients

        return scaled

    patches.replace(GradientSums, "finished", make)


def drops_a_message(fault: Fault, patches: Patches) -> None:
    calls = itertools.count()
    own, stages = fault.plan.layout.coordinates(fault.global_rank)["pp"], fault.plan.layout.pp
    messages = fault.plan.microbatches_of(fault.plan.layout.coordinates(fault.global_rank)["dp"]) * (
        2 if 0 < own < stages - 1 else 1
    )

    def make(receive: Callable[..., Any]) -> Callable[..., Any]:
        def received(channel: Channel, *given: Any) -> Any:
            arrived = receive(channel, *given)
            if fault.strikes() and next(calls) == fault.place % messages:
                fault.changed = channel.name[0]
                return torch.zeros_like(arrived)
            return arrived

        return received

    patches.replace(Channel, "receive", make)


def permutes_a_shard(fault: Fault, patches: Patches) -> None:
    def make(share: Callable[..., None]) -> Callable[..., None]:
        def shared(rank: TrainingRank) -> None:
            share(rank)
            if fault.strikes():
                shards = [shard for shard in rank.shards if shard.storage.ndim > 1 and len(shard.storage) > 1]
                shard = shards[fault.place % len(shards)]
                fault.changed = shard.parameter.name
                shard.storage.copy_(shard.storage.roll(1, 0))

        return shared

    patches.replace(TrainingRank, "_share", make)


def keeps_an_old_parameter(fault: Fault, patches: Patches) -> None:
    def make(step: Callable[..., None]) -> Callable[..., None]:
        def stepped(optimizer: ShardedOptimizer, *given: Any) -> None:
            before = [one.tensor.clone() for one in optimizer.held]
            step(optimizer, *given)
            if fault.strikes():
                moved = [
                    place for place, one in enumerate(optimizer.held) if not torch.equal(one.tensor, before[place])
                ]
                place = moved[fault.place % len(moved)]
                fault.changed = optimizer.held[place].name
                optimizer.held[place].tensor.copy_(before[place])

        return stepped

    patches.replace(ShardedOptimizer, "step", make)


def skips_a_microbatch(fault: Fault, patches: Patches) -> None:
    dp_rank = fault.plan.layout.coordinates(fault.global_rank)["dp"]
    first = fault.plan.samples_of(dp_rank)[0] + fault.place % fault.plan.microbatches_of(dp_rank)

    def nothing(contribution: Any) -> Any:
        if isinstance(contribution, OpenSums):
            return replace(
                contribution, samples=[[torch.zeros_like(node) for node in sample] for sample in contribution.samples]
            )
        return [torch.zeros_like(each) for each in contribution]

    def make(add: Callable[..., None]) -> Callable[..., None]:
        def added(gradients: Gradients, usage: Any, first_sample: int, contribution: Any) -> None:
            skipped = first_sample == first and fault.strikes()
            add(gradients, usage, first_sample, nothing(contribution) if skipped else contribution)

        return added

    patches.replace(Gradients, "add", make)


def swaps_the_data_of_two_ranks(fault: Fault, patches: Patches) -> None:
    dp = fault.plan.layout.dp
    one = fault.place % dp
    other = (one + 1 + fault.global_rank % (dp - 1)) % dp
    intervals = [fault.plan.samples_of(each) for each in (one, other)]
    before = fault.step * fault.plan.batch.global_size

    def make(batch: Callable[..., Any]) -> Callable[..., Any]:
        def swapped(corpus: Corpus, first: int, last: int, *rest: Any) -> Any:
            if (first - before, last - before) in intervals:
                start, _ = intervals[1 - intervals.index((first - before, last - before))]
                first, last = before + start, before + start + len(range(*intervals[0]))
            return batch(corpus, first, last, *rest)

        return swapped

    patches.replace(Corpus, "batch", make)


Breaks = Callable[[Fault, Patches], None]
ALWAYS: list[Breaks] = [scales_a_gradient, permutes_a_shard, keeps_an_old_parameter, skips_a_microbatch]


def breaks_of(plan: Plan) -> list[Breaks]:
    """The faults that a layout can have. Ranks whose data are swapped have equally many samples."""
    messages = [drops_a_message] if plan.layout.pp > 1 else []
    data = [swaps_the_data_of_two_ranks] if plan.layout.dp > 1 and len(plan.microbatch_counts) == 1 else []
    return [*ALWAYS, *messages, *data]


def is_where_it_broke(breaks: Breaks, fault: Fault, first: Difference) -> bool:
    """Whether the first difference is the tensor that a fault changes first, on its rank: among others that hold parts
    of it, which are distinguished when values are looked at."""
    if breaks is swaps_the_data_of_two_ranks:
        return (first.key.phase, first.key.tensor) == (ACTIVATION, "embedding.output")
    if breaks is skips_a_microbatch:
        return first.key.phase == GRADIENT
    if breaks is drops_a_message:
        phase = ACTIVATION if fault.changed == "F" else ACTIVATION_GRADIENT
        return first.key.phase == phase and fault.global_rank in first.global_ranks
    phase = GRADIENT if breaks is scales_a_gradient else WEIGHT
    return (first.key.phase, first.key.tensor) == (phase, fault.changed) and fault.global_rank in first.global_ranks


def run(job: ProofJob) -> RunLedger:
    """What the ranks of a job compute as threads of this process, all on one core: on several they
    only wake each other."""
    job = replace(job, core=min(os.sched_getaffinity(0)))
    return RunLedger.merge(run_threads(MemoryWorld(job.plan.world_size, timeout_s=60), prove_rank, job))


@functools.cache
def reference(one: str, steps: int) -> RunLedger:
    """What one device computes."""
    return run(ProofJob(Plan.from_toml(one), steps))


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(plan=plans(), steps=st.sampled_from((1, 1, 2)), data=st.data())
def test_a_random_fault_is_found_where_it_is_and_a_right_run_has_no_finding(
    plan: Plan, steps: int, data: st.DataObject
) -> None:
    right = reference(one_device(plan).to_toml(), steps)
    assert compare(right, run(ProofJob(plan, steps)), plan.named_shapes) == [], plan.to_toml()
    breaks = data.draw(st.sampled_from(breaks_of(plan)))
    fault = Fault(
        plan,
        data.draw(st.integers(0, plan.world_size - 1)),
        step=steps - 1,
        place=data.draw(st.integers(0, 40)),
        factor=data.draw(st.sampled_from((0.0, 0.5, -1.0, 2.0, 1 + 2.0**-20))),
    )
    event(breaks.__name__)

    def broken(patches: Patches) -> None:
        fault.follow_steps(patches)
        breaks(fault, patches)

    differences = compare(right, run(ProofJob(plan, steps, wraps_rank=Broken(broken))), plan.named_shapes)
    assert differences, f"{breaks.__name__} was not seen: {fault}\n{plan.layout}"
    first = differences[0]
    assert first.key.step == fault.step and is_where_it_broke(breaks, fault, first), (
        f"{breaks.__name__}: {fault}\n{first}\n{plan.layout}"
    )
