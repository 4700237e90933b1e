"""The steps of a protocol as they stand in the code: in the C source of shared memory, and in the PTX of a kernel.

Both readers are strict. What they do not understand they refuse, so that a protocol is never right because a step of it
was overlooked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...backend.transport.symmetric.barrier import SCOPE, Act, Order, Step

SENDERS = ("put_chunk", "put_board")
RECEIVERS = ("take_chunk", "take_board")

_ACCESSES = {
    "number_of": r"static uint32_t number_of\(Signal \*signal\) \{ return atomic_load_explicit\("
    r"&signal->value, memory_order_(\w+)\); \}",
    "publish": r"static void publish\(Signal \*signal, uint32_t number\) \{ atomic_store_explicit\("
    r"&signal->value, number, memory_order_(\w+)\); \}",
}
_CALLS = re.compile(r"number_of\(|publish\(|memcpy\((?P<to>[^,]+),|copy_result\((?P<into>[^,]+), (?P<source>[^,]+),")


class UnreadProtocol(ValueError):
    """The code says something that the reader has no step for."""


def c_protocol(source: str, function: str) -> tuple[Step, ...]:
    """The steps of a function of `shared_memory.c`, in order. Looks at free slots and at chunks are waits, since the
    function returns without them and is called again."""
    orders = {name: _order(source, name) for name in _ACCESSES}
    body = _body(source, function)
    steps: list[Step] = []
    for call in _CALLS.finditer(body):
        text = call.group()
        if text.startswith("number_of"):
            if not steps or steps[-1] != Step("wait", orders["number_of"]):
                steps.append(Step("wait", orders["number_of"]))
        elif text.startswith("publish"):
            steps.append(Step("signal", orders["publish"]))
        elif (act := _of_slot(call)) and (not steps or steps[-1] != Step(act)):
            steps.append(Step(act))
    if not {"wait", "signal"} & {step.act for step in steps}:
        raise UnreadProtocol(f"{function} neither waits nor signals.")
    return tuple(steps)


def _of_slot(call: re.Match[str]) -> Act | None:
    """What a copy does with a slot, which the functions call `place`; None for a copy of what is the caller's."""
    target, source = call.group("to") or call.group("into"), call.group("source") or ""
    if "place" in target:
        return "write"
    return "read" if "place" in source or target.strip() == "&whole" else None


def _order(source: str, name: str) -> Order:
    found = re.search(_ACCESSES[name], source)
    if found is None or found.group(1) not in ("relaxed", "acquire", "release"):
        raise UnreadProtocol(f"{name} is not one atomic access with an order.")
    return found.group(1)  # type: ignore[return-value]


def _body(source: str, function: str) -> str:
    found = re.search(rf"^static int {function}\([^)]*\) \{{\n(.*?)^\}}", source, re.MULTILINE | re.DOTALL)
    if found is None:
        raise UnreadProtocol(f"there is no function {function}.")
    return re.sub(r"/\*.*?\*/", "", found.group(1), flags=re.DOTALL)


_ATOMIC = re.compile(r"atom\.(?:global\.)?(?P<order>\w+)\.(?P<scope>\w+)\.(?:global\.)?cas\.b32")
_OTHER_ATOMIC = re.compile(r"\b(?:atom|red|multimem)\.[\w.:]+")
_DATA = re.compile(r"\bst\.global|\bld\.global(?!\.b64\s*\{\s*%rd\d+\s*\})")
"""Loads of data and stores of results that were read just before; a single 64-bit load is one of an address."""


def ptx_protocol(ptx: str) -> tuple[Step, ...]:
    """The steps of a collective that was compiled: runs of equal swaps are one step, and what lies between the first
    and the last of them is what the kernel reads of peers.

    A kernel that only reads peers' memory, whose own data was written before it began, has no write here. Refuses
    swaps of another scope than the table's, and atomics that are no swaps.
    """
    steps: list[Step] = []
    for line in _instructions(ptx):
        if found := _ATOMIC.search(line):
            if found.group("scope") != SCOPE:
                raise UnreadProtocol(f"{line}: the scope is not {SCOPE}.")
            order = found.group("order")
            if order not in ("relaxed", "acquire", "release"):
                raise UnreadProtocol(f"{line}: the order {order} is none of the table's.")
            steps.append(Step(_side(line), order))  # type: ignore[arg-type]
        elif _OTHER_ATOMIC.search(line):
            raise UnreadProtocol(f"{line}: an atomic that is no swap.")
        elif _DATA.search(line):
            steps.append(Step("read"))
    return tuple(_without_repeats(steps))


def _side(line: str) -> Act:
    """0 becomes 1 in a signal, 1 becomes 0 in a wait; the operands are the last two."""
    expected, value = (operand.strip(" ;") for operand in line.split(",")[-2:])
    sides: dict[tuple[str, str], Act] = {("0", "1"): "signal", ("1", "0"): "wait"}
    if (expected, value) not in sides:
        raise UnreadProtocol(f"{line}: swaps {expected} for {value}.")
    return sides[expected, value]


def _instructions(ptx: str) -> Iterator[str]:
    """One instruction a line, with registers that hold one constant replaced by it."""
    constants = dict(re.findall(r"mov\.(?:b|u|s)32\s+(%r\d+),\s*(-?\d+);", ptx))
    for line in ptx.splitlines():
        text = line.partition("//")[0].strip()
        if text:
            yield re.sub(r"%r\d+", lambda name: constants.get(name.group(), name.group()), text)


def _without_repeats(steps: list[Step]) -> Iterator[Step]:
    for index, step in enumerate(steps):
        if not index or steps[index - 1] != step:
            yield step
