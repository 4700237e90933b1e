"""Predicts a step: its time, its memory, the fastest layout. Imports core alone.

The functions are bound here, after their modules have been loaded: `simulate`, `search` and `fit` are also names of
modules, and what is bound last stays.
"""

from .engine.engine import run_schedule
from .search.fit import fit
from .search.search import search
from .simulation.simulate import simulate
from .step.step import Simulation

__all__ = ["Simulation", "fit", "run_schedule", "search", "simulate"]
