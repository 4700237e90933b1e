"""The command `python -m shardproof.verify.matrix`."""

import sys

from .matrix import main

if __name__ == "__main__":
    sys.exit(main())
