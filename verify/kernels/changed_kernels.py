"""Kernels whose source was changed, compiled in a process of its own: what the model checker says of each."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...core.base.files import read_text
from .barrier_mutants import KERNEL_MUTANTS, MULTICAST_MUTANTS

KERNELS = Path(__file__).resolve().parents[2] / "backend" / "kernels"
FILES = ("peers", "tree", "meet", "collectives", "multicast", "products")
UNCHANGED = "unchanged"


def check_changed_kernels() -> dict[str, str]:
    """What the checker says of an all-gather over each of `KERNEL_MUTANTS`, of one by multicast with each of
    `MULTICAST_MUTANTS`, and of both as they are."""
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"kernels are not compiled: {done.stderr[-2000:]}")
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main() -> None:
    """The process of `check_changed_kernels`."""
    from ...backend.kernels.catalog import kernel
    from .kernel_protocols import what_is_wrong

    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for file, name, mutants in (
            ("meet", "all_gather", KERNEL_MUTANTS),
            ("multicast", "all_gather_multicast", MULTICAST_MUTANTS),
        ):
            source = read_text(str(KERNELS / f"{file}.py"))
            texts = {f"{UNCHANGED} {name}": source, **{mutant.name: mutant.applied(source) for mutant in mutants}}
            for mutant_name, text in texts.items():
                function = changed_function(name, file, text, Path(folder) / f"changed_{len(found)}")
                found[mutant_name] = what_is_wrong(replace(kernel(name), function=function)).partition(":")[0] or "ok"
    json.dump(found, sys.stdout)


def changed_function(kernel: str, file: str, text: str, folder: Path) -> Any:
    """A kernel's function with another text of one of `FILES`, in modules with files of their own, which Triton
    reads, in a new `folder`."""
    folder.mkdir()
    for name in FILES:
        (folder / f"{name}.py").write_text(text if name == file else read_text(str(KERNELS / f"{name}.py")))
    package = f"{__package__.rpartition('.verify.')[0]}.backend.{folder.name}"
    (folder / "__init__.py").touch()
    for name in ("__init__", *FILES):
        full = package if name == "__init__" else f"{package}.{name}"
        spec = importlib.util.spec_from_file_location(full, folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return next(found for name in FILES if (found := getattr(sys.modules[f"{package}.{name}"], kernel, None)))
