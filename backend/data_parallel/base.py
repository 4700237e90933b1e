"""`DataParallel`: how the copies of one stage share its gradients, the work of the optimizer, and its weights.

| implementation | each copy keeps | `core.plan.plan` |
|---|---|---|
| `replicated.ReplicatedStage` | every copy has all sums and does the same update | `layout.zero=0` |
| `sharded.ShardedStage` | a part of every bucket, which it alone updates (ZeRO) | `layout.zero` from 1 on |
| `torch_fsdp.TorchShardedStage` | rows of every parameter, by torch's `fully_shard` | `data_parallel.library="torch"` |

The trainer knows only this class. What a step asks of it, in this order: `reduce` at the stage's REDUCE_GRAD,
`finished` when STEP has all stages, then `share`, when the optimizer has changed the tensors of `pieces`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from ...core.model.parameters import Parameter
from ..base.host_copies import HostCopies
from ..gradients.gradients import ExpertCopies
from ..gradients.not_finite import Found
from ..transport.base import Group

SamplesOf = Callable[[int], tuple[int, int]]
"""The interval of the global batch that a copy of a stage has seen (`Plan.copy_samples`)."""


class Piece(Protocol):
    """A box of a parameter that this rank updates: its place in the full parameter, and the fp32 weights,
    shaped as that place."""

    @property
    def parameter(self) -> Parameter:
        """The parameter it is of."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its place."""

    @property
    def tensor(self) -> Tensor:
        """The weights."""


class DataParallel(ABC):
    """One stage on one rank. All copies of the stage make the same calls in the same order."""

    @property
    @abstractmethod
    def pieces(self) -> Sequence[Piece]:
        """What this rank updates."""

    @abstractmethod
    def reduce(self, samples_of: SamplesOf, tp: Group | None, experts: ExpertCopies | None) -> dict[str, Tensor]:
        """REDUCE_GRAD: sums over the global batch, by names that `finished` understands; those
        of a tied table by its use.

        `tp` joins ranks that know different tokens or heads, where there are such, and `experts` the copies of experts.
        Raises `ValueError` while a microbatch has not contributed.
        """

    @abstractmethod
    def finished(self, reduced: Mapping[str, Tensor], table: Tensor | None) -> list[Tensor]:
        """The gradients of `pieces`, in their order, from what `reduce` gave; `table` replaces that of a tied table,
        both of whose uses it adds."""

    @abstractmethod
    def share(self) -> None:
        """Brings the weights of `pieces`, after they have changed, to the layers of all copies."""

    def not_finite(self) -> Found:
        """What this rank's own gradients of the step had that is no number, where they were
        reduced before REDUCE_GRAD."""
        return lambda: None

    def counts(self, parameter: Parameter) -> bool:
        """Whether this rank is the one copy whose pieces of a parameter enter sums over all."""
        return True

    def settle(self) -> None:
        """Returns when what `share` brings is there, which may be later than `share` returns."""
        return

    def send_masters(self, copies: HostCopies, num_pieces: int) -> None:
        """From now on the fp32 weights of the first so many pieces rest in host memory, and of those that lie in one
        buffer with them; not those that layers compute with."""
        raise NotImplementedError(f"{type(self).__name__} keeps no fp32 weights besides those of layers")

    def rounded(self, piece: Piece) -> Tensor | None:
        """Where the update leaves the weights of a piece that rest in host memory, on the device; None for others."""
        return None

    def round_masters(self) -> None:
        """Brings fp32 weights in host memory, after they have changed there, to where updates leave them."""
        return

    def begin_batches_of(self, num_microbatches: int) -> None:
        """From here on this rank has so many microbatches in a step."""
        return

    @abstractmethod
    def gather(self) -> None:
        """UNSHARD: brings the weights that layers compute with together, where they rest in parts (ZeRO 3)."""

    @abstractmethod
    def free(self) -> None:
        """RESHARD: lets go of what `gather` brings."""

    @property
    def gathered_bytes(self) -> int:
        """Bytes of weights that `gather` has brought."""
        return 0

    @contextmanager
    def whole_masters(self) -> Iterator[None]:
        """Inside, the fp32 weights of the stage's shards are there in full, to be saved, wherever
        copies keep parts of them."""
        yield
