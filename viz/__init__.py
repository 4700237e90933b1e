"""Timelines, maps of ranks and tables of numbers as text, SVG, PNG, pages and traces. Draws what it is
given and computes nothing.

`draw` is bound here, after its module has been loaded: it is also the name of the module, and what is bound last stays.
"""

from .draw import draw

__all__ = ["draw"]
