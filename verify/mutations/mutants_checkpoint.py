"""What is saved is not what there was: states that are empty, shifted, of another step, or written by nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.futures import Future

from ...backend.checkpoint import saver, tensors
from ...backend.checkpoint.saver import Checkpoints
from ...backend.checkpoint.tensors import Piece, Share
from ...backend.ranks.training_rank import TrainingRank
from ...core.plan.sections import DataParallel, ScheduleChoice
from ..ledger.ledger import OPTIMIZER
from .mutant import Expected, Mutant, Stops
from .patches import Function, Patches, rank_here
from .plans import tiny
from .scenarios import Resumed

LOADED = ("STEP",)
"""What is loaded is entered as what the step before left."""

STATE = "optimizer."
"""What the names of moments begin with in a checkpoint."""


def writes(change: Callable[[Sequence[Piece]], Sequence[Piece]], patches: Patches) -> None:
    """What is written is what `change` makes of the pieces of a rank; those themselves stay as they are."""

    def make(share_of: Callable[..., Share]) -> Callable[..., Share]:
        return lambda pieces, *where: share_of(change(pieces), *where)

    patches.replace(saver, "share_of", make)


def empty_state(pieces: Sequence[Piece]) -> list[Piece]:
    """The getter leaves early while there are gradients, and what it gives was never filled."""
    return [
        replace(piece, tensor=torch.zeros_like(piece.tensor)) if piece.name.startswith(STATE) else piece
        for piece in pieces
    ]


def one_flat_buffer(pieces: Sequence[Piece]) -> list[Piece]:
    """The moments of all buckets are cut from one flat buffer as if nothing lay between buckets: behind the
    first, two elements early."""
    moments = [piece for piece in pieces if piece.name.startswith(STATE) and piece.tensor.ndim]
    flat = torch.cat([piece.tensor.reshape(-1) for piece in moments])
    first, changed = 0, {}
    for piece in moments:
        early = 0 if "head." in piece.name else 2
        part = flat.roll(early)[first : first + piece.tensor.numel()]
        changed[id(piece)] = replace(piece, tensor=part.view(piece.tensor.shape))
        first += piece.tensor.numel()
    return [changed.get(id(piece), piece) for piece in pieces]


def saves_after(act: Callable[[TrainingRank, int], None], patches: Patches) -> None:
    """Something happens to the rank between the call that saves and the reading of its tensors."""

    def make(save: Callable[..., None]) -> Callable[..., None]:
        def saved(checkpoints: Checkpoints, steps: int, rank: TrainingRank) -> None:
            act(rank, steps)
            save(checkpoints, steps, rank)

        return saved

    patches.replace(Checkpoints, "save", make)


def next_step(rank: TrainingRank, steps: int) -> None:
    """Training goes on while a lane writes: it was given the live tensors, and they are those of the next step
    when it comes to them."""
    rank.step(steps)


def hidden_step(rank: TrainingRank, _: int) -> None:
    """So that there is a state to show, the getter takes a step of zero gradients and no learning rate."""
    rate, rank.optimizer.learning_rate = rank.optimizer.learning_rate, 0.0
    rank.optimizer.step([torch.zeros_like(one.tensor) for one in rank.optimizer.held])
    rank.optimizer.learning_rate = rate


def only_the_first_writes(patches: Patches) -> None:
    """Ranks but the first leave the writing early."""

    def make(write_data: Function) -> Function:
        def write(writer: FileSystemWriter, plan: object, planner: object) -> object:
            if rank_here() == 0:
                return write_data(writer, plan, planner)
            nothing: Future[list[Any]] = Future()
            nothing.set_result([])
            return nothing

        return write

    patches.replace(FileSystemWriter, "write_data", make)


def every_replica_writes(patches: Patches) -> None:
    """What several ranks hold as copies is not distinguished: each of them writes it."""
    patches.replace(
        tensors,
        "dealt_out",
        lambda _: lambda wanted: [[(piece[0], tuple(piece[3])) for piece in own] for own in wanted],
    )


FIRST_MOMENT = "embedding.tokens.weight.exp_avg"

MUTANTS = (
    Mutant(
        "CK05",
        "context-parallel ranks both write a shard that both hold",
        "NVIDIA/Megatron-LM@de29065b88",
        plan=lambda: tiny(cp=2, dp=2),
        breaks=every_replica_writes,
        expected=Stops(
            r"ValueError: embedding\.tokens\.weight has \d+ elements, and ranks 0, 1, 2, 3 are to write \d+ of it"
        ),
        scenario=Resumed(),
    ),
    Mutant(
        "CK13",
        "only the first rank's part of a model in parts is written",
        "deepspeedai/DeepSpeed#7546",
        plan=lambda: replace(tiny(dp=3, samples=3, zero=3), schedule=ScheduleChoice(max_active_stages=1)),
        breaks=only_the_first_writes,
        expected=Stops(r"rank 1 has written 0 of its \d+ pieces"),
        scenario=Resumed(),
    ),
    Mutant(
        "CK14",
        "moments of several buckets are cut as if they were one flat buffer",
        "deepspeedai/DeepSpeed#7584",
        plan=lambda: tiny(dp=3, samples=3, zero=1, sections={"data_parallel": DataParallel(bucket_bytes=2000)}),
        breaks=partial(writes, one_flat_buffer),
        expected=Expected(OPTIMIZER, FIRST_MOMENT, ("permuted", "other values"), LOADED),
        scenario=Resumed(),
    ),
    Mutant(
        "CK16",
        "the writer has the live tensors and writes them when training has gone on",
        "pytorch/pytorch#144657",
        plan=lambda: tiny(tp=2),
        breaks=partial(saves_after, next_step),
        expected=Expected(OPTIMIZER, FIRST_MOMENT, ("stale",), LOADED),
        scenario=Resumed(),
    ),
    Mutant(
        "CK17",
        "the optimizer state is saved empty",
        "pytorch/pytorch#140898",
        plan=lambda: tiny(dp=3, samples=3, zero=1),
        breaks=partial(writes, empty_state),
        expected=Expected(OPTIMIZER, FIRST_MOMENT, ("missing",), LOADED),
        scenario=Resumed(),
    ),
    Mutant(
        "CK18",
        "showing the optimizer state takes a hidden step, which decays the moments",
        "pytorch/pytorch#164929",
        plan=lambda: tiny(dp=3, samples=3),
        breaks=partial(saves_after, hidden_step),
        expected=Expected(OPTIMIZER, FIRST_MOMENT, ("scaled",), LOADED, ranks=(0, 1, 2)),
        scenario=Resumed(),
    ),
)
