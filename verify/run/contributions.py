"""What one tensor of one device is the sum of: recorded while that device runs again, so that a wrong sum
can be explained by its parts.

The gradient of a parameter is a sum over sequences and blocks of their tokens. The output of a row-parallel layer and
the input gradient of a column-parallel one are sums over leaves of the features that are cut, those of experts sums
over experts. Parts are computed apart from the run in fp64 and change none of its bits. Imported by ranks only for a
proof that has failed; torch comes as the tensors do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.base.digest import Region
from ..ledger.ledger import ACTIVATION, ACTIVATION_GRADIENT, GRADIENT, Key, LedgerWriter
from ..ledger.relations import in_bf16

if TYPE_CHECKING:
    from torch import Tensor

    from ...backend.numerics.base import Numerics
    from ...backend.ranks.training_rank import TrainingRank
    from ...backend.tensor_parallel.exchange import Outgoing
    from ...backend.tensor_parallel.norm import Norm
    from ...core.layout.leaves import Leaves
    from ...core.layout.stage_parameters import Usage
    from ...core.model.parameters import Parameter

MAX_ELEMENTS = 2**25
"""Of all parts together; those of larger sums are not kept."""


@dataclass(frozen=True)
class Part:
    """One summand: of a sequence of the global batch, of its tokens `[lo, hi)`, of a leaf of `num_leaves` of cut
    features, of an expert, or of one use of a parameter that is used twice. What is none of these is `rest`."""

    sample: int | None = None
    tokens: tuple[int, int] | None = None
    leaf: int | None = None
    num_leaves: int | None = None
    expert: int | None = None
    use: str | None = None
    rest: bool = False


Blocks = list[list[tuple[Part, np.ndarray]]]
"""The parts of a microbatch, sample by sample."""


@dataclass(frozen=True)
class Contributions:
    """The parts of a tensor with their values, fp64 [parts, ...] of the whole tensor, up to a factor that all share."""

    parts: tuple[Part, ...]
    values: np.ndarray
    narrow: np.ndarray | None = None
    """The whole tensor as products of operands in bf16 would make it, where products make it."""

    def save(self, path: Path) -> None:
        """Writes them to a file."""
        labels, narrow = (
            json.dumps([asdict(each) for each in self.parts]),
            np.empty(0) if self.narrow is None else self.narrow,
        )
        np.savez(path, labels=labels, values=self.values, narrow=narrow)

    @classmethod
    def load(cls, path: Path) -> Contributions:
        """Reads them."""
        with np.load(path) as file:
            labels = json.loads(str(file["labels"]))
            parts = tuple(Part(**{**each, "tokens": each["tokens"] and tuple(each["tokens"])}) for each in labels)
            return cls(parts, file["values"], file["narrow"] if file["narrow"].size else None)


@dataclass
class ContributionWriter(LedgerWriter):
    """A `LedgerWriter` of one device that writes the contributions to the tensor `wanted` to the file `target` as well.

    `follow` has to be called before the first step.
    """

    wanted: Key = field(default_factory=lambda: Key(0, "", ""))
    target: Path = field(default_factory=Path)
    _found: list[tuple[Part, np.ndarray]] = field(default_factory=list)
    _last: tuple[object, Callable[[], Blocks]] | None = None
    _narrow: list[np.ndarray] = field(default_factory=list)
    _rows: list[np.ndarray] = field(default_factory=list)
    _input: np.ndarray | None = None
    _head_norm: Any = None
    _numerics: Any = None

    def follow(self, rank: TrainingRank) -> None:
        """Looks into what a training rank, a `backend.ranks.training_rank.TrainingRank` of a layout of one,
        computes from now on."""
        self._numerics = rank.numerics
        if self.wanted.phase == GRADIENT or self.wanted.sample is not None:
            rank.numerics.observer = self
        for stage in rank.stages.values():
            if stage.head is not None and self.wanted.tensor == f"layers.{max(stage.stage.layers, default=0)}.output":
                self._head_norm = stage.head.norm

    def computed(self, operation: str, operands: tuple[Any, ...], result: Any) -> None:
        """Sums over tokens make the contribution of one microbatch to a gradient, which `contributed` sees next;
        products are what was multiplied last before an activation or its gradient is seen."""
        if self.wanted.phase == GRADIENT:
            if blocks := _BLOCKS.get(operation):
                self._last = result, lambda: blocks(self._numerics, *operands)
        elif operation == "partial_contract":
            x_BSC, weight_CF, leaves = operands
            x, weight = _wide(x_BSC), _wide(weight_CF)
            for leaf, (lo, hi) in enumerate(leaves.bounds):
                self._found.append((Part(leaf=leaf, num_leaves=leaves.num_leaves), x[0, :, lo:hi] @ weight[lo:hi]))
            self._narrow.append(in_bf16(x[0]) @ in_bf16(weight))
        elif operation == "multiply":
            x, matrix = map(_wide, operands)
            self._found.append((Part(use="the layer that no rank cuts"), x[0] @ matrix))
            self._narrow.append(in_bf16(x[0]) @ in_bf16(matrix))
        elif operation == "contract_experts":
            x_NC, weight_ECF, rows, leaves = operands
            self._rows = list(_expert_rows(_wide(x_NC), _wide(weight_ECF), rows, leaves.bounds))

    def contributed(self, usage: Usage, first_sample: int, contribution: Any) -> Any:
        """The parts of a gradient: of a sequence, or of blocks of its tokens."""
        last, self._last = self._last, None
        if (usage.parameter.name, self.step) != (self.wanted.tensor, self.wanted.step):
            return contribution
        # of experts: leaves (sample, block of tokens), made as they are taken
        if not isinstance(contribution, Sequence):
            block = self._numerics.gradient_block
            contribution = [(leaf, value.clone()) for leaf, value in contribution]
            whole = [
                (Part(sample, (block * at, block * (at + 1))), _wide(value)) for (sample, at), value in contribution
            ]
            contribution = iter(contribution)
        elif last is not None and last[0] is contribution:
            samples = enumerate(last[1](), first_sample)
            whole = [(replace(part, sample=sample), value) for sample, blocks in samples for part, value in blocks]
        else:
            whole = [(Part(sample), _wide(value)) for sample, value in enumerate(contribution, first_sample)]
        use = usage.role or (str(usage.use) if usage.use else None)
        self._found += [(replace(part, use=use), _oriented(usage.parameter, value)) for part, value in whole]
        return contribution

    def returned(self, exchange: Any, weights_TK: Tensor | None) -> None:
        """The rows that come back from every expert: in a forward its results, to be multiplied with their weights, or
        gradients."""
        if self.wanted.phase == GRADIENT:
            return
        inverse = exchange.inverse.cpu().numpy()
        for leaf, values in enumerate(self._rows):
            label = Part(leaf=leaf, num_leaves=len(self._rows))
            self._found += _by_expert(label, values[inverse], exchange.outgoing, weights_TK)

    def scalar(self, name: str, value: float) -> None:
        """By then all gradients of a step are there."""
        super().scalar(name, value)
        if self.wanted.phase == GRADIENT and self.step == self.wanted.step:
            self._finish()

    def _enter(self, key: Key, values: np.ndarray, shape: tuple[int, ...], region: Region) -> None:
        super()._enter(key, values, shape, region)
        if key.sample is None or self.wanted.phase == GRADIENT:
            return
        if (key.step, key.tensor, key.sample) == (
            self.wanted.step,
            self.wanted.tensor,
            self.wanted.sample,
        ) and key.phase == ACTIVATION:
            self._input = values.copy()
        if key == self.wanted:
            if self._head_norm is not None and key.phase == ACTIVATION_GRADIENT and self._input is not None:
                through = _through_norm(self._head_norm, self._input)
                self._found = [(part, through(value)) for part, value in self._found if value.shape == values.shape]
            fitting = [(part, value) for part, value in self._found if value.shape == values.shape]
            rest = values - sum((value for _, value in fitting), np.zeros(values.shape))
            self._found = [*fitting, (Part(rest=True), rest)]
            narrow = [each for each in self._narrow if each.shape == values.shape]
            self._finish(narrow[0] + rest if len(narrow) == 1 else None)
        if not key.tensor.endswith(".router"):  # which is seen among what the rest of its layer does
            self._found.clear()
            self._narrow.clear()

    def _finish(self, narrow: np.ndarray | None = None) -> None:
        """Writes what was found, once."""
        found, self._found = self._found, []
        if found and not self.target.exists() and sum(value.size for _, value in found) <= MAX_ELEMENTS:
            parts, values = zip(*found, strict=True)
            Contributions(tuple(parts), np.stack(values), narrow).save(self.target)


def _wide(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def _oriented(parameter: Parameter, value: np.ndarray) -> np.ndarray:
    """A gradient in storage orientation as the parameter is."""
    import torch

    from ...backend.gradients.parameter import canonical

    return canonical(parameter, torch.from_numpy(value)).numpy()


def _spans(length: int, block: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + block, length)) for first in range(0, length, block))


def _weight_blocks(numerics: Any, x_BSC: Tensor, y_BSF: Tensor, leaves: Leaves) -> Blocks:
    def blocks(x_SC: np.ndarray, y_SF: np.ndarray) -> list[tuple[Part, np.ndarray]]:
        return _blocks(len(x_SC), numerics.gradient_block, lambda lo, hi: x_SC[lo:hi].T @ y_SF[lo:hi])

    return [blocks(x_SC, y_SF) for x_SC, y_SF in zip(_wide(x_BSC), _wide(y_BSF), strict=True)]


def _token_blocks(numerics: Any, x_BSN: Any, tokens: object = None) -> Blocks:
    def blocks(x_SN: np.ndarray) -> list[tuple[Part, np.ndarray]]:
        return _blocks(len(x_SN), numerics.reduction_block, lambda lo, hi: x_SN[lo:hi].sum(0))

    return [blocks(x_SN) for x_SN in _wide(x_BSN)]


def _head_blocks(numerics: Numerics, x_BSLQD: Tensor, heads: object) -> Blocks:
    x_BLD = _wide(x_BSLQD).sum((1, 3))
    return [[(Part(leaf=leaf, num_leaves=len(x_LD)), value) for leaf, value in enumerate(x_LD)] for x_LD in x_BLD]


def _lookup_blocks(numerics: Any, ids_BS: Tensor, gradient_BSH: Tensor, num_rows: int) -> Blocks:
    def blocks(ids_S: np.ndarray, gradient_SH: np.ndarray) -> list[tuple[Part, np.ndarray]]:
        def rows(lo: int, hi: int) -> np.ndarray:
            total = np.zeros((num_rows + 1, gradient_SH.shape[-1]))
            np.add.at(total, ids_S[lo:hi], gradient_SH[lo:hi])
            return total[:num_rows]

        return _blocks(len(ids_S), numerics.gradient_block, rows)

    return [
        blocks(ids_S, gradient_SH) for ids_S, gradient_SH in zip(ids_BS.cpu().numpy(), _wide(gradient_BSH), strict=True)
    ]


def _blocks(length: int, block: int, value: Callable[[int, int], np.ndarray]) -> list[tuple[Part, np.ndarray]]:
    return [(Part(tokens=span), value(*span)) for span in _spans(length, block)]


def _expert_rows(
    x_NC: np.ndarray, weight_ECF: np.ndarray, rows: Any, bounds: Sequence[tuple[int, int]]
) -> Iterator[np.ndarray]:
    """The products of every leaf, [n, f], of rows that are grouped by expert."""
    for lo, hi in bounds:
        total = np.zeros((len(x_NC), weight_ECF.shape[2]))
        for group in rows.groups:
            here = slice(group.first, group.last)
            total[here] = x_NC[here, lo:hi] @ weight_ECF[group.expert, lo:hi]
        yield total


_BLOCKS: dict[str, Callable[..., Blocks]] = {
    "weight_gradient": _weight_blocks,
    "token_sums": _token_blocks,
    "head_sums": _head_blocks,
    "embedding_gradient": _lookup_blocks,
}
"""A sum over tokens -> its parts."""


def _by_expert(label: Part, rows: np.ndarray, outgoing: Outgoing, weights_TK: Any) -> Iterator[tuple[Part, np.ndarray]]:
    """What each expert brings to every token, [tokens, h], of the rows of the copies; times their
    weights, where there are any."""
    tokens, experts = outgoing.tokens.cpu().numpy(), outgoing.experts.cpu().numpy()
    places = outgoing.places_TK.cpu().numpy()
    if weights_TK is not None:
        is_sent, weights = places < len(tokens), np.zeros(len(tokens))
        weights[places[is_sent]] = _wide(weights_TK)[is_sent]
        rows = rows * weights[:, None]
    for expert in range(outgoing.num_experts):
        total, own = np.zeros((len(places), rows.shape[1])), experts == expert
        np.add.at(total, tokens[own], rows[own])
        yield replace(label, expert=expert), total


def _through_norm(norm: Norm, x: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """The backward of a norm at its input x [tokens, h], as a function of the gradient of its result."""
    import torch

    weight = norm.weight.operand.double() + norm.context.model.norm_offset

    def backward(dy: np.ndarray) -> np.ndarray:
        with torch.enable_grad():
            own = torch.from_numpy(x).double().requires_grad_()
            centred = own - own.mean(-1, keepdim=True) if norm.is_centred else own
            normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + norm.eps) * weight
        return torch.autograd.grad(normed, own, torch.from_numpy(dy))[0].numpy()

    return backward
