"""Rules of optimizers and of what they keep."""

from __future__ import annotations

from collections.abc import Iterator

from ..optimizer import Optimizer
from ..sections import Offload


def offloaded_moments_exist(offload: Offload, optimizer: Optimizer) -> Iterator[str]:
    """An optimizer whose moments go to host memory keeps some."""
    if offload.optimizer and optimizer.name == "muon":
        yield (
            f"optimizer={offload.optimizer:g} keeps moments in host memory, and those of Muon stay on the device. "
            "Leave offload.optimizer out, or use adamw or sgd."
        )
    if offload.optimizer and not optimizer.keeps_moments:
        yield (
            f"optimizer={offload.optimizer:g} keeps moments in host memory, but SGD with momentum=0 has none. Leave "
            "offload.optimizer out."
        )
