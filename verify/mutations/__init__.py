"""Real bugs of other stacks, each put into this backend on purpose, and the command that counts what a proof
names. No run imports it.

`verify --inject` puts a single dropped reduction into a proof (`verify.run.drop`); `catalog` has the
bugs, `run` judges them."""

from ..run.drop import DropReduction, drop_reduction, parse_fault

__all__ = ["DropReduction", "drop_reduction", "parse_fault"]
