"""What setuptools cannot read from pyproject.toml: the compiled loops of the event engine, of digests and of exact
numerics, and that this file is not part of the package.

They are optional: where no C compiler is found the package installs without them, and plain Python and numpy do the
work. Built against the stable ABI of Python 3.11, so one wheel per platform serves every later Python.
"""

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py


class Modules(build_py):
    """The modules of the package, whose folder this file lies in without being one of them."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """As setuptools finds them, without this file."""
        return [found for found in super().find_package_modules(package, package_dir) if found[1] != "setup"]


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
        compiled("simulator.engine._kernel", Path("simulator", "engine", "csrc")),
        compiled("core.base._digest", Path("core", "base", "csrc")),
        compiled("backend.numerics._exact", Path("backend", "numerics", "csrc")),
        compiled("backend.transport.symmetric._shared_memory", Path("backend", "transport", "symmetric", "csrc")),
    ],
    cmdclass={"build_py": Modules},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
