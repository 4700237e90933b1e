"""Ledgers of training loops that are not ours: `Recorder` watches a torch model from outside, `Slice` says what a rank holds."""

from .places import Slice
from .recorder import Recorder

__all__ = ["Recorder", "Slice"]
