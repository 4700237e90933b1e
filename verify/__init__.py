"""Proves schedules and plans: `check` by rules, the `verify` verb also by symbols and by bits.

`check` is bound here, after its module has been loaded: it is also the name of the module, and what is bound last stays.
"""

from .check import check
from .facts import Facts

__all__ = ["Facts", "check"]
