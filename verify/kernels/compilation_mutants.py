"""Kernels compiled as they should not be, and which floor finds it: "assembled" by what the code takes, "PTX executed"
by its bits or because the bits of an instruction are left open."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ...backend.kernels.kernel import Kernel
from ...core.base.files import read_text
from .barrier_mutants import replaced_once
from .processes import PTX_EXECUTED, Peer, PeerFailed, Peers

ARCHITECTURE = 90


@dataclass(frozen=True)
class ChangedKernel(Kernel):
    """A kernel that is compiled with other options."""

    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Of a compilation."""
        return {**super().options, **self.changes}

    @classmethod
    def of(cls, kernel: Kernel, changes: Mapping[str, Any]) -> ChangedKernel:
        """`kernel` with `changes` of its options."""
        return cls(**{each.name: getattr(kernel, each.name) for each in fields(kernel)}, changes=changes)


@dataclass(frozen=True)
class CompilationMutant:
    """A kernel of the catalog with other options of the compiler, or over a `peers.py` where `before` is `after`.

    `finds` has, of each floor that must find it, words that the floor says.
    """

    name: str
    kernel: str
    finds: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    before: str = ""
    after: str = ""


COMPILATION_MUTANTS = (
    CompilationMutant(
        "scalar loads",
        "all_gather",
        {"assembled": "peers are read 2 bytes at a time"},
        before="return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)",
        after="return address.to(tl.pointer_type(dtype))",
    ),
    CompilationMutant(
        "a thread has half of a vector",
        "all_reduce_one_shot",
        {"assembled": "peers are read 8 bytes at a time"},
        options={"num_warps": 8},
    ),
    CompilationMutant(
        "contraction on",
        "add_norm_gather",
        {"assembled": "are one operation or may become one", "PTX executed": "its bits are open"},
        options={"enable_fp_fusion": True},
    ),
    CompilationMutant(
        "too few registers", "reduce_scatter", {"assembled": "spilled loads and stores"}, options={"maxnreg": 32}
    ),
)


def check_compilation_mutants() -> dict[str, dict[str, str]]:
    """What is said of each mutant by the floors that find it, in the order assembled, PTX executed."""
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"kernels are not compiled: {done.stderr[-2000:]}")
    found: dict[str, dict[str, str]] = {
        name: {"assembled": words} if words else {} for name, words in json.loads(done.stdout).items()
    }
    with Peers(2, floor=PTX_EXECUTED, environment={}) as peers:
        for mutant in COMPILATION_MUTANTS:
            if mutant.options and (words := _executed(peers, mutant)):
                found[mutant.name]["PTX executed"] = words
    return found


def main() -> None:
    """The process of `check_compilation_mutants`: what the floor "assembled" says of each, on standard output."""
    with tempfile.TemporaryDirectory() as folder:
        found = {mutant.name: _assembled(mutant, Path(folder)) for mutant in COMPILATION_MUTANTS}
    json.dump(found, sys.stdout)


def _assembled(mutant: CompilationMutant, folder: Path) -> str:
    from ...backend.kernels.catalog import kernel
    from .assembly import assembled
    from .changed_kernels import KERNELS, modules_with

    original = changed = kernel(mutant.kernel)
    if mutant.before:
        text = replaced_once(mutant.name, read_text(str(KERNELS / "peers.py")), mutant.before, mutant.after)
        collectives = modules_with("peers", text, folder / f"of_{mutant.kernel}")["collectives"]
        changed = replace(changed, function=getattr(collectives, mutant.kernel))
    return assembled(ChangedKernel.of(changed, mutant.options), ARCHITECTURE).why_not(original)


def _executed(peers: Peers, mutant: CompilationMutant) -> str:
    from .cases import few_cases

    for case in few_cases(mutant.kernel, peers.world_size):
        try:
            outcomes = peers.run(run_changed, case, dict(mutant.options))
        except PeerFailed as error:
            return f"refused: {str(error).strip().splitlines()[-1].partition(': ')[2].rstrip('.')}"
        if wrong := sum(outcome.wrong_bits for outcome in outcomes):
            return f"{wrong} bits are wrong"
    return ""


def run_changed(peer: Peer, case: Any, options: Mapping[str, Any]) -> Any:
    """A job: a case of a kernel that is compiled with other options."""
    from .cases import run_case

    def launch(
        kernel: Kernel,
        num_blocks: int,
        arguments: Mapping[str, Any],
        constants: Mapping[str, Any],
        reached: Sequence[Tensor] = (),
    ) -> None:
        peer.launch(ChangedKernel.of(kernel, options), num_blocks, arguments, constants, reached)

    return run_case(replace(peer, launch=launch), case)
