"""The rules that tie `[variation]` to the rest of a plan; `table` has them in order."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.errors import did_you_mean
from ...machine.cluster import ClusterSpec
from ...machine.cluster_presets import CLUSTER_PRESETS, cluster_preset
from ...machine.variation import Variation, devices_named, link_named, names_in
from ...model.model import ModelSpec
from ..sections import Precision


def stragglers_exist(variation: Variation, cluster: ClusterSpec) -> Iterator[str]:
    """Stragglers are devices of the cluster, and slower than the others."""
    for name, factor in variation.stragglers.items():
        yield from _complaints(f"stragglers={{{name} = {factor:g}}}", name, cluster)
        if factor < 1:
            yield f"stragglers={{{name} = {factor:g}}} says how many times longer a device computes: at least 1."


def classes_are_known(variation: Variation, cluster: ClusterSpec, precision: Precision) -> Iterator[str]:
    """Classes are presets that have a rate for the plan's dtype, and no device is of two."""
    seen: dict[int, str] = {}
    for preset, names in variation.device_classes.items():
        setting = f'device_classes={{{preset} = "{names}"}}'
        if preset not in CLUSTER_PRESETS:
            yield f"{setting}: {preset!r} is no cluster preset{did_you_mean(preset, CLUSTER_PRESETS)}"
            continue
        if precision.dtype not in cluster_preset(preset, cluster.num_devices).peak_flops_per_s:
            yield (
                f'{setting}: devices of {preset} have no peak rate for dtype="{precision.dtype}". Use another dtype '
                "or class."
            )
        complaints = list(_complaints(setting, names, cluster))
        yield from complaints
        for rank in () if complaints else devices_named(names, cluster):
            if rank in seen:
                yield f"{setting}: device-{rank} is of class {seen[rank]} already. Name every device once."
                break
            seen[rank] = preset


def links_exist(variation: Variation, cluster: ClusterSpec) -> Iterator[str]:
    """Links are links of the cluster, shares are shares, and what fails leaves every device a way to the others."""
    for name, share in variation.slow_links.items():
        if not 0 < share <= 1:
            yield f"slow_links={{{name} = {share:g}}} is the share of its rate that is left: above 0, at most 1."
        yield from _link_complaints("slow_links", name, cluster)
    complaints = [
        complaint
        for name in names_in(variation.failed_links)
        for complaint in _link_complaints("failed_links", name, cluster)
    ]
    yield from complaints or _cut_off(variation, cluster)


def _link_complaints(key: str, name: str, cluster: ClusterSpec) -> Iterator[str]:
    try:
        link_named(name, cluster)
    except ValueError as error:
        yield f"{key}: {error}"


def _cut_off(variation: Variation, cluster: ClusterSpec) -> Iterator[str]:
    """Failures after which something cannot be reached at all."""
    failed = {name: link_named(name, cluster) for name in names_in(variation.failed_links)}
    cards = cluster.nics_per_node or min(cluster.devices_per_node, cluster.num_devices)
    for name, link in failed.items():
        if link.kind == "device":
            yield (
                f'failed_links="{name}" cuts a device off. Use slow_links={{{name} = 0.05}} for a detour, or leave '
                "the device out."
            )
        elif link.kind == "node" or (link.kind == "leaf" and not cluster.rails):
            yield (
                f'failed_links="{name}" cuts nodes off. Use slow_links={{{name} = 0.5}} for what is left, or leave '
                "them out."
            )
        elif sum(other.kind == link.kind and other.index == link.index for other in failed.values()) == cards:
            yield (
                f'failed_links="{variation.failed_links}" leaves none of the {cards} {link.kind}s of {link.index}. '
                "Let one of them work."
            )
            return


def hiccups_have_a_length(variation: Variation) -> Iterator[str]:
    """Pauses come with a rate and a length."""
    if bool(variation.hiccups_per_s) != bool(variation.hiccup_s):
        given = f"hiccups_per_s={variation.hiccups_per_s:g} and hiccup_s={variation.hiccup_s:g}"
        yield (
            f"{given}: pauses need both, how often a device makes one and how long it takes at least. Give both, "
            "or none."
        )


def imbalance_needs_experts(variation: Variation, model: ModelSpec) -> Iterator[str]:
    """Only experts can be unequally busy."""
    for name in ("expert_imbalance", "expert_capacity"):
        value = getattr(variation, name)
        if value is not None and not model.is_moe:
            yield f"{name}={value:g} is about experts, but model {model.name} has none (num_experts=0). Leave it out."
    if model.is_moe and variation.expert_imbalance and variation.expert_imbalance**2 >= model.num_experts - 1:
        yield (
            f"expert_imbalance={variation.expert_imbalance:g} is more than one expert with all tokens would be. "
            f"Use less than {(model.num_experts - 1) ** 0.5:.3g}."
        )
    if variation.expert_capacity is not None and variation.expert_imbalance is None:
        yield (
            f"expert_capacity={variation.expert_capacity:g} limits experts that are busier than others, but "
            "expert_imbalance is not "
            "given, so all are equally busy. Give expert_imbalance (0 is the chance of the draw alone), or leave "
            "expert_capacity out."
        )


def checkpoints_need_failures(variation: Variation) -> Iterator[str]:
    """Goodput needs a time between failures, and the best interval the time that a checkpoint takes."""
    if variation.device_mtbf_s is None:
        for name in ("checkpoint_s", "checkpoint_every_s", "restart_s"):
            if value := getattr(variation, name):
                yield f"{name}={value:g} counts only where devices fail. Give device_mtbf_s, or leave {name} out."
    elif not variation.checkpoint_s and variation.checkpoint_every_s is None:
        yield (
            f"device_mtbf_s={variation.device_mtbf_s:g} with checkpoint_s=0 and no checkpoint_every_s: checkpoints "
            "that cost nothing "
            "have no best interval. Give checkpoint_s, checkpoint_every_s or both."
        )


def _complaints(setting: str, names: str, cluster: ClusterSpec) -> Iterator[str]:
    try:
        devices_named(names, cluster)
    except ValueError as error:
        yield f"{setting}: {error}"
