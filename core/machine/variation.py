"""`Variation`: how real machines differ from a plan's ideal one, and the names of devices and links that differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from ..base.bounds import Bounded, shown

if TYPE_CHECKING:
    from .cluster import ClusterSpec

DISTRIBUTIONS = ("lognormal", "normal", "pareto")
"""Shapes of jitter, all with mean 1: multiplicative noise; symmetric noise; and a heavy tail (Pareto 1, whose exponent
follows from the relative standard deviation)."""

LINK_KINDS = ("device", "card", "node", "leaf")


@dataclass(frozen=True)
class Variation(Bounded, section="variation"):
    """What differs from device to device, from link to link and from step to step. Nothing does by default,
    and then nothing is drawn.

    Known differences: `stragglers` maps devices (`device-17`, `device-8-15`, `node-2`, `node-4-7`) to how many times
    longer they compute; `device_classes` maps cluster presets to the devices that are of that kind (`node-4-7,
    device-3`). `slow_links` maps links to the share of their rate that is left, `failed_links` lists those of which
    nothing is (`card-3-1, leaf-0-2`): `device-17` is a device's link into its node, `card-3-1` card 1 of node 3,
    `node-3` all cards of a node, `leaf-0-1` the uplinks of leaf switch 1 of node group 0.

    Drawn `samples` times, from `seed`: `jitter` and `comm_jitter` are relative standard deviations of one compute
    action on one device and of one transfer, `device_spread` that of a device's speed for a whole step, all by
    `distribution`. A device pauses `hiccups_per_s` times a second for `hiccup_s` or longer, Pareto with exponent
    `hiccup_shape`. `expert_imbalance` is the relative standard deviation of the tokens that experts expect (0 leaves
    the chance of the draw; None keeps all equally busy); `expert_capacity` is how many times its fair share an expert
    takes, above which tokens are dropped.

    Failures: one device fails every `device_mtbf_s`; a checkpoint every `checkpoint_every_s` (None: as often as is
    best) stops training for `checkpoint_s`; after a failure `restart_s` pass before training goes on from the last one.
    """

    stragglers: Mapping[str, float] = field(default_factory=dict, hash=False)
    device_classes: Mapping[str, str] = field(default_factory=dict, hash=False)
    slow_links: Mapping[str, float] = field(default_factory=dict, hash=False)
    failed_links: str = ""
    seed: int = 0
    samples: int = 100
    jitter: float = 0.0
    comm_jitter: float = 0.0
    device_spread: float = 0.0
    distribution: Literal["lognormal", "normal", "pareto"] = "lognormal"
    hiccups_per_s: float = 0.0
    hiccup_s: float = 0.0
    hiccup_shape: float = 2.0
    expert_imbalance: float | None = None
    expert_capacity: float | None = None
    device_mtbf_s: float | None = None
    checkpoint_s: float = 0.0
    checkpoint_every_s: float | None = None
    restart_s: float = 0.0

    @cached_property
    def is_nothing(self) -> bool:
        """True when a plan says nothing here."""
        return all(getattr(self, entry.name) == getattr(NO_VARIATION, entry.name) for entry in fields(self))

    @cached_property
    def has_differences(self) -> bool:
        """True when devices or links are known to differ."""
        return bool(self.stragglers or self.device_classes or self.slow_links or self.failed_links)

    @cached_property
    def is_random(self) -> bool:
        """True when something is drawn."""
        return bool(
            self.jitter
            or self.comm_jitter
            or self.device_spread
            or self.hiccups_per_s
            or self.expert_imbalance is not None
        ) and bool(self.samples)

    def with_samples(self, samples: int) -> Variation:
        """The same, drawn so many times."""
        return replace(self, samples=samples)


NO_VARIATION = Variation()
"""Every device and every step like every other."""


def names_in(text: str) -> tuple[str, ...]:
    """The names of a list such as `card-3-1, leaf-0-2`; () for an empty text."""
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def devices_named(text: str, cluster: ClusterSpec) -> list[int]:
    """The global ranks that a list of devices and nodes names, ascending, such as `node-4-7, device-3`.

    Raises `ValueError` with one sentence for a name that is none, or is not in the cluster.
    """
    ranks: set[int] = set()
    for name in names_in(text) or ("",):
        found = re.fullmatch(r"(device|node)-(\d{1,9})(?:-(\d{1,9}))?", name)
        if not found:
            raise ValueError(f"{shown(name)} names no device. Write device-17, device-8-15, node-2 or node-4-7.")
        first, last = int(found[2]), int(found[3] or found[2])
        count = cluster.num_devices if found[1] == "device" else cluster.num_nodes
        if not first <= last < count:
            raise ValueError(f"{shown(name)} is not among the {count} {found[1]}s of the cluster, counted from 0.")
        each = 1 if found[1] == "device" else cluster.devices_per_node
        ranks.update(range(first * each, min((last + 1) * each, cluster.num_devices)))
    return sorted(ranks)


@dataclass(frozen=True, slots=True)
class LinkName:
    """A link as `slow_links` and `failed_links` name it: `index` is a global rank, a node, a group of nodes;
    `part` its card or rail."""

    kind: Literal["device", "card", "node", "leaf"]
    index: int
    part: int = 0


def link_named(text: str, cluster: ClusterSpec) -> LinkName:
    """The link of a name. Raises `ValueError` with one sentence for a name that is none, or is not in the cluster."""
    found = re.fullmatch(r"(device|node)-(\d{1,9})", text) or re.fullmatch(r"(card|leaf)-(\d{1,9})-(\d{1,9})", text)
    if not found:
        raise ValueError(
            f"{shown(text)} names no link. Write device-17, card-3-1 (node, card), node-3 or leaf-0-1 "
            "(group of nodes, rail)."
        )
    kind, numbers = found[1], [int(number) for number in found.groups()[1:]]
    cards = cluster.nics_per_node or min(cluster.devices_per_node, cluster.num_devices)
    groups = -(-cluster.num_nodes // cluster.nodes_per_leaf) if cluster.nodes_per_leaf else 0
    bounds = {
        "device": (cluster.num_devices,),
        "node": (cluster.num_nodes,),
        "card": (cluster.num_nodes, cards),
        "leaf": (groups, cards if cluster.rails else 1),
    }[kind]
    if not all(number < bound for number, bound in zip(numbers, bounds, strict=True)):
        what = {"device": "devices", "node": "nodes", "card": "nodes x cards", "leaf": "groups of nodes x rails"}[kind]
        raise ValueError(
            f"{shown(text)} is not in the cluster, which has {' x '.join(map(str, bounds))} {what}, counted from 0."
        )
    return LinkName(kind, *numbers)  # type: ignore[arg-type]
