"""`python -m shardproof VERB ...` and `torchrun ... -m shardproof train PLAN`: the command line without its script."""

import sys

from .core.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
