"""`Microbatch`: the tokens that one forward takes, and where they lie in the step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .draw_keys import DrawKeys


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of one data-parallel rank.

    `index` counts on this rank, `first_sample` is the position of its first sample in the step's global batch. `tokens`
    and `targets` are int64 [b, s], of the tokens that this context-parallel rank has. `step` counts optimizer steps;
    None is no training, where nothing is dropped; in a step that is captured its keys, and the loss scale, lie on the
    device. `counted_share` is the share of the step's tokens that count in the
    loss: losses of routers, which are means over all tokens, are scaled by it. `documents`, int64 [b, s], is for every
    token the place in its sequence at which its document begins, where documents are packed; None is one document per
    sequence. `later`, int64 [b, s, k], is what each of k modules of multi-token prediction predicts at a token, the id
    of tokens that do not count where there is nothing to predict; None where there are none. `loss_scale` is what all
    losses are multiplied by before gradients are taken of them. `lengths` are the tokens of each sample up to the last
    whose target counts, where sequences are padded documents; what follows changes nothing. `place`, int64 [], is
    `first_sample` in the memory of a device, where a captured layer finds that of the microbatch that it is replayed
    for.
    """

    index: int
    first_sample: int
    tokens: Tensor
    targets: Tensor
    step: int | DrawKeys | None = None
    counted_share: float = 1.0
    documents: Tensor | None = None
    later: Tensor | None = None
    loss_scale: float | Tensor = 1.0
    lengths: tuple[int, ...] | None = None
    place: Tensor | None = None

    @property
    def first_drawn(self) -> int | Tensor:
        """`first_sample` as random draws count from it, wherever it is."""
        return self.first_sample if self.place is None else self.place
