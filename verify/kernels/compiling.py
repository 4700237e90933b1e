"""Compiles a kernel with Triton for a GPU that need not be here. Imports Triton."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from ...backend.kernels.kernel import Kernel

Types = Mapping[str, str]
"""Of a kernel's arguments, such as `*bf16` or `i64`; `constexpr` for what is compiled in."""


def compiled(
    kernel: Kernel,
    types: Types,
    constants: Mapping[Any, Any],
    attributes: Mapping[Any, Any] | None = None,
    *,
    architecture: int,
    changes: Mapping[str, Any] | None = None,
) -> Any:
    """Triton's compiled kernel, with its PTX and its code for that architecture (compute capability times ten).

    `attributes` say of an argument, by its path, that it is a multiple of 16; `changes` are other options of the
    compiler than the kernel's.
    """
    source = ASTSource(fn=kernel.function, signature=dict(types), constexprs=dict(constants), attrs=attributes)
    return triton.compile(source, target=_target(architecture), options={**kernel.options, **(changes or {})})


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


def code_of_launch(
    kernel: Kernel, arguments: Mapping[str, Any], constants: Mapping[str, Any], architecture: int
) -> LaunchCode:
    """What Triton would compile when a kernel is launched with these arguments: types from the values, and whether
    pointers and whole numbers are multiples of 16, by Triton's own rules.

    Each such code is compiled once in a process, and once by all processes of this machine while it is in Triton's
    cache on disk. Raises `RuntimeError` where Triton interprets or the kernel needs memory that a launch allocates.
    """
    function = kernel.function
    if not isinstance(function, JITFunction):
        raise RuntimeError(f"{kernel.name} is interpreted: unset TRITON_INTERPRET before Triton is loaded.")
    backend = make_backend(_target(architecture))
    bind = create_function_from_signature(function.signature, function.params, backend)
    given = {**arguments, **constants}
    bound, specialization, _ = bind(**given)
    described = (sorted(kernel.options.items()), sorted(constants.items()), specialization)
    key = (function, architecture, repr(described))
    if key not in _CODE:
        options = dict(kernel.options)
        _, types, compiled_in, attributes = function._pack_args(
            backend, {**given, **options}, bound, specialization, options
        )
        with _one_process(repr((kernel.name, function.cache_key, architecture, described))):
            made = compiled(kernel, types, compiled_in, attributes, architecture=architecture)
        _CODE[key] = _launch_code(kernel, made, types)
    return _CODE[key]


def _launch_code(kernel: Kernel, made: Any, types: Types) -> LaunchCode:
    if getattr(made.metadata, "global_scratch_size", 0) or getattr(made.metadata, "profile_scratch_size", 0):
        raise RuntimeError(f"{kernel.name} needs scratch memory, which a launch here does not allocate.")
    names = tuple(name for name, kind in types.items() if kind != "constexpr")
    return LaunchCode(str(made.asm["ptx"]), int(made.metadata.shared), names)


def _target(architecture: int) -> GPUTarget:
    return GPUTarget("cuda", architecture, 32)


@contextmanager
def _one_process(code: str) -> Iterator[None]:
    """Peers come to the same code at the same time: one compiles it, the others find it in Triton's cache."""
    number = hashlib.sha256(code.encode()).digest()[0] % NUM_LOCKS
    name = f"shardproof-triton-{os.getuid()}-{number}.lock"
    with (Path(tempfile.gettempdir()) / name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
