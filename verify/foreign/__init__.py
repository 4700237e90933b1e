"""Ledgers of other people's training loops, and their comparison. Changes nothing in the program it watches."""

from .places import Slice
from .recorder import Recorder

__all__ = ["Recorder", "Slice"]
