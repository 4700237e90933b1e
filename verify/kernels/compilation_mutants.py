"""Kernels whose code is not what it should be, and which floor finds it: "assembled" by what the code takes, "PTX
executed" by its bits or because the bits of an instruction are left open."""

from __future__ import annotations

import json
import pickle
import re
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
from .changed_kernels import KERNELS, changed_function
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
    """A kernel of the catalog with other options of the compiler, or with a `file` in which `before` is `after`.

    `finds` has, of each floor that must find it, words that the floor says; others are not asked.
    """

    name: str
    kernel: str
    finds: Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""
    before: str = ""
    after: str = ""

    def kernel_in(self, folder: Path) -> Kernel:
        """The changed kernel, its source below `folder`."""
        from ...backend.kernels.catalog import kernel

        changed = kernel(self.kernel)
        if self.file:
            text = replaced_once(self.name, read_text(str(KERNELS / f"{self.file}.py")), self.before, self.after)
            function = changed_function(self.kernel, self.file, text, folder / f"changed_{self.file}")
            changed = replace(changed, function=function)
        return ChangedKernel.of(changed, self.options)


COMPILATION_MUTANTS = (
    CompilationMutant(
        "scalar loads",
        "all_gather",
        {"assembled": "peers are read 2 bytes at a time"},
        file="peers",
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


def check_compilation_mutants(mutants: Sequence[CompilationMutant]) -> dict[str, dict[str, str]]:
    """What is said of each mutant by the floors that must find it, in the order assembled, PTX executed; nothing where
    they do not."""
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"]
    asked = [mutant for mutant in mutants if "assembled" in mutant.finds]
    done = subprocess.run(command, input=pickle.dumps(asked), capture_output=True)
    if done.returncode:
        raise RuntimeError(f"kernels are not compiled: {done.stderr.decode()[-2000:]}")
    by_assembly = json.loads(done.stdout)
    found: dict[str, dict[str, str]] = {mutant.name: {} for mutant in mutants}
    with Peers(2, floor=PTX_EXECUTED, environment={}) as peers:
        for mutant in mutants:
            if words := by_assembly.get(mutant.name):
                found[mutant.name]["assembled"] = words
            if "PTX executed" in mutant.finds and (words := _executed(peers, mutant)):
                found[mutant.name]["PTX executed"] = words
    return found


def main() -> None:
    """The process of `check_compilation_mutants`: mutants on standard input, what the floor "assembled" says of each on
    standard output."""
    mutants: list[CompilationMutant] = pickle.load(sys.stdin.buffer)
    with tempfile.TemporaryDirectory() as folder:
        found = {mutant.name: _assembled(mutant, Path(folder) / str(number)) for number, mutant in enumerate(mutants)}
    json.dump(found, sys.stdout)


def _assembled(mutant: CompilationMutant, folder: Path) -> str:
    from ...backend.kernels.catalog import kernel
    from .assembly import assembled

    folder.mkdir()
    found = assembled(mutant.kernel_in(folder), ARCHITECTURE)
    return "; ".join(words for each in found if (words := each.why_not(kernel(mutant.kernel))))


def _executed(peers: Peers, mutant: CompilationMutant) -> str:
    from .cases import few_cases

    for case in few_cases(mutant.kernel, peers.world_size, compiled=True):
        try:
            outcomes = peers.run(run_changed, case, mutant, world_size=case.world_size)
        except PeerFailed as error:
            words = str(error).strip().splitlines()[-1].partition(": ")[2].rstrip(".")
            return f"refused: {re.sub(' at 0x[0-9a-f]+', '', words)}"
        if wrong := sum(outcome.wrong_bits for outcome in outcomes):
            return f"{wrong} bits are wrong"
    return ""


def run_changed(peer: Peer, case: Any, mutant: CompilationMutant) -> Any:
    """A job: a case of a changed kernel."""
    from .cases import run_case

    with tempfile.TemporaryDirectory() as folder:
        changed = mutant.kernel_in(Path(folder))

        def launch(
            kernel: Kernel,
            num_blocks: int,
            arguments: Mapping[str, Any],
            constants: Mapping[str, Any],
            reached: Sequence[Tensor] = (),
        ) -> None:
            ours = replace(changed, num_warps=kernel.num_warps, num_stages=kernel.num_stages)
            peer.launch(ours, num_blocks, arguments, constants, reached)

        return run_case(replace(peer, launch=launch), case)
