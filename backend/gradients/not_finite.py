"""Where a gradient stopped being a number: seen on the rank whose part of the sum it is in, before the sum
spreads it, and reported to all.

Every rank sees that *something* is not finite in the norm of the whole gradient, so all of them
end, or skip, the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from ..transport.mesh import Mesh


@dataclass(frozen=True)
class NotFinite:
    """A parameter of whose gradient `num_bad` of `num_elements` elements on a rank are infinite or no numbers; None
    where they were not counted."""

    name: str
    num_bad: int | None
    num_elements: int


Found = Callable[[], NotFinite | None]
"""What was found, once somebody asks: on a GPU the host waits then, and not before."""


def look(held: Mapping[str, Sequence[Tensor]]) -> Found:
    """Finds the last of some gradients, given as parts of their sums by name, that is not finite: the one that
    the backward came to first.

    Looks at every element once, by sums, which are finite only if all elements are. On a CPU, where nobody waits, what
    has a sum that is not is looked at again; on a GPU the gradients are gone when somebody asks.
    """
    parts = [(name, tensor) for name, tensors in held.items() for tensor in tensors if tensor.numel()]
    if not parts:
        return lambda: None
    sums = torch.stack([tensor.sum(dtype=torch.float32) for _, tensor in parts])
    if not sums.is_cuda:
        found = None if sums.sum().isfinite() else find(held)
        return lambda: found
    names, elements = [name for name, _ in parts], {name: _num_elements(tensors) for name, tensors in held.items()}

    def named() -> NotFinite | None:
        bad = [name for name, total in zip(names, sums.tolist(), strict=True) if not isfinite(total)]
        return NotFinite(bad[-1], None, elements[bad[-1]]) if bad else None

    return named


def find(held: Mapping[str, Sequence[Tensor]]) -> NotFinite | None:
    """The last of some gradients that is not finite, with its elements counted; the host waits for it."""
    for name, tensors in reversed(list(held.items())):
        suspects = [tensor for tensor in tensors if not torch.isfinite(tensor.sum(dtype=torch.float32))]
        if num_bad := sum(int((~torch.isfinite(tensor)).sum()) for tensor in suspects):
            return NotFinite(name, num_bad, _num_elements(suspects))
    return None


def _num_elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def first(
    own: NotFinite | None, sums: Iterable[tuple[str, Tensor]], names: Sequence[str], mesh: Mesh, device: torch.device
) -> str:
    """The gradient that the backward came to first of those that are not finite, as one sentence: of what
    ranks have found in their `own`, else of the `sums` over ranks, given by name. Empty when there is none.
    All ranks call it together."""
    if named := _reported(own, names, mesh, device, "before it is added up with others'"):
        return named
    held: dict[str, list[Tensor]] = {name: [] for name in names}
    for name, tensor in sums:
        held[name].append(tensor)
    return _reported(
        find(held),
        names,
        mesh,
        device,
        ("after it was added up; each rank's own part has none. Look at this reduction"),
    )


def _reported(found: NotFinite | None, names: Sequence[str], mesh: Mesh, device: torch.device, when: str) -> str:
    """One sentence about what all ranks have found, the same on every rank, which all call it together; empty
    when none has found any.

    `names` are the gradients of the model in order, `when` is the end of the sentence. What is named is the last of
    them: a backward spreads it to those before.
    """
    own = (-1, 0, 0)
    if found is not None:
        own = names.index(found.name), -1 if found.num_bad is None else found.num_bad, found.num_elements
    row = torch.tensor([own], dtype=torch.int64, device=device)
    copies = torch.stack([*mesh.dp.all_gather(row)])  # [copies, 1, 3]
    everyone = torch.cat(mesh.model.all_gather(copies), 1)  # [copies, ranks of the model, 3]
    last = int(everyone[..., 0].max())
    if last < 0:
        return ""
    where = [(int(copy), int(member)) for copy, member in (everyone[..., 0] == last).nonzero()]
    ranks = sorted(_rank_of(mesh, copy, member) for copy, member in where)
    _, num_bad, num_elements = everyone[where[0]].tolist()
    named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    counted = "" if num_bad < 0 else f"{num_bad} "
    return f"The gradient of {names[last]} has {counted}such elements of {num_elements} on {named}, {when}."


def _rank_of(mesh: Mesh, copy: int, member: int) -> int:
    """The global rank at a place of the data-parallel and a place of the model group: groups of the
    same axes are cut in the same way."""
    return mesh.dp.ranks[copy] - mesh.dp.ranks[mesh.dp.rank] + mesh.model.ranks[member]
