"""Where a gradient stopped being a number: seen on the rank whose part of the sum it is in, before the sum
spreads it, and reported to all.

Every rank sees that *something* is not finite in the norm of the whole gradient, so all of them
end, or skip, the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.streams import is_captured
from ..transport.mesh import Mesh


@dataclass(frozen=True)
class NotFinite:
    """A parameter of whose gradient `num_bad` of `num_elements` elements on a rank are infinite or no numbers."""

    name: str
    num_bad: int
    num_elements: int


def find(held: Mapping[str, Sequence[Tensor]]) -> NotFinite | None:
    """The last of some gradients, given as parts of their sums by name, that is not finite: the one that
    the backward came to first.

    Looks at every element once, by sums, which are finite only if all elements are; what has a sum that
    is not is looked at again. Nothing is found in a step that is captured, where the host sees no numbers: what is
    wrong is then found in sums over ranks.
    """
    if any(is_captured(tensor.device) for tensors in held.values() for tensor in tensors):
        return None
    sums = [tensor.sum(dtype=torch.float32) for tensors in held.values() for tensor in tensors]
    if not sums or torch.isfinite(torch.stack(sums).sum()):
        return None
    for name, tensors in reversed(list(held.items())):
        suspects = [tensor for tensor in tensors if not torch.isfinite(tensor.sum(dtype=torch.float32))]
        if num_bad := sum(int((~torch.isfinite(tensor)).sum()) for tensor in suspects):
            return NotFinite(name, num_bad, sum(tensor.numel() for tensor in suspects))
    return None


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
    own = (-1, 0, 0) if found is None else (names.index(found.name), found.num_bad, found.num_elements)
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
    return f"The gradient of {names[last]} has {num_bad} such elements of {num_elements} on {named}, {when}."


def _rank_of(mesh: Mesh, copy: int, member: int) -> int:
    """The global rank at a place of the data-parallel and a place of the model group: groups of the
    same axes are cut in the same way."""
    return mesh.dp.ranks[copy] - mesh.dp.ranks[mesh.dp.rank] + mesh.model.ranks[member]
