"""What a plan may fill of its devices' memory: the one answer for `fit`, `simulate`, `plan` and all that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...core.machine.cluster_presets import as_device
from ...core.machine.variation import devices_named
from ...core.plan.plan import Plan
from ..network.link_shares import rank_index
from ..stack.profiles import profile_of
from .reserved import reserved_bytes


@dataclass(frozen=True)
class Capacity:
    """Bytes of one device, which is what its runtime reports as its total.

    `reserved_bytes` is what the context and libraries hold (`reserved`), `headroom_bytes` what the plan leaves free
    (`cluster.headroom`), `fragmentation_bytes` what the allocator holds beyond the tensors of a peak as high as
    `usable_bytes`. They sum to `device_bytes`, unless nothing is usable.
    """

    device_bytes: int
    reserved_bytes: int
    headroom_bytes: int
    fragmentation_bytes: int
    usable_bytes: int

    def report(self) -> dict[str, int]:
        """The JSON keys."""
        return {
            "device_bytes": self.device_bytes,
            "reserved_bytes": self.reserved_bytes,
            "headroom_bytes": self.headroom_bytes,
            "fragmentation_bytes": self.fragmentation_bytes,
            "capacity_bytes": self.usable_bytes,
        }


def capacity_of(plan: Plan) -> Capacity:
    """The capacity of the devices of a plan's cluster. Fragmentation is modelled: the profile's
    `allocator_factor`, 4% of live tensors.

    A run that nearly filled an H100 had 4.5% more reserved than allocated (NVIDIA-NeMo/Speech, issue 14857). Where
    training ran out of memory 0 to 2.8% were left (stas00/ml-engineering, debug/pytorch.md;
    NVIDIA-NeMo/Megatron-Bridge, pull request 6091; Lightning-AI/ litgpt, issue 1892). Where single tensors are huge it
    is more: 12 GiB of the 69 that a run held were in pieces when it asked for 12 (huggingface/accelerate, issue 1864).
    """
    cluster, reserved = plan.cluster, reserved_bytes(plan)
    device, headroom = int(cluster.device_memory_bytes), cluster.headroom_bytes
    left = max(0, device - reserved - headroom)
    usable = int(left / profile_of(plan).memory.allocator_factor)
    return Capacity(device, reserved, headroom, left - usable, usable)


def capacities(plan: Plan) -> Sequence[Capacity]:
    """The same of the smallest device of every pipeline rank, where `variation.device_classes`
    says that they differ."""
    found = [capacity_of(plan)]
    if not plan.variation.device_classes:
        return found * plan.layout.pp
    kind = np.zeros(plan.cluster.num_devices, dtype=np.int64)
    for number, (name, names) in enumerate(plan.variation.device_classes.items(), start=1):
        kind[devices_named(names, plan.cluster)] = number
        found.append(capacity_of_class(plan, name))
    order = np.argsort(np.array([each.usable_bytes for each in found]), kind="stable")
    place = np.argsort(order)  # of a kind among all, the smallest first
    smallest = place[kind][rank_index(plan.layout, "dense")].min(axis=(0, 1, 2))
    return [found[order[number]] for number in smallest.tolist()]


def capacity_of_class(plan: Plan, name: str) -> Capacity:
    """The capacity of the devices of a preset in a plan's cluster."""
    return capacity_of(replace(plan, cluster=as_device(plan.cluster, name)))
