"""What is loaded is not what was saved: parts that are lost, exchanged or put in other places, mostly where
the layout has changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...backend.checkpoint import saver, tensors
from ...backend.checkpoint.tensors import Piece
from ...backend.ranks.batches import Batches
from ...backend.ranks.training_rank import TrainingRank
from ...core.layout.layout import Layout
from ..ledger.ledger import ACTIVATION, OPTIMIZER, WEIGHT
from .mutant import Expected, Mutant
from .mutants_checkpoint import FIRST_MOMENT, LOADED, STATE
from .patches import Function, Patches
from .plans import EXPERTS, tiny
from .scenarios import Resumed


def reads(then: Callable[[Sequence[Piece]], None], patches: Patches) -> None:
    """Something happens to the pieces of a rank when they have been read."""

    def make(read_tensors: Callable[..., None]) -> Callable[..., None]:
        def read(path: Path, pieces: Sequence[Piece], *where: object) -> None:
            read_tensors(path, pieces, *where)
            then(pieces)

        return read

    patches.replace(saver, "read_tensors", make)


def loses_whole_states(pieces: Sequence[Piece]) -> None:
    """Only moments that ranks hold in parts are merged; those of parameters that each has whole
    are left as they start."""
    for piece in pieces:
        if piece.name.startswith(STATE) and piece.shape and tuple(piece.tensor.shape) == piece.shape:
            piece.tensor.zero_()


def exchanges_optimizers(pieces: Sequence[Piece]) -> None:
    """The states of the optimizer of experts and of that of all else are loaded in the other order,
    each one flat buffer."""
    for moment in (".exp_avg", ".exp_avg_sq"):
        of_kind = [piece for piece in pieces if piece.name.startswith(STATE) and piece.name.endswith(moment)]
        experts, others = (
            [piece for piece in of_kind if (".experts." in piece.name) == expert] for expert in (True, False)
        )
        flat = [torch.cat([piece.tensor.reshape(-1) for piece in part]) for part in (experts, others)]
        for part, values in ((experts, flat[1]), (others, flat[0])):
            sizes = [piece.tensor.numel() for piece in part]
            values = values.repeat(-(-sum(sizes) // len(values)))[: sum(sizes)]
            for piece, own in zip(part, values.split(sizes), strict=True):
                piece.tensor.copy_(own.view(piece.tensor.shape))


def matches_by_position(patches: Patches) -> None:
    """Names in the order of the file meet weights in the order of the model: each weight gets the one that
    comes next of its shape."""

    def make(read_tensors: Callable[..., None]) -> Callable[..., None]:
        def read(path: Path, pieces: Sequence[Piece], *where: object) -> None:
            by_place: dict[Any, list[Piece]] = defaultdict(list)
            for piece in pieces:
                by_place[piece.name.startswith(STATE), piece.shape, str(piece.slices)].append(piece)
            names: dict[int, str] = {}
            for each in by_place.values():
                if not each[0].name.startswith(STATE):
                    names |= {
                        id(piece): name for piece, name in zip(each, sorted(piece.name for piece in each), strict=True)
                    }
            read_tensors(path, [replace(piece, name=names.get(id(piece), piece.name)) for piece in pieces], *where)

        return read

    patches.replace(saver, "read_tensors", make)


def permutes_fragments(patches: Patches) -> None:
    """What was saved in parts of one length is put together in the other order."""

    def make(shared: Function) -> Function:
        def other_end(piece: Piece, block: Any) -> Any:
            """The place in the piece is that which lies as far from its end as the right one from its beginning."""
            if (places := shared(piece, block)) is None:
                return None
            theirs, ours = places
            sizes = [part.stop - part.start for part in piece.slices]
            return theirs, tuple(
                slice(size - part.stop, size - part.start) for size, part in zip(sizes, ours, strict=True)
            )

        return other_end

    patches.replace(tensors, "_shared", make)


def keeps_old_operands(patches: Patches) -> None:
    """What layers compute with stays as the model began; only the fp32 weights are those of the checkpoint."""
    patches.replace(saver, "take_up", lambda take_up: lambda rank, pieces: None)


def keeps_old_masters(patches: Patches) -> None:
    """What layers compute with is loaded, and the fp32 weights, which the optimizer goes on from, stay as they were."""
    before: dict[int, list[tuple[Piece, Tensor]]] = {}

    def make_read(read_tensors: Callable[..., None]) -> Callable[..., None]:
        def read(path: Path, pieces: Sequence[Piece], world: Any, *where: object) -> None:
            before[world.rank] = [(piece, piece.tensor.clone()) for piece in pieces if not piece.name.startswith(STATE)]
            read_tensors(path, pieces, world, *where)

        return read

    def make_take_up(take_up: Callable[..., None]) -> Callable[..., None]:
        def take(rank: TrainingRank, pieces: Sequence[Piece]) -> None:
            take_up(rank, pieces)
            for piece, values in before.pop(rank.transport.global_rank):
                piece.tensor.copy_(values)

        return take

    patches.replace(saver, "read_tensors", make_read)
    patches.replace(saver, "take_up", make_take_up)


def restarts_the_loader(patches: Patches) -> None:
    """Ranks that the old layout did not have find no state of their own, and begin with the
    first samples of the run."""

    def make(training: Function) -> Function:
        def read(batches: Batches, step: int, loss_scale: float) -> object:
            return training(batches, step - 1 if batches._mesh.coordinates["dp"] >= 2 else step, loss_scale)

        return read

    patches.replace(Batches, "training", make)


MUTANTS = (
    Mutant(
        "CK04",
        "weights are matched by position between two dictionaries of different order",
        "huggingface/accelerate#3982",
        plan=lambda: tiny(tp=3),
        breaks=matches_by_position,
        expected=Expected(WEIGHT, "layers.0.attention.norm.weight", ("permuted",), LOADED, ranks=(0, 1, 2)),
        scenario=Resumed(),
    ),
    Mutant(
        "CK06",
        "moments of parameters that no rank cuts are lost when tp changes",
        "huggingface/nanotron@013a153c",
        plan=lambda: tiny(tp=2, dp=3, samples=6),
        breaks=partial(reads, loses_whole_states),
        expected=Expected(
            OPTIMIZER, "layers.0.attention.norm.weight.exp_avg", ("missing",), LOADED, ranks=(0, 1, 2, 3, 4, 5)
        ),
        scenario=Resumed(Layout(tp=3, dp=2)),
    ),
    Mutant(
        "CK09",
        "moments of experts and of all else are exchanged on load",
        "NVIDIA/Megatron-LM#761",
        plan=lambda: tiny(dp=2, ep=2, model=EXPERTS),
        breaks=partial(reads, exchanges_optimizers),
        expected=Expected(OPTIMIZER, FIRST_MOMENT, ("permuted",), LOADED, ranks=(0, 1)),
        scenario=Resumed(),
    ),
    Mutant(
        "CK11",
        "what layers compute with is not made anew from the weights that were loaded",
        "NVIDIA/Megatron-LM#2789",
        plan=lambda: tiny(dp=3, samples=3, dtype="bf16"),
        breaks=keeps_old_operands,
        expected=Expected(ACTIVATION, "embedding.output", ("other values", "stale"), ("F",), ranks=(0,), step=2),
        scenario=Resumed(),
    ),
    Mutant(
        "CK12",
        "fragments of a converted checkpoint are put together in another order",
        "deepspeedai/DeepSpeed#6691",
        plan=lambda: tiny(tp=3, samples=3),
        breaks=permutes_fragments,
        expected=Expected(OPTIMIZER, FIRST_MOMENT, ("permuted",), LOADED, ranks=(0, 1, 2)),
        scenario=Resumed(Layout(dp=3)),
    ),
    Mutant(
        "CK19",
        "ranks that the old layout did not have begin with the first samples again",
        "pytorch/torchtitan#409",
        plan=lambda: tiny(tp=3, dp=2, samples=6),
        breaks=restarts_the_loader,
        expected=Expected(ACTIVATION, "embedding.output", ("other values",), ("F",), ranks=(4, 5), step=2),
        scenario=Resumed(Layout(tp=2, dp=3)),
    ),
    Mutant(
        "SB06",
        "weights are loaded into what layers compute with, and the optimizer's own stay the old ones",
        "hpcaitech/ColossalAI#4618, #4758",
        plan=lambda: tiny(dp=3, samples=3, dtype="bf16"),
        breaks=keeps_old_masters,
        expected=Expected(WEIGHT, "embedding.tokens.weight", ("stale", "other values"), LOADED, ranks=(0, 1, 2)),
        scenario=Resumed(),
    ),
)
