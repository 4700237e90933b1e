"""What the next step of a training rank depends on, as pieces of tensors with canonical names.

These are weights (fp32) and the biases of experts by their own names, what the optimizer keeps of all that is trained
(`optimizer.NAME.exp_avg`, `.exp_avg_sq` and `.step` of AdamW, `optimizer.NAME.momentum_buffer` of SGD and Muon), and
with fp16 the `loss_scale`. Of several modules every name begins with the module's.
Samples, dropout and noise follow from the number of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .tensors import Piece

if TYPE_CHECKING:
    from ..ranks.training_rank import TrainingRank

LOSS_SCALE = "loss_scale"


def pieces_of(rank: TrainingRank) -> list[Piece]:
    """What a rank holds of it, whole shards or what ZeRO leaves it. After they have been filled, `take_up` makes
    the rank go on from them.

    Where ranks cut a parameter in different places, those that count in the gradient's norm have each
    element once: they are written.
    """
    called = rank.plan.name_in_run
    held = [(one, one.counts or not rank.plan.layout.zero) for one in rank.optimizer.held]
    trained = {name for stage in rank.stages.values() for name in stage.trained}
    pieces = [Piece(called(one.name), one.parameter.shape, one.slices, one.tensor, written) for one, written in held]
    pieces += [
        Piece(called(each.parameter.name), each.parameter.shape, each.slices, each.tensor)
        for each in rank.saved_shards
        if each.parameter.name not in trained
    ]
    for one, written in held:
        for name, tensor in rank.optimizer.saved_state(one).items():
            place = (one.parameter.shape, one.slices) if tensor.ndim else ((), ())
            pieces.append(Piece(f"optimizer.{called(one.name)}.{name}", *place, tensor, written))
    if rank.plan.precision.dtype == "fp16":
        state = torch.tensor(rank.loss_scale.state)
        pieces.append(Piece(LOSS_SCALE, tuple(state.shape), (slice(0, len(state)),), state))
    return pieces


def take_up(rank: TrainingRank, pieces: Sequence[Piece]) -> None:
    """Makes a rank go on from what its pieces have been filled with. All ranks come together."""
    for piece in pieces:
        if piece.name == LOSS_SCALE:
            rank.loss_scale = rank.loss_scale.restored(piece.tensor.tolist())
    rank.refresh()
