"""Every published row predicted again. Usage: python benchmarks/validate.py [--data DIR] [--json] (more: --help)"""

from __future__ import annotations

import sys

from shardproof.benchmarks.published.validation.command import main

if __name__ == "__main__":
    sys.exit(main())
