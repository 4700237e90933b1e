"""What the ranks of a mutated run do, and one device too, besides `dynamic.train_steps`: each is called by
every rank, with its job."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.layout.layout import Layout
from ...core.model.parameters import expert_biases, parameters
from ...core.plan.plan import Plan
from ...core.plan.train import Checkpoint
from ..ledger.ledger import NO_STEP, RankLedger
from ..run.proof_run import ProofJob, follow, writer_of

if TYPE_CHECKING:
    from ...backend.transport.base import Group

if TYPE_CHECKING:
    import torch

    from ...backend.gradients.parameter import Shard
    from ...backend.transport.base import Transport

MAX_FILE_BYTES = 10_000
"""Of an export's files: several to a model."""


@dataclass(frozen=True)
class Resumed:
    """Training that is saved after a step and goes on from there, with `layout` where that is
    given: of equally many ranks.

    The ledger begins with what was loaded, as the state after the step that was saved.
    """

    layout: Layout | None = None

    def __call__(self, transport: Transport, job: ProofJob) -> RankLedger:
        from ...backend.checkpoint.resume import path_of
        from ...backend.checkpoint.saver import Checkpoints
        from ...backend.ranks.training_rank import TrainingRank

        plan, world = _plan_of(job), _world(transport)
        with _shared_folder(transport, world) as folder:
            plan = replace(plan, checkpoint=Checkpoint(str(folder)))
            rank = TrainingRank(transport, plan)
            rank.step(0)
            Checkpoints(plan, rank.batches.corpus, world, transport.device).save(1, rank)
            if self.layout is not None and plan.world_size > 1:
                plan = replace(plan, layout=self.layout)
            writer = writer_of(transport, job, plan)
            rank = TrainingRank(_again(transport), plan, observer=writer)
            follow(writer, rank)
            first = Checkpoints(plan, rank.batches.corpus, world, transport.device).restore(path_of(folder, 1), rank)
            rank.show_state(first - 1)
            for step in range(first, job.steps):
                rank.step(step)
            return writer.finish()


def exported(transport: Transport, job: ProofJob) -> RankLedger:
    """Training, the weights of which are written as Hugging Face files; what is read from these is entered as
    weights of one more step."""
    from ...backend.huggingface.load import load_weights
    from ...backend.huggingface.save import save_weights
    from ...backend.ranks.training_rank import TrainingRank

    plan, world = _plan_of(job), _world(transport)
    writer = writer_of(transport, job, plan)
    rank = TrainingRank(transport, plan, observer=writer)
    follow(writer, rank)
    rank.show_state(NO_STEP)
    for step in range(job.steps):
        rank.step(step)
    rank.settle()
    with _shared_folder(transport, world) as folder:
        with rank.whole_masters():
            save_weights(plan, str(folder), rank.saved_shards, world, transport.device, MAX_FILE_BYTES)
        if world.rank == 0:
            shards = _empty_shards(plan, transport.device)
            load_weights(plan.model, str(folder), shards)
            writer.begin_step(job.steps)
            for shard in shards:
                writer.weight(shard.parameter.name, shard.slices, shard.tensor)
    return writer.finish()


def _plan_of(job: ProofJob) -> Plan:
    assert isinstance(job.plan, Plan), "mutants are of one model"
    return job.plan


def _world(transport: Transport) -> Group:
    return transport.group("scenario", "world", range(transport.world_size))


@contextmanager
def _shared_folder(transport: Transport, world: Group) -> Iterator[Path]:
    """A new folder that all ranks see, which goes when rank 0 leaves."""
    from ...backend.transport.gather_values import gather_values

    with tempfile.TemporaryDirectory(prefix="shardproof-scenario-") as own:
        folder = Path(gather_values(world, own, transport.device)[0])
        yield folder
        world.barrier()


def _again(transport: Transport) -> Transport:
    """The same ranks, with names for groups and channels that were not used yet: for a second start of training."""
    from ...backend.transport.base import Channel, Transport

    class Again(Transport):
        def __init__(self) -> None:
            super().__init__(transport.global_rank, transport.world_size, transport.device, transport.recorder)
            self.watch = transport.watch

        def _group(self, name: str, axis: str, ranks: Sequence[int]) -> Group:
            return transport.group(f"again/{name}", axis, ranks)

        def _channel(self, name: str, source: int, destination: int) -> Channel:
            return transport.channel(f"again/{name}", source, destination)

    return Again()


def _empty_shards(plan: Plan, device: torch.device) -> list[Shard]:
    """Every saved parameter of the model in whole, to be read into."""
    import torch

    from ...backend.gradients.parameter import initial_shard

    everything = (*parameters(plan.model), *expert_biases(plan.model))
    wholes = [(each, tuple(slice(0, size) for size in each.shape)) for each in everything]
    return [initial_shard(each, slices, None, device, torch.float32) for each, slices in wholes]
