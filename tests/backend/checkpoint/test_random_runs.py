"""Random runs that are left and resumed under another layout: the bits of one that nobody disturbed.

Losses, gradient norms and held-out losses are compared by step; weights, moments, loss scale and biases of experts as
the checkpoint after the last step has them, which is read whole.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from helpers.gates import sampled
from helpers.random_runs import STEPS, RandomRun, random_run
from shardproof import Trainer
from shardproof.backend.base.observe import Observer
from shardproof.backend.base.step_result import StepResult
from shardproof.backend.base.urls import Place, UrlPath, place_of
from shardproof.backend.checkpoint.resume import path_of, resumption, saved_in
from shardproof.backend.checkpoint.tensors import Piece, read_tensors
from shardproof.backend.checkpoint.whole import contents_of
from shardproof.backend.launching import launch
from shardproof.backend.trainer import TrainJob, train_rank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.commands.cli import main
from shardproof.core.plan.plan import Plan

Numbers = tuple[list[tuple[int, float, str, bool]], dict[int, float]]
"""Step, loss, norm (in digits: it may be no number) and whether it was left out, of every step; and held-out losses by
the steps before."""

THREADS, PROCESSES = "threads", "processes"
CASES = [
    (21, "disk", THREADS),
    (9, "s3", THREADS),
    *((seed, "disk", THREADS) for seed in (1, 4, 6, 8, 10, 12)),
    *((seed, "s3", THREADS) for seed in (2, 3, 5, 7, 13, 15)),
    *((seed, "disk", PROCESSES) for seed in (24, 25, 31)),
    *((seed, "s3", PROCESSES) for seed in (20, 26, 39)),
]
"""Seeds of twenty; ranks that are processes get real signals."""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> tuple[str, ...]:
    """A blend of token files and the same in other shares; documents are short, so that windows hold several."""
    folder = tmp_path_factory.mktemp("data")
    for name, length in (("news", 11), ("books", 37)):
        lines = [json.dumps({"text": f"{name} {i} " + "abcdefghij"[i % 10] * (i % length)}) for i in range(120)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        options = ["--tokenizer", "bytes", "--append-eod", "-o", str(folder / name)]
        assert main(["tokenize", str(folder / f"{name}.jsonl"), *options]) == 0
    return tuple(f"{a} {folder / 'news'} {b} {folder / 'books'}" for a, b in ((0.3, 0.7), (2, 1)))


class Stops(Observer):
    """Asks a run of threads to stop before so many steps are over."""

    def __init__(self, ask: Callable[[int], None], steps: int):
        self.ask, self.steps = ask, steps

    def begin_step(self, step):
        if step + 1 == self.steps:
            self.ask(signal.SIGTERM)


def send(result: StepResult, *, steps: int) -> None:
    """A real signal to rank 0, before so many steps are over: it is heard in the last of them."""
    if result.step + 2 == steps:
        os.kill(os.getpid(), signal.SIGTERM)


def in_threads(plan: Plan, resume: str | None, run: RandomRun | None) -> tuple[Numbers, str | None]:
    world = MemoryWorld(plan.layout.world_size, timeout_s=120)

    def observer(rank: int) -> Stops | None:
        return Stops(world.stop.ask, run.stop) if run is not None and rank == run.asked else None

    result = run_threads(world, train_rank, TrainJob(plan, observer=observer, resume=resume))[0]
    steps = [(step.step, step.loss, str(step.grad_norm), step.skipped) for step in result.steps]
    return (steps, result.validation_losses), result.stopped_by


def in_processes(plan: Plan, resume: str | None, run: RandomRun | None) -> tuple[Numbers, str | None]:
    on_step = None if run is None else partial(send, steps=run.stop)
    result = Trainer(plan, transport="shm", on_step=on_step, resume=resume is not None).fit()
    found = [
        (result.first_step + i, loss, str(norm), result.first_step + i in result.skipped_steps)
        for i, (loss, norm) in enumerate(zip(result.losses, result.grad_norms, strict=True))
    ]
    held_out = dict(zip(result.validation_steps, result.validation_losses, strict=True))
    return (found, held_out), result.stopped_by


TRAIN = {THREADS: in_threads, PROCESSES: in_processes}


@dataclass
class Left:
    """What a checkpoint holds, whole."""

    tensors: dict[str, Tensor]

    @classmethod
    def at(cls, path: Place) -> Left:
        def read(transport, _):
            pieces = [
                Piece(name, saved.shape, tuple(slice(0, n) for n in saved.shape), torch.empty(saved.shape, dtype=dtype))
                for name, saved in contents_of(path).tensors.items()
                for dtype in (getattr(torch, saved.dtype),)
            ]
            read_tensors(path, pieces, transport.everyone, transport.device)
            return {piece.name: piece.tensor for piece in pieces}

        return cls(run_threads(MemoryWorld(1, timeout_s=60), read, None)[0])

    def differences(self, other: Left) -> list[str]:
        assert self.tensors and self.tensors.keys() == other.tensors.keys()
        return [name for name, tensor in self.tensors.items() if not torch.equal(tensor, other.tensors[name])]


def saving(plan: Plan, run: RandomRun, folder: str, steps: int = STEPS) -> Plan:
    return replace(plan, checkpoint=replace(run.saves, folder=folder), train=replace(plan.train, steps=steps))


def lose(folder: Place, after: int) -> None:
    """Removes the checkpoints after so many steps: those that a crash came before."""
    for saved in saved_in(folder):
        if saved.steps > after:
            saved.path.remove() if isinstance(saved.path, UrlPath) else shutil.rmtree(saved.path)


@sampled(("seed", "place", "ranks"), CASES, on_push=1)
def test_a_run_left_and_resumed_under_another_layout_has_the_bits_of_one_undisturbed(
    seed, place, ranks, data, tmp_path, request
):
    run = random_run(seed, data)
    train = TRAIN[ranks]
    if place == "s3":
        request.getfixturevalue("way")
    if place == "s3" and ranks == PROCESSES:
        for server in launch._servers():  # its ranks have the environment that it was started in
            server.close()
        launch._servers().clear()
    name = str(tmp_path / "left") if place == "disk" else f"s3://bucket/left-{seed}"
    (steps, held_out), _ = train(saving(run.first, run, str(tmp_path / "whole")), None, None)
    assert not all(skipped for *_, skipped in steps)

    until = {"signal": STEPS, "end": run.stop, "crash": min(STEPS, run.stop + 2)}[run.leaves]
    first = saving(run.first, run, name, until)
    if run.leaves == "crash":  # the checkpoint is to be there still that it goes on from
        first = replace(first, checkpoint=replace(first.checkpoint, keep=None))
    (before, _), stopped_by = train(first, None, run if run.leaves == "signal" else None)
    assert (len(before), stopped_by) == ((run.stop, "SIGTERM") if run.leaves == "signal" else (until, None))
    folder = place_of(name)
    if run.leaves == "crash":
        lose(folder, run.stop)

    second = saving(run.second, run, name)
    found = resumption(second, resume=True)
    assert found is not None and (found.saved.steps, found.changes) == (run.stop, ())
    (after, held_out_after), _ = train(second, str(found.saved.path), None)
    assert before[: run.stop] + after == steps, run.words
    assert held_out_after == {step: loss for step, loss in held_out.items() if step >= run.stop}, run.words
    assert Left.at(path_of(folder, STEPS)).differences(Left.at(path_of(tmp_path / "whole", STEPS))) == [], run.words


def test_the_twenty_have_every_feature_of_a_long_run(data):
    runs = [random_run(seed, data) for seed in sorted({seed for seed, _, _ in CASES})]
    plans = [run.first for run in runs]
    options = [plan.optimizer for plan in plans]
    assert [sum(place == each for _, place, _ in CASES) for each in ("disk", "s3")] == [10, 10]
    assert {run.leaves for run in runs} == {"signal", "end", "crash"}
    assert {plan.precision.dtype for plan in plans} == {"fp32", "bf16", "fp16"}
    assert {each.name for each in options} == {"adamw", "sgd", "muon"}
    assert {each.wsd_decay for each in options if each.schedule == "wsd"} >= {"linear", "exponential", "minus_sqrt"}
    assert {each.weight_decay_schedule for each in options} == {"constant", "linear", "cosine"}
    assert {group.frozen for each in options for group in each.groups} == {False, True}
    assert any(plan.train.packed for plan in plans) and any(plan.train.split for plan in plans)
    assert any(plan.model.is_moe for plan in plans) and any(plan.model.hidden_dropout for plan in plans)
    assert {bool(plan.batch.rampup) for plan in plans} == {bool(plan.batch.schedule) for plan in plans} == {False, True}
    for axis in ("tp", "pp", "vpp", "dp", "cp"):
        assert any(getattr(run.first.layout, axis) != getattr(run.second.layout, axis) for run in runs), axis
    assert {run.second.layout.zero for run in runs} | {run.first.layout.zero for run in runs} == {0, 1, 2, 3}
