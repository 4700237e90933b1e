"""The command `python -m shardproof.verify.matrix_modules`."""

import sys

from ..core.commands.cli import run_program
from .matrix.modules import main

if __name__ == "__main__":
    sys.exit(run_program("python -m shardproof.verify.matrix_modules", main))
