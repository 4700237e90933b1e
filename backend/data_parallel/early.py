"""`EarlyReduction`: gradients are reduced bucket by bucket, each as soon as its last weight
gradient of the step is there.

The `dp` lane then begins a stage's REDUCE_GRAD under the backward passes that still go on, and waits inside it for the
buckets that are not ready; the compute lane waits for nothing. Buckets go in one order on all copies of a stage, so
that their collectives match.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from ...core.program.buckets import EXPERTS, ROUTERS, WAITING, Bucket
from ..base.streams import Moment, now, wait_for
from ..gradients.gradients import Gradients
from ..pipeline.messages import Mail


class EarlyReduction:
    """When the buckets of a rank's stages may be reduced. `begin` a step, then `complete` each
    stage at its REDUCE_GRAD."""

    def __init__(self, gradients: Mapping[int, Gradients], device: torch.device):
        self._gradients = gradients
        self._device = device
        self._complete: set[int] = set()
        self._computed: Moment = None
        self._mail = Mail()

    def begin(self, mail: Mail, num_microbatches: Mapping[int, int]) -> None:
        """Every stage expects the contributions of so many microbatches; lanes wait in `mail`."""
        self._mail = mail
        self._complete = set()
        for stage, gradients in self._gradients.items():
            gradients.expect(
                num_microbatches.get(stage, 0),
                changed=lambda: mail.notify(self._come),
                wait=partial(self.wait, stage),
            )

    def complete(self, stage: int) -> None:
        """All weight gradients of a stage are there."""

        def change() -> None:
            self._come()
            self._complete.add(stage)

        self._mail.notify(change)

    def wait_for_first(self, stage: int) -> None:
        """Returns when the first bucket of a stage is ready."""
        if buckets := self._gradients[stage].buckets:
            self.wait(stage, buckets[0])
        else:
            self._mail.wait_until(lambda: stage in self._complete)
            wait_for(self._computed, self._device)

    def wait(self, stage: int, bucket: Bucket) -> None:
        """Returns when a bucket is ready. What other ranks know parts of, and experts, are so when
        the stage is complete."""
        by_itself = bucket.name not in (ROUTERS, WAITING, EXPERTS)
        self._mail.wait_until(
            lambda: stage in self._complete or (by_itself and self._gradients[stage].is_ready(bucket))
        )
        wait_for(self._computed, self._device)

    def _come(self) -> None:
        """The compute lane has computed more, as its stream has when it comes to this moment."""
        self._computed = now(self._device)
