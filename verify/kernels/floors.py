"""Every kernel on every floor that it declares: what holds here, with the Triton that is installed."""

from __future__ import annotations

from collections.abc import Sequence

from .assembly import ARCHITECTURES, assemble

HOLDS = "ok"
PEERS = (2, 3)
"""Ranks that interpret kernels."""

Found = dict[str, dict[str, str]]
"""Kernel -> floor -> `HOLDS`, or what is wrong."""


def kernel_floors(architectures: Sequence[int] = ARCHITECTURES, peers: Sequence[int] = PEERS) -> Found:
    """What holds of every kernel in the catalog. Takes some tens of seconds; needs Triton and torch, and no GPU."""
    from ...backend.kernels.catalog import KERNELS
    from .kernel_protocols import check_kernels

    found: Found = {kernel.name: {} for kernel in KERNELS}
    interpreted = [kernel.name for kernel in KERNELS if "interpreted" in kernel.floors]
    for name, words in _interpreted(interpreted, peers).items():
        found[name]["interpreted"] = words
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


def _interpreted(kernels: Sequence[str], peers: Sequence[int]) -> dict[str, str]:
    from .cases import few_cases, run_case
    from .processes import Peers

    found = {}
    with Peers(max(peers)) as processes:
        for kernel in kernels:
            cases = [case for world_size in peers for case in few_cases(kernel, world_size)]
            wrong = [
                str(case)
                for case in cases
                if not all(rank.right for rank in processes.run(run_case, case, world_size=case.world_size))
            ]
            found[kernel] = f"wrong: {', '.join(wrong)}" if wrong else HOLDS
    return found
