"""Training goes on while a checkpoint is written, which holds what there was when it was begun."""

from __future__ import annotations

import resource
import threading

import pytest
import torch

from helpers.plans import training_plan
from shardproof.backend.checkpoint import saver
from shardproof.backend.checkpoint.resume import path_of, saved_in
from shardproof.backend.launching.launch import Workers
from shardproof.backend.trainer import TrainJob, train_rank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.base.errors import RankFailure
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.train import Checkpoint

HELD_S = 60.0
"""Far longer than the steps take that a writer is held for."""


def tiny(folder, *, steps: int = 6, **checkpoint) -> Plan:
    return training_plan(
        Layout(dp=2, zero=1), steps=steps, samples=4, sequence=8, checkpoint=Checkpoint(str(folder), **checkpoint)
    )


def train(plan: Plan, **job):
    results = run_threads(
        MemoryWorld(plan.layout.world_size, timeout_s=60), train_rank, TrainJob(plan, validate=False, **job)
    )
    return results[0]


def test_steps_are_taken_while_a_writer_is_held_up_and_the_checkpoint_is_of_its_own_step(tmp_path, monkeypatch):
    """The writers of the checkpoint after step 2 wait until step 4 is done."""
    done, waited = threading.Event(), []
    write_share = saver.write_share

    def held(path, share):
        if path.name.startswith("step-00000002"):
            waited.append(done.wait(HELD_S))
        return write_share(path, share)

    def on_step(result):
        if result.step + 1 == 4:
            done.set()

    monkeypatch.setattr(saver, "write_share", held)
    result = train(tiny(tmp_path / "held", every=2), on_step=on_step)
    assert waited == [True, True] and [saved.steps for saved in saved_in(tmp_path / "held")] == [2, 4, 6]
    assert [(event["step"], event["event"]) for event in result.events] == [(2, "saved"), (4, "saved"), (6, "saved")]
    other = train(tiny(tmp_path / "waits", every=2, asynchronous=False))
    assert [step.loss for step in result.steps] == [step.loss for step in other.steps]
    again = train(tiny(tmp_path / "held"), resume=str(path_of(tmp_path / "held", 2)))
    assert [step.loss for step in again.steps] == [step.loss for step in other.steps[2:]]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_writer_that_does_not_come_to_an_end_is_named_in_time(asynchronous, tmp_path, monkeypatch):
    write_share, released = saver.write_share, threading.Event()

    def held(path, share):
        if share.rank == 1:
            released.wait(HELD_S)
        return write_share(path, share)

    monkeypatch.setattr(saver, "write_share", held)
    with pytest.raises(RankFailure, match=r"rank 1 has not written its part within checkpoint\.timeout_s=4"):
        train(tiny(tmp_path, every=1, asynchronous=asynchronous, timeout_s=4))
    released.set()


def leave_little_room(_):
    """From now on no file of this process becomes as long as its part of a checkpoint."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_a_writer_cannot_do_ends_the_run_with_rank_and_file(asynchronous, tmp_path):
    plan = tiny(tmp_path, every=1, asynchronous=asynchronous)
    with pytest.raises(RankFailure) as failure, Workers(2, timeout_s=60) as pool:
        pool.run(train_rank, TrainJob(plan, validate=False, on_step=leave_little_room))
    what = "OSError: the checkpoint after 1 steps was not saved: rank 0: OSError: [Errno 27] File too large: "
    assert f"{what}'{tmp_path}/step-00000001.partial/__0_0.distcp'" in str(failure.value)
    assert f"See to it that {tmp_path} can be written to; there is none before it" in str(failure.value)
    assert saved_in(tmp_path) == []


def test_copies_are_made_into_the_same_memory_again():
    from shardproof.backend.checkpoint.background import Snapshots
    from shardproof.backend.checkpoint.tensors import Piece

    values = torch.arange(6.0)
    piece = Piece("a", (6,), (slice(0, 6),), values)
    snapshots = Snapshots(torch.device("cpu"))
    (first,), _ = snapshots.of([piece])
    place = first.tensor.data_ptr()
    values += 1
    (second,), _ = snapshots.of([piece])
    assert second.tensor.data_ptr() == place and place != values.data_ptr() and torch.equal(second.tensor, values)


def test_a_file_written_like_the_one_before_is_byte_by_byte_what_dcp_writes(tmp_path):
    from shardproof.backend.checkpoint.again import Frames
    from shardproof.backend.checkpoint.tensors import Piece, share_of, write_share

    def written(transport, _):
        values = [torch.arange(10.0), torch.tensor(3.0), torch.arange(12).view(3, 4).half(), torch.zeros(2, 0)]
        pieces = [
            Piece(f"part.{i}", tuple(each.shape), tuple(slice(0, size) for size in each.shape), each)
            for i, each in enumerate(values[: 4 - transport.global_rank])
        ]
        share = share_of(pieces, transport.everyone, transport.device)
        frames = Frames()
        assert frames.write(tmp_path, share) is None
        frames.learn(tmp_path / "first", share, write_share(tmp_path / "first", share))
        for each in values:
            each += 1.25
        (tmp_path / "again").mkdir(exist_ok=True)
        return frames.write(tmp_path / "again", share), write_share(tmp_path / "dcp", share)

    for rank, (again, dcp) in enumerate(run_threads(MemoryWorld(2, timeout_s=60), written, None)):
        (name,) = dcp["files"]
        content = (tmp_path / "dcp" / name).read_bytes()
        assert again == dcp, rank
        assert (tmp_path / "again" / name).read_bytes() == content != (tmp_path / "first" / name).read_bytes()


def test_pieces_of_other_shapes_are_written_by_dcp_again(tmp_path):
    from shardproof.backend.checkpoint.again import Frames
    from shardproof.backend.checkpoint.tensors import Piece, share_of, write_share

    def written(transport, _):
        def share(size):
            return share_of(
                [Piece("a", (size,), (slice(0, size),), torch.zeros(size))], transport.everyone, transport.device
            )

        frames = Frames()
        frames.learn(tmp_path, share(4), write_share(tmp_path, share(4)))
        return frames.write(tmp_path, share(5)), frames.write(tmp_path, share(4))

    ((other, same),) = run_threads(MemoryWorld(1, timeout_s=60), written, None)
    assert other is None and same is not None
