"""Kernels compiled by Triton for AMD's gfx942 (MI300): that there is code, and no more. Nothing here runs it or reads
its barriers, and whether AMD's memory is shared between GPUs as the kernels need is not looked at."""

from __future__ import annotations

import json
import re
import subprocess
import sys

GFX942 = "gfx942"
TILES_OF = 80
"""Products are compiled with the tiles for this compute capability (times ten): AMD has none of its own yet."""


def compiled_for_amd() -> dict[str, str]:
    """Of each kernel that has no instruction of NVIDIA's in its source: empty where all its launches become code
    without spilled vector registers, else why not. In a process of its own, which the compiler may end."""
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"kernels are not compiled for {GFX942}: {done.stderr[-2000:]}")
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main() -> None:
    """The process of `compiled_for_amd`."""
    from ...backend.kernels.catalog import KERNELS
    from .compiling import compiled_launch
    from .launches import launches_of

    found: dict[str, str] = {}
    for kernel in (each for each in KERNELS if "multicast" not in each.function.arg_names):
        wrong = []
        for launch in launches_of(kernel, TILES_OF):
            try:
                made = compiled_launch(launch.kernel, launch.arguments, launch.constants, GFX942)
            except RuntimeError as error:
                wrong.append(str(error).strip().splitlines()[-1])
                continue
            spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", made.asm["amdgcn"])
            if not made.asm["hsaco"] or spills is None or int(spills.group(1)):
                wrong.append(f"{launch.form or kernel.name} spills registers, or has no code")
        found[kernel.name] = "; ".join(wrong)
    json.dump(found, sys.stdout)
