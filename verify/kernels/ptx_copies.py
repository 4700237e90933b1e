"""Copies of PTX from global to shared memory that go on while their thread does: cp.async and its groups.

Between its start and the wait for its group nobody knows what lies at the target of a copy. So the target is no number
from the start on, and has the values, read at the start, from the last moment allowed on, when the thread waits for
them: a wait that is missing, too late or for one group too few is found. Both count as writes of the thread for races.
"""

from __future__ import annotations

import re

import numpy as np

from .ptx_block import Active, Array, Block, Copy, Source, Step, UnknownInstruction, chosen, expect, source
from .ptx_memory import MemoryFault, Users
from .ptx_parser import Line, Program
from .ptx_transfers import address_of

_COPY = re.compile(r"cp\.async\.(ca|cg)\.shared(?:::cta)?\.global((?:\.L2::\w+)*)")
_WORD = 4
UNKNOWN = 0xFFFFFFFF
"""In each word of a target: what is not a number in fp32, bf16 and fp16."""


def copy(program: Program, line: Line) -> Step | None:
    """The instruction as a step; None for one that is none of these. Raises `UnknownInstruction`."""
    if found := _COPY.fullmatch(line.opcode):
        return _start(program, line, found)
    if line.opcode == "cp.async.commit_group":
        return _close
    if line.opcode == "cp.async.wait_group":
        expect(line, line.operands, 1)
        left = int(line.operands[0], 0)
        return lambda block, active: _wait(block, active, left)
    if line.opcode == "cp.async.wait_all":
        return lambda block, active: _wait(block, active, -1)
    return None


def _start(program: Program, line: Line, found: re.Match[str]) -> Step:
    how, hints = found.groups()
    operands = line.operands[:-1] if ".L2::cache_hint" in hints else line.operands
    if len(operands) not in (3, 4):
        raise UnknownInstruction(line, f"{len(operands)} operands in the place of 3 or 4")
    num_bytes = int(operands[2], 0)
    if num_bytes not in ((16,) if how == "cg" else (4, 8, 16)):
        raise UnknownInstruction(line, f"a copy of {num_bytes} bytes")
    read_target = address_of(program, line, operands[0], is_shared=True)
    read_source = address_of(program, line, operands[1])
    read_given: Source = source(program, line, operands[3] if len(operands) == 4 else operands[2], "b32")

    def start(block: Block, active: Active) -> None:
        users = block.users(active)
        targets, sources = (chosen(read(block), active) for read in (read_target, read_source))
        given = chosen(block.whole(read_given(block)), active)
        if (given > num_bytes).any() or (given % _WORD).any():
            raise UnknownInstruction(line, f"it reads no multiple of {_WORD} bytes up to {num_bytes}")
        if (sources % np.uint64(num_bytes)).any():
            raise MemoryFault(f"a source is no multiple of the {num_bytes} bytes that are copied.")
        words = _read(block, sources, given, num_bytes, users)
        block.shared.store(targets, _WORD, [np.full(len(targets), UNKNOWN, np.uint32)] * len(words), users)
        group = block.copies.closed[users.threads]
        block.copies.pending.append(Copy(users.threads, targets, words, group))

    return start


def _read(block: Block, sources: Array, given: Array, num_bytes: int, users: Users) -> Array:
    """The first `given` bytes of each source, then zeros: uint32[words, threads]."""
    words = np.zeros((num_bytes // _WORD, len(sources)), np.uint32)
    for number, word in enumerate(words):
        those = given > _WORD * number
        places = sources[those] + np.uint64(_WORD * number)
        word[those] = block.launch.memory.load(places, _WORD, 1, Users(users.threads[those], users.races))[0]
    return words


def _close(block: Block, active: Active) -> None:
    """All copies that a thread has started since its last group are one group."""
    block.copies.closed[block.users(active).threads] += 1


def _wait(block: Block, active: Active, left: int) -> None:
    """Until no more than the last `left` groups of a thread go on; -1 for none and no open one either."""
    waits = np.zeros(block.num_threads, bool)
    waits[block.users(active).threads] = True
    copies, going = block.copies, []
    for each in copies.pending:
        done = waits[each.threads] & (each.group < copies.closed[each.threads] - left)
        if done.any():
            ended = each.those(done)
            users = Users(ended.threads, block.races)
            block.shared.store(ended.targets, _WORD, list(ended.words), users)
        if not done.all():
            going.append(each.those(~done))
    copies.pending = going
