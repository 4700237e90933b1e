"""Every kernel on every floor that it declares: what holds here, with the Triton that is installed."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ...backend.kernels.kernel import Floor
from .assembly import ARCHITECTURES, assemble
from .processes import INTERPRETED, PTX_EXECUTED

HOLDS = "ok"
PEERS = (2, 3)
"""Ranks that interpret kernels and carry out their PTX."""

ON_PROCESSES: dict[Floor, tuple[str, dict[str, str]]] = {
    "interpreted": (INTERPRETED, {"TRITON_INTERPRET": "1"}),
    "PTX executed": (PTX_EXECUTED, {"TRITON_INTERPRET": "0"}),
}
"""The floors that run kernels on processes: what launches them, and what their environment needs."""

Found = dict[str, dict[str, str]]
"""Kernel -> floor -> `HOLDS`, or what is wrong."""


def kernel_floors(architectures: Sequence[int] = ARCHITECTURES, peers: Sequence[int] = PEERS) -> Found:
    """What holds of every kernel in the catalog. Takes some tens of seconds; needs Triton and torch, and no GPU."""
    from ...backend.kernels.catalog import KERNELS
    from .kernel_protocols import check_kernels

    found: Found = {kernel.name: {} for kernel in KERNELS}
    for floor, (launcher, environment) in ON_PROCESSES.items():
        of_floor = [kernel.name for kernel in KERNELS if floor in kernel.floors]
        for name, words in _run(of_floor, peers, launcher, environment).items():
            found[name][floor] = words
    compiled = assemble(architectures=architectures)
    for kernel in KERNELS:
        of_kernel = [each for each in compiled if each.kernel == kernel.name]
        if "assembled" in kernel.floors:
            wrong = [f"sm_{each.architecture}: {why}" for each in of_kernel if (why := each.why_not(kernel))]
            found[kernel.name]["assembled"] = "; ".join(wrong) or HOLDS
    explored = [kernel.name for kernel in KERNELS if "model-checked" in kernel.floors]
    for name, words in check_kernels(explored, architectures).items():
        found[name]["model-checked"] = words or HOLDS
    return found


def floors_with(folder: str) -> tuple[str, Found]:
    """The version of Triton that is unpacked in `folder`, and `kernel_floors` with it. Raises `RuntimeError` where its
    process fails."""
    path = [folder, *sys.path]
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; from {__name__} import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"with the Triton in {folder}: {done.stderr[-2000:]}")
    version, found = json.loads(done.stdout)
    return version, found


def main() -> None:
    """The process of `floors_with`: the version of Triton and what holds, on standard output."""
    found = kernel_floors()
    json.dump((importlib.metadata.version("triton"), found), sys.stdout)


def _run(kernels: Sequence[str], peers: Sequence[int], launcher: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What is wrong of each kernel's cases, run by processes with that launcher."""
    from .cases import few_cases, run_case
    from .processes import PeerFailed, Peers, PeersMissing

    found = {}
    with Peers(max(peers), launcher, environment) as processes:
        for kernel in kernels:
            compiled = launcher != INTERPRETED
            cases = {case: None for size in peers for case in few_cases(kernel, size, compiled=compiled)}
            try:
                wrong = [
                    str(case)
                    for case in cases
                    if not all(rank.right for rank in processes.run(run_case, case, world_size=case.world_size))
                ]
                found[kernel] = f"wrong: {', '.join(wrong)}" if wrong else HOLDS
            except (PeerFailed, PeersMissing, OSError) as error:  # or all peers have ended before
                found[kernel] = str(error).strip().splitlines()[-1]
    return found
