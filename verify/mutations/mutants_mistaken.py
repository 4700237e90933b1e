"""What lies in a buffer is taken for something else: a part that begins elsewhere, the part of another rank, the
message before, the gradient of another parameter, the target of another token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...backend.data_parallel import buckets
from ...backend.data_parallel.buckets import OwnedPiece
from ...backend.numerics.exact import ExactNumerics
from ...backend.pipeline.executor import Executor
from ...backend.ranks.batches import Batches
from ...core.schedule.action import Action, Kind
from ..ledger.ledger import ACTIVATION, ACTIVATION_GRADIENT, GRADIENT
from .mutant import Expected, Mutant
from .mutants_more import OURS
from .patches import Function, Patches, rank_here
from .plans import tiny


def takes_a_message_again(patches: Patches) -> None:
    """The buffer of a received gradient is read before the second message has come."""

    def taken(original: Function) -> Function:
        last: dict[int, Tensor] = {}

        def take(self: Executor, action: Action, current: Any) -> Tensor | None:
            tensor = original(self, action, current)
            if tensor is None or action.kind is not Kind.B or action.stage:
                return tensor
            before = last.get(rank_here())
            last[rank_here()] = tensor.detach().clone()
            return tensor if before is None or action.microbatch != 1 else before.clone()

        return take

    patches.replace(Executor, "_input_of", taken)


def reads_parts_late(patches: Patches) -> None:
    """What a rank keeps of a bucket is read one element late."""
    patches.replace(OwnedPiece, "of", lambda original: lambda self, part: original(self, part.roll(-1)))


def keeps_parts_of_the_next(patches: Patches) -> None:
    """Ranks keep the weights of the next rank's part, and get the gradients of their own."""

    def interval(original: Function) -> Callable[..., tuple[int, int]]:
        return lambda elements, parts, cp, member: original(elements, parts, cp, (member + 1) % parts)

    patches.replace(buckets, "owned_interval", interval)


def shares_a_gradient(patches: Patches) -> None:
    """The gradients of two norms of one shape lie in one buffer, which the second of them has filled."""

    def reduce(original: Function) -> Function:
        def reduced(self: ExactNumerics, *given: Any) -> dict[str, Tensor]:
            totals = original(self, *given)
            same = {name: name.replace("key_norm", "query_norm") for name in totals if "key_norm" in name}
            return totals | {name: totals[other].clone() for name, other in same.items()}

        return reduced

    patches.replace(ExactNumerics, "reduce_gradients", reduce)


def shifts_after_the_cut(patches: Patches) -> None:
    """Targets are the next of a rank's own tokens, also where its next chunk begins elsewhere in the sequence."""

    def batch(original: Function) -> Function:
        def read(self: Batches, *given: Any) -> dict[str, Tensor]:
            found = dict(original(self, *given))
            targets = found["targets"].clone()
            targets[:, :-1] = found["tokens"][:, 1:]
            return found | {"targets": targets}

        return read

    patches.replace(Batches, "_batch", batch)


MUTANTS = (
    Mutant(
        "XX90",
        "the gradient of the microbatch before is taken for that of the next",
        OURS,
        lambda: tiny(pp=2),
        takes_a_message_again,
        Expected(ACTIVATION_GRADIENT, "layers.0.output", ("permuted",), ("B",), ranks=(0,)),
        steps=1,
    ),
    Mutant(
        "XX91",
        "what a rank keeps of a bucket begins one element late",
        OURS,
        lambda: tiny(dp=3, samples=3, zero=1),
        reads_parts_late,
        Expected(GRADIENT, "head.output.weight", ("permuted",), ("REDUCE_GRAD",)),
        steps=1,
    ),
    Mutant(
        "XX92",
        "ranks keep weights of the next rank's part, and gradients of their own",
        OURS,
        lambda: tiny(dp=3, samples=3, zero=1),
        keeps_parts_of_the_next,
        Expected(GRADIENT, "head.output.weight", ("permuted",), ("REDUCE_GRAD",), ranks=(2,)),
        steps=1,
    ),
    Mutant(
        "XX93",
        "the gradients of two norms lie in one buffer",
        OURS,
        lambda: tiny(dp=2, model={"qk_norm": True}),
        shares_a_gradient,
        Expected(GRADIENT, "layers.1.attention.key_norm.weight", ("permuted",), ("REDUCE_GRAD",), ranks=(0, 1)),
        steps=1,
    ),
    Mutant(
        "XX94",
        "targets are shifted after sequences were cut",
        OURS,
        lambda: tiny(cp=2),
        shifts_after_the_cut,
        Expected(ACTIVATION, "head.losses", ("other values",), ("F",)),
        steps=1,
    ),
)
