"""AdamW on a rank's shards, of gradients divided by the token count and clipped by the norm of the whole gradient.

The update itself is torch's fused AdamW in fp32, one pass over every tensor. It is elementwise, so it gives the same
bits however a tensor is cut, but for the last elements of a tensor, fewer than a vector has, which it rounds otherwise:
those of all tensors are put one behind the other and filled up to whole vectors. What rests in host memory comes to the
device in pieces for it (`offloaded_moments`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.adamw import adamw

from ...core.model.parameters import Parameter
from ...core.plan.sections import Optimizer
from .host_copies import HostCopies
from .offloaded_moments import OffloadedMoments, num_offloaded

CLIP_EPS = 1e-6
"""Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does."""

UPDATES: dict[str, Callable[..., None]] = {"adamw": adamw}
"""`optimizer.name` -> the update; it must be elementwise, or cuts would change bits."""

VECTOR_ELEMENTS = 64
"""Tensors are updated in multiples of this: four AVX512 registers of fp32, and the cache line by which torch's
threads share a tensor."""

Row = tuple[Tensor, Tensor, Tensor, Tensor]
"""What an update reads and writes of a tensor: its values, gradient, first and second moment."""


@dataclass(frozen=True)
class Held:
    """A parameter of one stage as this rank holds it. `counts` is true on the one rank (per replica) whose
    elements enter the norm. Where `tensor` rests in host memory an update leaves its values in `rounded` too, which is
    on the device, laid out as the tensor."""

    parameter: Parameter
    slices: tuple[slice, ...]
    tensor: Tensor
    counts: bool
    rounded: Tensor | None = None

    @property
    def name(self) -> str:
        """The canonical name of the parameter."""
        return self.parameter.name


class ShardedAdamW:
    """AdamW (Loshchilov & Hutter 2019) over what one rank holds; weight decay follows `Parameter.decay`.
    `learning_rate` and `weight_decay` are those of the next step, and may be set before any."""

    def __init__(
        self,
        held: Sequence[Held],
        choice: Optimizer,
        learning_rate: float,
        *,
        copies: HostCopies | None = None,
        offloaded: float = 0.0,
    ):
        """With `copies` the moments of the first tensors rest in host memory, at least the share `offloaded` of all,
        and of those that rest there themselves."""
        self.held = tuple(held)
        self._device = None if copies is None else copies.device
        self.learning_rate = learning_rate
        self.weight_decay = choice.weight_decay
        self._choice = choice
        self._updated = {id(one.tensor): _by_rows(one.tensor) for one in self.held}
        self._states: dict[int, dict[str, Tensor]] = {}
        number = num_offloaded([one.tensor.nbytes for one in self.held], offloaded)
        first = [one for place, one in enumerate(self.held) if place < number or one.rounded is not None]
        # in host memory, those of one update together, and by tensor their numbers there
        self._away = sorted(first if copies is not None else (), key=_group)
        self._numbers = {id(one.tensor): number for number, one in enumerate(self._away)}
        self._offloaded: OffloadedMoments | None = None
        if copies is not None and self._away:
            shapes = [tuple(self._updated[id(one.tensor)].shape) for one in self._away]
            masters = {
                number: self._updated[id(one.tensor)].view(-1)
                for number, one in enumerate(self._away)
                if one.rounded is not None
            }
            self._offloaded = OffloadedMoments(copies, shapes, list(map(_group, self._away)), masters=masters)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], coefficient: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Updates every tensor of `held` from its gradient times `coefficient`, fp64 []; gradients are in the order of
        `held`, and used up. Where `skip`, bool [], is true nothing changes. The host waits for neither."""
        # the kernel divides as it goes, and leaves out the update, as it does for torch's loss scaling
        scale = None if coefficient is None else (1 / coefficient).float()
        how = scale, None if skip is None else skip.float()
        laid_out = [self._gradient(one, gradient) for one, gradient in zip(self.held, gradients, strict=True)]
        here = [pair for pair in zip(self.held, laid_out, strict=True) if id(pair[0].tensor) not in self._numbers]
        for decay in (True, False):
            rows = [self._row(one, gradient) for one, gradient in here if one.parameter.decay == decay]
            self._update(rows, decay, *how)
        if self._offloaded is not None:
            self._update_offloaded(self._offloaded, laid_out, *how)

    def _gradient(self, one: Held, gradient: Tensor) -> Tensor:
        """Laid out as what is updated."""
        updated = self._updated[id(one.tensor)]
        return _laid_out_as(updated, gradient if updated is one.tensor else gradient.mT)

    def _row(self, one: Held, gradient: Tensor) -> tuple[Row, Tensor]:
        state = self._state(one)
        return (self._updated[id(one.tensor)], gradient, state["exp_avg"], state["exp_avg_sq"]), state["step"]

    def _update_offloaded(
        self,
        offloaded: OffloadedMoments,
        laid_out: Sequence[Tensor],
        scale: Tensor | None,
        skipped: Tensor | None,
    ) -> None:
        """Piece by piece, each with what has come for it."""
        gradient_of = {id(one.tensor): gradient for one, gradient in zip(self.held, laid_out, strict=True)}
        for piece, brought in offloaded.brought():
            rows: list[tuple[Row, Tensor]] = []
            rounded: list[Tensor] = []
            for part in piece.parts:
                one = self._away[part.tensor]
                updated, length = self._updated[id(one.tensor)], part.hi - part.lo
                first, second, *master = brought[:, part.place : part.place + length]
                weights = master[0] if master else updated.view(-1)[part.lo : part.hi]
                gradient = gradient_of[id(one.tensor)].view(-1)[part.lo : part.hi]
                count = self._state(one)["step"]  # counted with the last of its parts
                rows.append(
                    ((weights, gradient, first, second), count if part.hi == updated.numel() else count.clone())
                )
                if one.rounded is not None:
                    rounded.append(_by_rows(one.rounded).view(-1)[part.lo : part.hi])
            self._update(rows, self._away[piece.parts[0].tensor].parameter.decay, scale, skipped)
            if rounded:
                torch._foreach_copy_(rounded, [weights for (weights, *_), _ in rows])

    def _update(
        self,
        given: Sequence[tuple[Row, Tensor]],
        decay: bool,
        scale: Tensor | None,
        skipped: Tensor | None,
    ) -> None:
        """One call of the library for tensors with equal weight decay, each with its count of updates."""
        rows, counts = [row for row, _ in given], [count for _, count in given]
        ends = [tuple(_end(each) for each in row) for row in rows if row[0].numel() % VECTOR_ELEMENTS]
        whole: list[tuple[Tensor, ...]] = [tuple(_whole_vectors(each) for each in row) for row in rows]
        flat = [_filled(torch.cat(kind)) for kind in zip(*ends, strict=True)]
        if ends:
            whole.append(tuple(flat))
            counts.append(counts[0].clone())
        first, second = self._choice.betas
        UPDATES[self._choice.name](
            *([row[kind] for row in whole] for kind in range(4)),
            [],
            counts,
            foreach=False,
            fused=True,
            grad_scale=scale,
            found_inf=skipped,
            amsgrad=False,
            beta1=first,
            beta2=second,
            lr=self.learning_rate,
            weight_decay=self.weight_decay * decay,
            eps=self._choice.eps,
            maximize=False,
        )
        for kind in (0, 2, 3) if ends else ():
            own = [row[kind] for row in ends]
            sizes = [len(end) for end in own]
            torch._foreach_copy_(own, flat[kind][: sum(sizes)].split(sizes))

    def _state(self, one: Held) -> dict[str, Tensor]:
        """By torch's names, laid out as the tensor that is updated; zeros before the first step."""
        updated = self._updated[id(one.tensor)]
        state = self._states.setdefault(id(one.tensor), {})
        if not state:
            number = self._numbers.get(id(one.tensor))
            if self._offloaded is None or number is None:
                first, second = torch.zeros_like(updated), torch.zeros_like(updated)
            else:
                first, second = self._offloaded.moments(number)
            state.update(step=torch.zeros((), device=self._device or updated.device), exp_avg=first, exp_avg_sq=second)
        return state

    def moments(self, one: Held) -> tuple[Tensor, Tensor]:
        """First and second moment of a held tensor, zero before the first step."""
        state = self.saved_state(one)
        return state["exp_avg"], state["exp_avg_sq"]

    def saved_state(self, one: Held) -> Mapping[str, Tensor]:
        """What the update of a held tensor goes on from, by torch's names: `step`, which counts updates, and both
        moments. Before the first step they are zero. They may be written to."""
        self.settle()
        turned = self._updated[id(one.tensor)] is not one.tensor
        return {name: value.mT if turned and value.dim() > 1 else value for name, value in self._state(one).items()}

    def settle(self) -> None:
        """The host waits until all that was updated is in its memory, where it rests there."""
        if self._offloaded is not None:
            self._offloaded.settle()

    @property
    def state_tensors(self) -> list[Tensor]:
        """Everything the update keeps between steps, wherever it rests: moments and step counts, once they exist."""
        return [value for state in self._states.values() for value in state.values()]

    @property
    def state_bytes(self) -> int:
        """Bytes on the device of both moments, once they exist."""
        return sum(2 * one.tensor.nbytes for one in self.held if id(one.tensor) not in self._numbers)


def _group(one: Held) -> tuple[bool, bool]:
    """Equal for what one call of the library updates: with weight decay first, weights on the device first."""
    return not one.parameter.decay, one.rounded is not None


def _by_rows(tensor: Tensor) -> Tensor:
    """A matrix whose columns lie one after the other as its transpose: what the fused kernel would copy is then
    updated where it lies."""
    turned = tensor.dim() > 1 and not tensor.is_contiguous() and tensor.mT.is_contiguous()
    return tensor.mT if turned else tensor


def _laid_out_as(tensor: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with the strides of what it belongs to, by which the fused kernel walks over both."""
    if gradient.stride() == tensor.stride():
        return gradient
    return torch.empty_like(tensor, device=gradient.device).copy_(gradient)


def _whole_vectors(tensor: Tensor) -> Tensor:
    """All but the last elements, as long as these fill no vector."""
    rest = tensor.numel() % VECTOR_ELEMENTS
    return tensor.view(-1)[:-rest] if rest else tensor


def _end(tensor: Tensor) -> Tensor:
    """What `_whole_vectors` leaves."""
    return tensor.view(-1)[-(tensor.numel() % VECTOR_ELEMENTS) :]


def _filled(ends: Tensor) -> Tensor:
    """Zeros behind, up to whole vectors."""
    return F.pad(ends, (0, -len(ends) % VECTOR_ELEMENTS))


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor, fp64 [], that brings a norm down to `max_norm`: min(1, max_norm / (norm + 1e-6)); 1 when
    `max_norm` is 0 (no clipping)."""
    return (max_norm / (norm + CLIP_EPS)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norm)
