"""The one part of the package that setuptools cannot read from pyproject.toml: the compiled loops of the event engine,
of digests and of exact numerics.

They are optional: where no C compiler is found the package installs without them, and plain Python and numpy do the work. Built against
the stable ABI of Python 3.11, so one wheel per platform serves every later Python.
"""

import os
from pathlib import Path

from setuptools import Extension, setup


def compiled(name: str, folder: Path) -> Extension:
    """The extension `shardproof.name` from the C files of a folder."""
    return Extension(
        f"shardproof.{name}",
        sources=sorted(map(str, folder.glob("*.c"))),
        depends=sorted(map(str, folder.glob("*.h"))),
        define_macros=[("Py_LIMITED_API", "0x030B0000")],
        # No fused multiply-add: compiled and plain loops give the same bits on every processor.
        extra_compile_args=[] if os.name == "nt" else ["-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off"],
        optional=True,
        py_limited_api=True,
    )


setup(
    ext_modules=[
        compiled("simulator._kernel", Path("simulator", "csrc")),
        compiled("core._digest", Path("core", "csrc")),
        compiled("backend._exact", Path("backend", "csrc")),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
