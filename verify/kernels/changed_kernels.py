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
from .barrier_mutants import KERNEL_MUTANTS

KERNELS = Path(__file__).resolve().parents[2] / "backend" / "kernels"
FILES = ("peers", "tree", "meet", "collectives")
UNCHANGED = "unchanged"


def check_changed_kernels() -> dict[str, str]:
    """What the checker says of an all-gather over each of `KERNEL_MUTANTS`, and over `meet` as it is."""
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

    meet = read_text(str(KERNELS / "meet.py"))
    texts = {UNCHANGED: meet, **{mutant.name: mutant.applied(meet) for mutant in KERNEL_MUTANTS}}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, text) in enumerate(texts.items()):
            function = changed_function("all_gather", "meet", text, Path(folder) / f"changed_{number}")
            changed = replace(kernel("all_gather"), function=function)
            found[name] = what_is_wrong(changed).partition(":")[0] or "ok"
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
