"""`environment`: with it a Python process, and all that it starts, has pretended CUDA."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .build import library

MOST_DEVICES = 16
"""As many as the library has room for."""

STUBS = Path(__file__).parent / "stubs.py"

AT_START = '''"""Loads pretended CUDA before torch, and puts what Python sees of it into modules as they are loaded."""

import ctypes
import importlib.abc
import importlib.util
import os
import sys


class AfterImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        install = stubs.AFTER.pop(name, None)  # those who find it for this finder do not ask it again
        if install is None:
            return None
        try:
            spec = importlib.util.find_spec(name)
        finally:
            stubs.AFTER[name] = install  # who asks where a module is does not always load it
        load = spec.loader.exec_module

        def load_and_install(module):
            load(module)
            install(module)

        spec.loader.exec_module = load_and_install
        return spec


found = importlib.util.spec_from_file_location("shardproof_pretended_stubs", os.environ["SHARDPROOF_PRETENDED_STUBS"])
stubs = importlib.util.module_from_spec(found)
sys.modules["shardproof_pretended_stubs"] = stubs
found.loader.exec_module(stubs)
stubs.library = ctypes.CDLL(os.environ["SHARDPROOF_PRETENDED_CUDA"], mode=ctypes.RTLD_GLOBAL)
sys.meta_path.insert(0, AfterImport())
'''
"""What every process runs when it starts (`sitecustomize`)."""


def environment(
    folder: str | Path, *, devices: int = 8, capability: tuple[int, int] = (9, 0), log: bool = False
) -> Mapping[str, str]:
    """The environment of this process with pretended CUDA. `folder` is one of the caller's, which the processes look
    into; with `log` each leaves there, in `logs`, what it gave to streams. Devices have a compute capability; the
    PTX of our products is carried out for 8.0 alone.

    Raises `PlanError` where there is no C++ compiler, `InternalError` where it fails.
    """
    folder = Path(folder)
    (folder / "sitecustomize.py").write_text(AT_START)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "SHARDPROOF_PRETENDED_CUDA": str(library()),
        "SHARDPROOF_PRETENDED_STUBS": str(STUBS),
        "SHARDPROOF_PRETENDED_DEVICES": str(devices),
        "SHARDPROOF_PRETENDED_CAPABILITY": "{}.{}".format(*capability),
    }
    if log:
        (folder / "logs").mkdir(exist_ok=True)
        found["SHARDPROOF_PRETENDED_LOG"] = str(folder / "logs")
    return found
