"""Every kernel on every floor that it declares: what holds here, with the Triton that is installed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...backend.transport.symmetric.barrier import COLLECTIVE, TWO_PHASES, Step
from .assembly import ARCHITECTURES, Assembled, assemble
from .memory_model import Explored
from .protocols import check_collective
from .source_protocols import UnreadProtocol, ptx_protocol

HOLDS = "ok"
PEERS = (2, 3)
"""Ranks that interpret kernels."""

Found = dict[str, dict[str, str]]
"""Kernel -> floor -> `HOLDS`, or what is wrong."""


def kernel_floors(architectures: Sequence[int] = ARCHITECTURES, peers: Sequence[int] = PEERS) -> Found:
    """What holds of every kernel in the catalog. Takes some tens of seconds; needs Triton and torch, and no GPU."""
    from ...backend.kernels.catalog import KERNELS

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
        if "model-checked" in kernel.floors:
            found[kernel.name]["model-checked"] = _model_checked(of_kernel)
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


def _model_checked(compiled: Iterable[Assembled]) -> str:
    """The protocol of a kernel as it was compiled for each architecture."""
    for each in compiled:
        try:
            explored = check_compiled(each.ptx)
        except UnreadProtocol as error:
            return f"sm_{each.architecture}: {error}"
        if not explored.ok:
            return f"sm_{each.architecture}: {explored.kind}: {'; '.join(explored.trace)}"
    return HOLDS


def check_compiled(ptx: str) -> Explored:
    """The barriers of a compiled collective of one phase or two, explored. Raises `UnreadProtocol` for another form.

    Writes are the table's: of what a rank shares before the kernel, and where there are two phases also between them.
    """
    read = ptx_protocol(ptx)
    second = read.index(Step("read")) + 1 if Step("read") in read else 0
    has_phases = sum(step.act == "signal" for step in read) == sum(step.act == "signal" for step in TWO_PHASES)
    write = COLLECTIVE[:1]
    steps = (*write, *read[:second], *write, *read[second:]) if has_phases else (*write, *read)
    return check_collective(steps)
