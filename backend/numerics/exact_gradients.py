"""Exact gradients while they are accumulated: carry trees over samples, and under sequence parallelism
tree nodes over tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from ...core.base.reduction import CarryTree, cut
from ..transport.base import Group
from .contributions import Accumulator, Contribution, by_sample
from .heads import OwnedPart
from .sample_sums import SampleSums
from .tree import add_in_place


class ExactAccumulator:
    """A gradient as a carry tree over the samples of the global batch."""

    def __init__(self, num_samples: int):
        self.tree: CarryTree = CarryTree(num_samples, add_in_place)

    def add(self, first_sample: int, contribution: Contribution) -> None:
        """Each sample's sum is a leaf."""
        if isinstance(contribution, SampleSums):
            contribution.insert_into(self.tree, first_sample)
            return
        for offset, value in enumerate(by_sample(contribution)):
            self.tree.insert((first_sample + offset, first_sample + offset + 1), value)

    @property
    def held(self) -> list[Tensor]:
        """At most log2 n + 1 partial sums when samples arrive in order."""
        return [self.tree.value(node) for node in self.tree.nodes]


class TokenNodes:
    """The gradient of a norm or bias of which this rank knows its own tokens' (or heads') part: per sample the tree
    nodes [nodes, n] of it, those of each layer that uses it one after the other.

    The batch's tree is over whole samples, so nothing can be added before `finished_parts` has met the other ranks: a
    vector or two per sample of the step are held, which is little against the matrices of a layer.
    """

    def __init__(self, num_samples: int):
        self.num_samples = num_samples
        self.samples: dict[int, Tensor] = {}

    def add(self, first_sample: int, contribution: Contribution) -> None:
        """Keeps every sample's nodes."""
        for offset, nodes in enumerate(by_sample(contribution)):
            assert first_sample + offset not in self.samples, f"sample {first_sample + offset} arrived twice"
            self.samples[first_sample + offset] = nodes

    @property
    def num_rows(self) -> int:
        """Nodes of one sample, of all uses together; 0 before the first has come."""
        return next((len(nodes) for nodes in self.samples.values()), 0)

    @property
    def held(self) -> list[Tensor]:
        """The nodes of every sample."""
        return list(self.samples.values())


def finished_parts(gradients: Mapping[str, TokenNodes], group: Group, owned: OwnedPart) -> dict[str, Accumulator]:
    """The gradients as carry trees over whole samples, the same on every member. All have equally many uses.

    All gradients go side by side: an all-to-all brings each member the nodes of an even part of the elements,
    of which it finishes every sample and the batch's tree over them as far as its samples reach; an all-gather
    puts the parts together.
    """
    if not gradients:
        return {}
    num_samples, samples = next((each.num_samples, sorted(each.samples)) for each in gradients.values())
    if not samples:
        raise ValueError("no microbatch has contributed to these gradients.")
    widths = [each.samples[samples[0]].shape[-1] for each in gradients.values()]
    held = torch.cat([torch.stack([each.samples[sample] for sample in samples]) for each in gradients.values()], -1)
    parts = [cut(sum(widths), group.size, member) for member in range(group.size)]
    nodes = [owned.nodes(member) for member in range(group.size)]
    own, uses = parts[group.rank][1] - parts[group.rank][0], held.shape[1] // len(nodes[group.rank])
    shapes = [(len(samples), uses * len(theirs), own) for theirs in nodes]
    arrived = group.all_to_all([held[..., lo:hi] for lo, hi in parts], shapes)
    sequences: list[CarryTree] = [CarryTree(owned.num_leaves, torch.add) for _ in range(uses)]
    for theirs, values in zip(nodes, arrived, strict=True):
        for sequence, of_use in zip(sequences, values.split(len(theirs), 1), strict=True):
            for node, value in zip(theirs, of_use.unbind(1), strict=True):
                sequence.insert(node, value)
    batch: CarryTree = CarryTree(num_samples, torch.add)
    finished_samples = functools.reduce(torch.add, [sequence.root() for sequence in sequences])
    for sample, value in zip(samples, finished_samples, strict=True):
        batch.insert((sample, sample + 1), value)
    whole = group.all_gather(
        torch.stack([batch.value(node) for node in batch.nodes]), [(len(batch.nodes), hi - lo) for lo, hi in parts]
    )
    finished: dict[str, Accumulator] = {}
    for name, values in zip(gradients, torch.cat(whole, 1).split(widths, 1), strict=True):
        accumulator = finished[name] = ExactAccumulator(num_samples)
        for node, value in zip(batch.nodes, values, strict=True):
            accumulator.tree.insert(node, value.clone())
    return finished
