"""Every published measurement predicted again, and how far off: `python benchmarks/validate.py`."""

from __future__ import annotations

from .predictions import Prediction, predict_row

__all__ = ["Prediction", "predict_row"]
