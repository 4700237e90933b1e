"""Small texts of PTX, written by hand, and how they are carried out on arrays of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardproof.verify.kernels.ptx_block import LaunchContext
from shardproof.verify.kernels.ptx_machine import executable
from shardproof.verify.kernels.ptx_memory import Memory, Multicast, Region

DECLARED = ".reg .pred %p<16>;\n.reg .b16 %rs<16>;\n.reg .b32 %r<40>;\n.reg .b64 %rd<40>;\n"
PREFIX = {1: "%p", 16: "%rs", 32: "%r", 64: "%rd"}


def text(body: str, num_threads: int, num_parameters: int) -> str:
    parameters = ",\n".join(f".param .u64 kernel_param_{index}" for index in range(num_parameters))
    head = f".visible .entry kernel(\n{parameters}\n)\n.reqntid {num_threads}\n"
    return f"{head}{{\n{DECLARED}{body}\nret;\n}}\n"


def unexpected(address: int) -> None:
    raise AssertionError(f"a swap at {address:#x} found another value")


def carry_out(
    body: str,
    arrays: Sequence[np.ndarray],
    num_threads: int = 32,
    num_blocks: int = 1,
    shared_bytes: int = 0,
    failed: Callable[[int], None] = unexpected,
    multicast: Multicast | None = None,
    is_writable: bool = True,
) -> None:
    """Runs a kernel whose parameters are the addresses of `arrays`, its only memory."""
    regions = [
        Region(f"array {index}", each.ctypes.data, each.nbytes, is_writable) for index, each in enumerate(arrays)
    ]
    executable(text(body, num_threads, len(arrays))).run(
        LaunchContext(
            parameters=tuple(each.ctypes.data for each in arrays),
            num_blocks=num_blocks,
            num_threads=num_threads,
            shared_bytes=shared_bytes,
            memory=Memory(regions),
            failed=failed,
            multicast=multicast,
        )
    )


def own_element(register: int, parameter: int, width: int) -> str:
    """Puts the address of this thread's element of an array of `width` bits into %rd<register>."""
    return (
        f"mov.u32 %r39, %tid.x;\nld.param.b64 %rd{register}, [kernel_param_{parameter}];\n"
        f"mad.wide.u32 %rd{register}, %r39, {width // 8}, %rd{register};\n"
    )


def calculated(opcode: str, operands: Sequence[np.ndarray], bits: int) -> np.ndarray:
    """What an instruction makes of arrays of unsigned numbers, one element for each thread: numbers of `bits` bits, 1
    for a predicate. A bool array is an operand in a predicate."""
    body, names = "", []
    num_threads = len(operands[0])
    arrays = [each.astype(np.uint16) if each.dtype == bool else np.ascontiguousarray(each) for each in operands]
    for index, (array, given) in enumerate(zip(arrays, operands, strict=True)):
        width = 8 * array.itemsize
        register = f"{PREFIX[width]}{index + 1}"
        body += own_element(20 + index, index, width) + f"ld.global.b{width} {{ {register} }}, [ %rd{20 + index} ];\n"
        if given.dtype == bool:
            body += f"setp.ne.b16 %p{index + 1}, {register}, 0;\n"
            register = f"%p{index + 1}"
        names.append(register)
    width = max(bits, 16)
    result = np.full(num_threads, 0x5A5A, f"uint{width}")
    target = f"{PREFIX[bits]}9"
    body += f"{opcode} {target}, {', '.join(names)};\n" + own_element(30, len(arrays), width)
    if bits == 1:
        body += "selp.b16 %rs9, 1, 0, %p9;\n"
    body += f"st.global.b{width} [ %rd30 + 0 ], {{ {PREFIX[width]}9 }};\n"
    carry_out(body, [*arrays, result], num_threads)
    return result
