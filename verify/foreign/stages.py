"""Which microbatch a stage of torch.distributed.pipelining works on, which the order of its calls
does not always say."""

from __future__ import annotations

from typing import Any


class StageHook:
    """Notes the microbatch of every forward of a stage in `microbatch`; None between them, where torch may call
    the module for shapes."""

    def __init__(self, stage: Any):
        self.stage = stage
        self.microbatch: int | None = None
        self._forward_one_chunk = stage.forward_one_chunk
        stage.forward_one_chunk = self

    def __call__(self, fwd_chunk_id: int, *args: object, **kwargs: object) -> object:
        """The stage's own method."""
        self.microbatch = fwd_chunk_id
        try:
            return self._forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        finally:
            self.microbatch = None

    def remove(self) -> None:
        """Gives the stage its method back."""
        self.stage.forward_one_chunk = self._forward_one_chunk


def is_stage(value: object) -> bool:
    """Whether a value is a stage, and no module."""
    return hasattr(value, "forward_one_chunk") and hasattr(value, "submod")
