"""The library that makes a torch without CUDA have devices "cuda": built on demand, kept for the next time."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ...core.base.errors import InternalError, PlanError

SOURCE = Path(__file__).parent / "csrc" / "pretended_cuda.cpp"
CACHE_VARIABLE = "XDG_CACHE_HOME"
BUILD_S = 600.0


def library() -> Path:
    """Where the library for the installed torch lies. Building it takes half a minute, once.

    Raises `PlanError` where there is no C++ compiler, `InternalError` where it fails.
    """
    import torch

    parts, home = sorted(SOURCE.parent.iterdir()), Path(torch.__file__).parent
    # the library finds torch's own where it was built for it, so another environment has another
    text = b"".join(part.read_bytes() for part in parts) + f"{torch.__version__} {sys.version_info[:2]} {home}".encode()
    name = f"pretended_cuda_{hashlib.sha256(text).hexdigest()[:16]}.so"
    folder = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache") / "shardproof"
    made = folder / name
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _build(home, made)
    return made


def _build(torch: Path, made: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        raise PlanError("pretended CUDA needs a C++ compiler, and none is found. Install g++, or set CXX.")
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        new = Path(folder) / made.name
        done = subprocess.run(
            [
                compiler,
                *("-std=c++20", "-O1", "-g0", "-w", "-shared", "-fPIC", str(SOURCE), "-o", str(new)),
                *(f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"),
                *(f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-lc10", "-ltorch_cpu"),
            ],
            capture_output=True,
            text=True,
            timeout=BUILD_S,
        )
        if done.returncode:
            raise InternalError(f"pretended CUDA is not built: {done.stderr[:2000]}")
        new.replace(made)
