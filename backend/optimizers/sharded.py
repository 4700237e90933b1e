"""`ShardedOptimizer`: updates of a rank's shards from gradients divided by the token count and clipped by the norm of
the whole gradient.

Updates are elementwise (`updates`), so cuts change no bits; but for Muon's (`muon`), which brings whole matrices
together. What rests in host memory comes to the device in pieces for it (`offloaded_moments`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...core.plan.optimizer import Optimizer, Update
from ..base.host_copies import HostCopies
from .held import Held
from .muon import Muon
from .offloaded_moments import OffloadedMoments, num_offloaded
from .updates import Row, Step, update_rows

COUNT = "step"
"""The name of the count of updates in what an update goes on from, by torch."""


class ShardedOptimizer:
    """The plan's optimizer over what one rank holds. `learning_rate` and `weight_decay` are those of the next step,
    which parameters have as `Optimizer.update_of` says."""

    def __init__(
        self,
        held: Sequence[Held],
        choice: Optimizer,
        learning_rate: float,
        *,
        copies: HostCopies | None = None,
        offloaded: float = 0.0,
        muon: Muon | None = None,
    ):
        """`muon` has the matrices that are orthogonalised, where there are any. With `copies` the moments of the
        first tensors rest in host memory, at least the share `offloaded` of all, and of those that rest there
        themselves."""
        self.held = tuple(held)
        self._device = None if copies is None else copies.device
        self.learning_rate = learning_rate
        self.weight_decay = choice.weight_decay
        self._choice = choice
        self._muon = muon
        self._updates = {id(one.tensor): choice.update_of(one.parameter) for one in self.held}
        self._order = list(dict.fromkeys(self._updates.values()))
        self._updated = {id(one.tensor): _by_rows(one.tensor) for one in self.held}
        self._states: dict[int, dict[str, Tensor]] = {}
        number = num_offloaded([one.tensor.nbytes for one in self.held], offloaded)
        first = [one for place, one in enumerate(self.held) if place < number or one.rounded is not None]
        # in host memory, those of one update together, and by tensor their numbers there
        self._away = sorted(first if copies is not None else (), key=self._group)
        self._numbers = {id(one.tensor): number for number, one in enumerate(self._away)}
        self._offloaded: OffloadedMoments | None = None
        if copies is not None and self._away:
            shapes = [tuple(self._updated[id(one.tensor)].shape) for one in self._away]
            masters = {
                number: self._updated[id(one.tensor)].view(-1)
                for number, one in enumerate(self._away)
                if one.rounded is not None
            }
            num_moments = len(self.update_of(self._away[0]).states)
            groups = list(map(self._group, self._away))
            self._offloaded = OffloadedMoments(copies, shapes, groups, num_moments=num_moments, masters=masters)

    def update_of(self, one: Held) -> Update:
        """How a held tensor follows from its gradient."""
        return self._updates[id(one.tensor)]

    @torch.no_grad()
    def step(
        self,
        gradients: Sequence[Tensor],
        coefficient: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> None:
        """Updates every tensor of `held` from its gradient times `coefficient`, fp64 []; gradients are in the order of
        `held`, and used up. Where `skip`, bool [], is true nothing changes. The host waits for neither."""
        # the kernel divides as it goes, and leaves out the update, as it does for torch's loss scaling
        scale = None if coefficient is None else (1 / coefficient).float()
        step = Step(self.learning_rate, self.weight_decay, scale, None if skip is None else skip.float())
        laid_out = [self._gradient(one, gradient) for one, gradient in zip(self.held, gradients, strict=True)]
        here = [pair for pair in zip(self.held, laid_out, strict=True) if id(pair[0].tensor) not in self._numbers]
        if self._muon is not None:
            self._muon.step(*self._of_muon(here), step)
        for update in dict.fromkeys(self.update_of(one) for one, _ in here if self.update_of(one).name != "muon"):
            own = [pair for pair in here if self.update_of(pair[0]) == update]
            rows, counts = [self._row(*pair) for pair in own], self._counts([one for one, _ in own])
            update_rows(update, self._choice, rows, counts, step)
        if self._offloaded is not None:
            self._update_offloaded(self._offloaded, laid_out, step)

    def _gradient(self, one: Held, gradient: Tensor) -> Tensor:
        """Laid out as what is updated."""
        updated = self._updated[id(one.tensor)]
        return _laid_out_as(updated, gradient if updated is one.tensor else gradient.mT)

    def _row(self, one: Held, gradient: Tensor) -> Row:
        state = self._state(one)
        return self._updated[id(one.tensor)], gradient, *(state[name] for name in self.update_of(one).states)

    def _of_muon(self, given: Sequence[tuple[Held, Tensor]]) -> tuple[dict[int, Row], dict[int, Update]]:
        """The rows of matrices in the orientation of their parameters, and their updates, by tensors' identities."""
        own = [(one, gradient) for one, gradient in given if self.update_of(one).name == "muon"]
        turned = {id(one.tensor): self._updated[id(one.tensor)] is not one.tensor for one, _ in own}
        rows = {id(one.tensor): self._row(one, gradient) for one, gradient in own}
        rows = {key: tuple(each.mT for each in row) if turned[key] else row for key, row in rows.items()}
        return rows, {id(one.tensor): self.update_of(one) for one, _ in own}

    def _counts(self, own: Sequence[Held]) -> list[Tensor]:
        return [self._state(one)[COUNT] for one in own if self.update_of(one).is_counted]

    def _update_offloaded(self, offloaded: OffloadedMoments, laid_out: Sequence[Tensor], step: Step) -> None:
        """Piece by piece, each with what has come for it."""
        gradient_of = {id(one.tensor): gradient for one, gradient in zip(self.held, laid_out, strict=True)}
        for piece, brought in offloaded.brought():
            rows: list[Row] = []
            counts: list[Tensor] = []
            rounded: list[Tensor] = []
            update = self.update_of(self._away[piece.parts[0].tensor])
            for part in piece.parts:
                one = self._away[part.tensor]
                updated, length = self._updated[id(one.tensor)], part.hi - part.lo
                *moments, weights = brought[:, part.place : part.place + length].unbind()
                if one.rounded is None:
                    moments, weights = [*moments, weights], updated.view(-1)[part.lo : part.hi]
                gradient = gradient_of[id(one.tensor)].view(-1)[part.lo : part.hi]
                # counted with the last of its parts
                is_last = part.hi == updated.numel()
                counts += [count if is_last else count.clone() for count in self._counts([one])]
                rows.append((weights, gradient, *moments))
                if one.rounded is not None:
                    rounded.append(_by_rows(one.rounded).view(-1)[part.lo : part.hi])
            update_rows(update, self._choice, rows, counts, step)
            if rounded:
                torch._foreach_copy_(rounded, [weights for weights, *_ in rows])

    def _state(self, one: Held) -> dict[str, Tensor]:
        """By torch's names, laid out as the tensor that is updated; zeros before the first step."""
        updated, update = self._updated[id(one.tensor)], self.update_of(one)
        state = self._states.setdefault(id(one.tensor), {})
        if not state:
            if update.is_counted:
                state[COUNT] = torch.zeros((), device=self._device or updated.device)
            number = self._numbers.get(id(one.tensor))
            if self._offloaded is None or number is None:
                moments = [torch.zeros_like(updated) for _ in update.states]
            else:
                moments = [*self._offloaded.moments(number)]
            state.update(zip(update.states, moments, strict=True))
        return state

    def moments(self, one: Held) -> Mapping[str, Tensor]:
        """`Update.states` of a held tensor, zero before the first step."""
        state = self.saved_state(one)
        return {name: state[name] for name in self.update_of(one).states}

    def saved_state(self, one: Held) -> Mapping[str, Tensor]:
        """What the update of a held tensor goes on from, by torch's names: its `moments`, and for AdamW `step`, which
        counts updates. Before the first step they are zero. They may be written to."""
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
        """Bytes on the device of all moments, once they exist."""
        here = (one for one in self.held if id(one.tensor) not in self._numbers)
        return sum(len(self.update_of(one).states) * one.tensor.nbytes for one in here)

    def _group(self, one: Held) -> tuple[bool, int, bool]:
        """Equal for what one call of the library updates: with weight decay first, weights on the device first."""
        update = self.update_of(one)
        return not update.decays, self._order.index(update), one.rounded is not None


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
