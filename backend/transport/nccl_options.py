"""What a plan says of communicators, as options of torch's `ProcessGroupNCCL`."""

from __future__ import annotations

from typing import Any

from ...core.plan.communicators import AXES, Communicators

_AXIS_OF = {"replica": "dp", "expert_replica": "edp"}
"""Groups that join copies too: those of a stage on several pipeline ranks."""


def plan_axis(axis: str) -> str:
    """The axis of a plan's keys that a group's axis belongs to; its own name where it belongs to none.

    >>> plan_axis("tp_cp"), plan_axis("edp_shard"), plan_axis("replica"), plan_axis("model")
    ('tp', 'edp', 'dp', 'model')
    """
    found = _AXIS_OF.get(axis, axis.partition("_")[0])
    return found if found in AXES else axis


def set_options(options: Any, communicators: Communicators, axis: str) -> None:
    """Sets in torch's `options` what is given for the communicators of an axis, by the names of `ncclConfig_t`."""
    axis, config = plan_axis(axis), options.config
    options.is_high_priority_stream = axis in communicators.high_priority
    if (number := communicators.min_ctas.get(axis)) is not None:
        config.min_ctas = int(number)
    if (number := communicators.max_ctas.get(axis)) is not None:
        config.max_ctas = int(number)
    if (number := communicators.cga_cluster_size.get(axis)) is not None:
        config.cga_cluster_size = int(number)
    if communicators.network is not None:
        config.net_name = communicators.network
