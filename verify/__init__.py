"""Proves schedules and plans: `check` by rules, the `verify` verb also by symbols and by bits.

`check` is bound here, after its module has been loaded: it is also the name of the module, and what is bound last stays.
"""

from .assertions import assert_bitwise, assert_fits, assert_schedule
from .check import check
from .facts import Facts
from .foreign import Recorder

__all__ = ["Facts", "Recorder", "assert_bitwise", "assert_fits", "assert_schedule", "check"]
