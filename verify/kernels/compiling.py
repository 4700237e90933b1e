"""Compiles a kernel with Triton for a GPU that need not be here. Imports Triton."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from ...backend.kernels.kernel import Kernel

Types = Mapping[str, str]
"""Of a kernel's arguments, such as `*bf16` or `i64`; `constexpr` for what is compiled in."""

Architecture = int | str
"""Compute capability times ten, or a name of AMD's, such as gfx942."""


def compiled(
    kernel: Kernel,
    types: Types,
    constants: Mapping[Any, Any],
    attributes: Mapping[Any, Any] | None = None,
    *,
    architecture: Architecture,
) -> Any:
    """Triton's compiled kernel, with its PTX and its code for that architecture.

    `attributes` say of an argument, by its path, that it is a multiple of 16.
    """
    source = ASTSource(fn=kernel.function, signature=dict(types), constexprs=dict(constants), attrs=attributes)
    return triton.compile(source, target=_target(architecture), options=dict(kernel.options))


@dataclass(frozen=True)
class LaunchCode:
    """A kernel as a launch compiles it: its PTX, the shared memory of a block in bytes, and the names of the arguments
    that are parameters of it, in order."""

    ptx: str
    shared_bytes: int
    parameters: tuple[str, ...]


NUM_LOCKS = 32
"""Files that processes lock while they compile; two codes may share one."""

_CODE: dict[tuple[Any, ...], LaunchCode] = {}


def compiled_launch(
    kernel: Kernel, arguments: Mapping[str, Any], constants: Mapping[str, Any], architecture: Architecture
) -> Any:
    """Triton's compiled kernel as a launch with these arguments compiles it: types from the values, and whether
    pointers and whole numbers are multiples of 16 or 1, by Triton's own rules. Raises `RuntimeError` where Triton
    interprets."""
    return _Specialized(kernel, arguments, constants, architecture).compiled()


def code_of_launch(
    kernel: Kernel, arguments: Mapping[str, Any], constants: Mapping[str, Any], architecture: Architecture
) -> LaunchCode:
    """What `compiled_launch` compiles.

    Each such code is compiled once in a process, and once by all processes of this machine while it is in Triton's
    cache on disk. Raises `RuntimeError` where Triton interprets or the kernel needs memory that a launch allocates.
    """
    special = _Specialized(kernel, arguments, constants, architecture)
    key = (kernel.function, architecture, special.described)
    if key not in _CODE:
        with _one_process(repr((kernel.name, kernel.function.cache_key, architecture, special.described))):
            made = special.compiled()
        _CODE[key] = _launch_code(kernel, made, special.types)
    return _CODE[key]


class _Specialized:
    """What Triton makes of a launch's arguments; `described` is equal for launches with the same code."""

    def __init__(
        self, kernel: Kernel, arguments: Mapping[str, Any], constants: Mapping[str, Any], architecture: Architecture
    ):
        function = kernel.function
        if not isinstance(function, JITFunction):
            raise RuntimeError(f"{kernel.name} is interpreted: unset TRITON_INTERPRET before Triton is loaded.")
        self._kernel, self._architecture = kernel, architecture
        self._backend = make_backend(_target(architecture))
        bind = create_function_from_signature(function.signature, function.params, self._backend)
        self._given = {**arguments, **constants}
        self._bound, self._specialization, _ = bind(**self._given)
        self.described = repr((sorted(kernel.options.items()), sorted(constants.items()), self._specialization))

    @cached_property
    def _packed(self) -> tuple[Types, Mapping[Any, Any], Mapping[Any, Any]]:
        options = dict(self._kernel.options)
        _, types, constants, attributes = self._kernel.function._pack_args(
            self._backend, {**self._given, **options}, self._bound, self._specialization, options
        )
        return types, constants, attributes

    @property
    def types(self) -> Types:
        """Of the arguments."""
        return self._packed[0]

    def compiled(self) -> Any:
        """Compiles it, or finds it in Triton's cache."""
        return compiled(self._kernel, *self._packed, architecture=self._architecture)


def _launch_code(kernel: Kernel, made: Any, types: Types) -> LaunchCode:
    if getattr(made.metadata, "global_scratch_size", 0) or getattr(made.metadata, "profile_scratch_size", 0):
        raise RuntimeError(f"{kernel.name} needs scratch memory, which a launch here does not allocate.")
    names = tuple(name for name, kind in types.items() if kind != "constexpr")
    return LaunchCode(str(made.asm["ptx"]), int(made.metadata.shared), names)


def _target(architecture: Architecture) -> GPUTarget:
    return GPUTarget("hip", architecture, 64) if isinstance(architecture, str) else GPUTarget("cuda", architecture, 32)


@contextmanager
def _one_process(code: str) -> Iterator[None]:
    """Peers come to the same code at the same time: one compiles it, the others find it in Triton's cache."""
    number = hashlib.sha256(code.encode()).digest()[0] % NUM_LOCKS
    name = f"shardproof-triton-{os.getuid()}-{number}.lock"
    with (Path(tempfile.gettempdir()) / name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
