"""The keys of `[variation]`."""

from __future__ import annotations

from typing import Any

from ...machine.variation import DISTRIBUTIONS
from .key import Key


def variation_keys() -> tuple[Key, ...]:
    """Of `[variation]`."""
    variation, columns, links, loads, goodput = (
        f"simulator.{name}"
        for name in (
            "variation.variation",
            "variation.columns",
            "network.link_shares",
            "cost.expert_load",
            "variation.goodput",
        )
    )
    number: dict[str, Any] = {"section": "variation", "type": "float", "minimum": 0}
    spread: dict[str, Any] = {**number, "below": 1, "read_by": variation}
    return (
        Key(
            "variation",
            "stragglers",
            "table of rates",
            ("device-17, device-8-15 or node-2: times longer it computes"),
            columns,
        ),
        Key(
            "variation",
            "device_classes",
            "table of texts",
            ("cluster preset: devices of that kind, as node-4-7, device-3"),
            columns,
        ),
        Key(
            "variation",
            "slow_links",
            "table of rates",
            ("device-17, card-3-1, node-3 or leaf-0-1: share of its rate left"),
            links,
        ),
        Key("variation", "failed_links", "str", "links of which nothing is left, as card-3-1, leaf-0-2", links),
        Key("variation", "seed", "int", "seed of everything that is drawn", variation, minimum=0),
        Key("variation", "samples", "int", "steps that are drawn", variation, minimum=0, maximum=100_000),
        Key(name="jitter", doc="relative standard deviation of one compute action on one device", **spread),
        Key(name="comm_jitter", doc="relative standard deviation of one message or reduction", **spread),
        Key(name="device_spread", doc="relative standard deviation of a device's speed for a whole step", **spread),
        Key(
            "variation",
            "distribution",
            "str",
            "shape of jitter and spread, with mean 1",
            variation,
            choices=DISTRIBUTIONS,
        ),
        Key(
            name="hiccups_per_s", doc="long pauses of one device in a second of computing", read_by=variation, **number
        ),
        Key(name="hiccup_s", doc="shortest pause", read_by=variation, **number),
        Key("variation", "hiccup_shape", "float", "exponent of the pauses' lengths (Pareto)", variation, above=1),
        Key(
            name="expert_imbalance",
            doc="relative standard deviation of the tokens that experts expect; 0 is the draw's chance alone",
            read_by=loads,
            default_note="all equally busy",
            **number,
        ),
        Key(
            "variation",
            "expert_capacity",
            "float",
            ("an expert's tokens over its fair share"),
            loads,
            above=0,
            default_note="no limit",
        ),
        Key(
            "variation",
            "device_mtbf_s",
            "float",
            "time between failures of one device",
            goodput,
            above=0,
            default_note="no failures",
        ),
        Key(name="checkpoint_s", doc="time that a checkpoint stops training", read_by=goodput, **number),
        Key(
            name="checkpoint_every_s",
            doc="work between checkpoints",
            read_by=goodput,
            default_note="the best (Daly 2006)",
            section="variation",
            type="float",
            above=0,
        ),
        Key(name="restart_s", doc="time from a failure until training goes on", read_by=goodput, **number),
    )
