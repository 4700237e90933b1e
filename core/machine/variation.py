"""`Variation`: how real machines differ from a plan's ideal one, and the names of devices and links that differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from ..base.bounds import EXPERTS, SHARE, Bound, shown
from ..base.option import Bounded, noun, option

if TYPE_CHECKING:
    from .cluster import ClusterSpec


@noun()
class Variation(Bounded, section="variation"):
    """What differs from device to device, from link to link and from step to step. Nothing does by default,
    and then nothing is drawn.

    Differences of devices and links are known; jitter, pauses and the experts' tokens are drawn `samples` times from
    `seed`; failures and checkpoints say what is lost between them.
    """

    stragglers: Mapping[str, float] = option(
        "device-17, device-8-15 or node-2: times longer it computes",
        default_factory=dict,
        hash=False,
        bound=Bound(1e6, "a device so slow has failed", least=1e-3),
        more="`node-4-7` are all devices of nodes 4 to 7.",
        read_by="simulator.variation.columns",
    )
    device_classes: Mapping[str, str] = option(
        "cluster preset: devices of that kind, as node-4-7, device-3",
        default_factory=dict,
        hash=False,
        read_by="simulator.variation.columns",
    )
    slow_links: Mapping[str, float] = option(
        "device-17, card-3-1, node-3 or leaf-0-1: share of its rate left",
        default_factory=dict,
        hash=False,
        bound=SHARE,
        more=(
            "`device-17` is a device's link into its node, `card-3-1` card 1 of node 3, `node-3` all cards of a node, "
            "`leaf-0-1` the uplinks of leaf switch 1 of node group 0."
        ),
        read_by="simulator.network.link_shares",
    )
    failed_links: str = option(
        "links of which nothing is left, as card-3-1, leaf-0-2", default="", read_by="simulator.network.link_shares"
    )
    seed: int = option(
        "seed of everything that is drawn", default=0, minimum=0, read_by="simulator.variation.variation"
    )
    samples: int = option(
        "steps that are drawn", default=100, minimum=0, maximum=100_000, read_by="simulator.variation.variation"
    )
    jitter: float = option(
        "relative standard deviation of one compute action on one device",
        default=0.0,
        minimum=0,
        below=1,
        read_by="simulator.variation.variation",
    )
    comm_jitter: float = option(
        "relative standard deviation of one message or reduction",
        default=0.0,
        minimum=0,
        below=1,
        read_by="simulator.variation.variation",
    )
    device_spread: float = option(
        "relative standard deviation of a device's speed for a whole step",
        default=0.0,
        minimum=0,
        below=1,
        read_by="simulator.variation.variation",
    )
    distribution: Literal["lognormal", "normal", "pareto"] = option(
        "shape of jitter and spread, with mean 1",
        default="lognormal",
        more=(
            "Multiplicative noise, symmetric noise, or a heavy tail (Pareto 1, whose exponent follows from the "
            "deviation)."
        ),
        read_by="simulator.variation.variation",
    )
    hiccups_per_s: float = option(
        "long pauses of one device in a second of computing",
        default=0.0,
        minimum=0,
        bound=Bound(1e6, "pauses of microseconds are part of the times measured", least=1e-12),
        read_by="simulator.variation.variation",
    )
    hiccup_s: float = option(
        "shortest pause",
        default=0.0,
        minimum=0,
        read_by="simulator.variation.variation",
    )
    hiccup_shape: float = option(
        "exponent of the pauses' lengths (Pareto)", default=2.0, above=1, read_by="simulator.variation.variation"
    )
    expert_imbalance: float | None = option(
        "relative standard deviation of the tokens that experts expect; 0 is the draw's chance alone",
        default=None,
        minimum=0,
        bound=EXPERTS,
        default_note="all equally busy",
        read_by="simulator.cost.expert_load",
    )
    expert_capacity: float | None = option(
        "an expert's tokens over its fair share",
        default=None,
        above=0,
        bound=EXPERTS,
        default_note="no limit",
        more="Tokens above it are dropped.",
        read_by="simulator.cost.expert_load",
    )
    device_mtbf_s: float | None = option(
        "time between failures of one device",
        default=None,
        above=0,
        default_note="no failures",
        read_by="simulator.variation.goodput",
    )
    checkpoint_s: float = option(
        "time that a checkpoint stops training", default=0.0, minimum=0, read_by="simulator.variation.goodput"
    )
    checkpoint_every_s: float | None = option(
        "work between checkpoints",
        default=None,
        above=0,
        default_note="the best (Daly 2006)",
        read_by="simulator.variation.goodput",
    )
    restart_s: float = option(
        "time from a failure until training goes on",
        default=0.0,
        more="It goes on from the last checkpoint.",
        minimum=0,
        read_by="simulator.variation.goodput",
    )

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
