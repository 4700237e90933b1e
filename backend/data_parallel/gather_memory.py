"""`gather_in_place`: weights that rest in parts come together in the same memory each time (Megatron-Core's
`fsdp_double_buffer`), where captured graphs find them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

import torch

from .sharded import ShardedStage


def gather_in_place(stages: Mapping[int, ShardedStage], places: Mapping[int, int]) -> None:
    """Stages of one place, which are never together at the same time, share memory as large as their largest."""
    for place in set(places.values()):
        own = [stages[stage] for stage, of in places.items() if of == place]
        for buckets in zip_longest(*(stage.weights for stage in own)):
            resting = [bucket for bucket in buckets if bucket is not None and bucket.rests_in_parts]
            if not resting:
                continue
            most = max(len(bucket) * bucket.dtype.itemsize for bucket in resting)
            memory = torch.empty(most, dtype=torch.uint8, device=resting[0].device)
            for bucket in resting:
                bucket.memory = memory[: len(bucket) * bucket.dtype.itemsize].view(bucket.dtype)
