"""The steps of a protocol as they stand in the C source of shared memory.

The reader knows every statement that may stand in a function which sends or takes chunks, and refuses any other: a
protocol is never right because a step of it was overlooked. Who writes such a function in another way adds the
statement here, with the step that it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from ...backend.transport.symmetric.barrier import BellStep, Order, Step
from .protocols import UnreadProtocol

_PEERS = r"for \(int peer = 0; peer < all->size; peer\+\+\) "
_OTHERS = rf"{_PEERS}if \(peer != all->rank\) "
_SOURCE = r"(?:[\w>\-&+*/()\[\] ]|>=)+"
_PEER_SIGNAL = r"peer_signal\(all, {}, (?P<of>\w+), {}\)"
_MINE, _THEIRS = _PEER_SIGNAL.format("all->rank", "peer"), _PEER_SIGNAL.format("peer", "all->rank")
_FIRST = r"(?:(?:part->received == part->to_receive|\*at == width) \|\| )?"
_HAS_ROWS = r"peer != all->rank && tree->rows\[peer\] && "

Made = Callable[["re.Match[str]", "_Source"], Step]


def _awaited_slot(found: re.Match[str], source: _Source) -> Step:
    return Step("wait", source.looked, found["of"], source.num_slots + (found["beyond"] == ">"))


def _awaited_chunk(found: re.Match[str], source: _Source) -> Step:
    return Step("wait", source.looked, found["of"])


def _published(found: re.Match[str], source: _Source) -> Step:
    return Step("signal", source.published, found["of"])


_STEPS: tuple[tuple[str, Made], ...] = (
    (rf"if \(all->sent\[peer\] - number_of\({_MINE}\) (?P<beyond>>=?) NUM_SLOTS\) return 0", _awaited_slot),
    (
        rf"{_PEERS}if \(peer != all->rank && all->shown - number_of\({_MINE}\) (?P<beyond>>=?) NUM_SLOTS\) return 0",
        _awaited_slot,
    ),
    (rf"if \({_FIRST}number_of\({_THEIRS}\) == all->got\[peer\]\) return 0", _awaited_chunk),
    (rf"{_PEERS}if \({_HAS_ROWS}number_of\({_THEIRS}\) == all->got\[peer\]\) return 0", _awaited_chunk),
    (
        rf"if \({_FIRST}number_of\(own_signal\(all, peer, (?P<of>\w+)\)\) == all->seen\[peer\]\) return 0",
        _awaited_chunk,
    ),
    (
        rf"(?:for \(int row = 0; row < rows; row\+\+\) )?memcpy\(place(?: \+ CHUNK_HEAD{_SOURCE})?"
        rf"(?: \+ CHUNK_HEAD)?, {_SOURCE}, {_SOURCE}\)",
        lambda found, source: Step("write"),
    ),
    (r"memcpy\(&whole, place, sizeof whole\)", lambda found, source: Step("read")),
    (
        rf"copy_result\((?:part->target \+ part->received|\(char \*\)\(tree->target \+ {_SOURCE}\)), "
        rf"place \+ CHUNK_HEAD, {_SOURCE}, {_SOURCE}\)",
        lambda found, source: Step("read"),
    ),
    (
        r"int added = add_block\(all, tree, at, \(float \*\)\(place \+ CHUNK_HEAD\)\)",
        lambda found, source: Step("write"),
    ),
    (rf"add_stripe\(stripes, num_rows, {_SOURCE}(?:, [^;]*)*\)", lambda found, source: Step("read")),
    (rf"publish\({_MINE}, \+\+all->sent\[peer\]\)", _published),
    (rf"publish\({_THEIRS}, \+\+all->(?:got|seen)\[peer\]\)", _published),
    (r"publish\(own_signal\(all, all->rank, (?P<of>\w+)\), \+\+all->shown\)", _published),
    (rf"(?:{_OTHERS})?ring\(own_signal\(all, peer, DOORBELL\)\)", lambda found, source: Step("ring")),
)

_NO_STEP = (
    # what is left to do, and where
    r"if \((?:part|own)->sent == (?:part|own)->to_send\) return 0",
    r"if \(\*at >= width \|\| !rows\) return 0",
    r"char \*place = (?:slot\(all, all->rank, peer, all->sent\[peer\]\)|board\(all, all->rank, all->shown\))",
    r"const char \*place = (?:slot\(all, peer, all->rank, all->got\[peer\]\)|board\(all, peer, all->seen\[peer\]\))",
    r"size_t (?:whole|count|width)(?: = [^;]*?)?(?:, (?:whole|count) = [^;]*)?",
    r"int (?:rows|num_rows) = [^;]*",
    r"const float \*rows\[MOST_MEMBERS \* MOST_HELD\], \*stripes\[MOST_MEMBERS \* MOST_HELD\]",
    # rows that are not all there, or of another number of bytes
    r"if \(added <= 0\) return added",
    # a peer that sends another number of bytes: the call ends
    r"if \(whole != [^;]*\) return -1(?: - peer)?",
    # of the caller's memory
    r"(?:part->sent|part->received|own->sent|\*at) \+= count",
    rf"copy_result\(own->target \+ own->sent, own->source \+ own->sent, {_SOURCE}, {_SOURCE}\)",
    # of a sum: where rows lie; they are read when they are added
    r"for \(int row = 0; row < tree->rows\[peer\]; row\+\+\) rows\[num_rows\+\+\] = [^;]*",
    r"for \(size_t from = 0; from < count; from \+= STRIPE\)",
    r"for \(int row = 0; row < num_rows; row\+\+\) stripes\[row\] = rows\[row\] \+ from",
    # and its own result, which goes on from where peers get it
    r"float \*target = tree->target \+ tree->offset\[all->rank\] \+ at",
    r"if \(shown\) copy_result\(\(char \*\)\(target \+ from\), \(const char \*\)\(shown \+ from\), [^;]*\)",
    _PEERS.strip(),
    r"if \(peer != all->rank && tree->rows\[peer\]\)",
    r"if \(peer == all->rank \|\| !tree->rows\[peer\]\) continue",
)
_SHARED = re.compile(r"number_of|publish|atomic|fence|\+\+all|all->(?:sent|got|shown|seen)\b|\bplace\b")
"""What a statement that is no step does not say, but for those that name a place."""


class _Source:
    """The C source, with what it says of every function: slots, and the orders of `number_of` and `publish`."""

    def __init__(self, text: str):
        self.text = text
        self.num_slots = int(self._only(r"^#define NUM_SLOTS (\d+)$"))
        self.looked = self._order(
            r"^static uint32_t number_of\(Signal \*signal\) \{ return atomic_load_explicit\(&signal->value, "
            r"memory_order_(\w+)\); \}$"
        )
        self.published = self._order(
            r"^static void publish\(Signal \*signal, uint32_t number\) \{ atomic_store_explicit\(&signal->value, "
            r"number, memory_order_(\w+)\); \}$"
        )
        for place in (
            r"    return all->base\[owner\] \+ head \+ \(\(size_t\)peer \* NUM_SLOTS \+ chunk % NUM_SLOTS\) \* each;",
            r"    return slot\(all, owner, all->size, 0\) \+ \(size_t\)\(chunk % NUM_SLOTS\) \* \(all->board_bytes \+ "
            r"CHUNK_HEAD\);",
        ):
            self._only(f"^({place})$")

    def _only(self, pattern: str) -> str:
        found = re.findall(pattern, self.text, re.MULTILINE)
        if len(found) != 1:
            raise UnreadProtocol(f"the source has {len(found)} lines of the form {pattern}, not one.")
        return str(found[0])

    def _order(self, pattern: str) -> Order:
        order = self._only(pattern)
        if order not in ("relaxed", "acquire", "release"):
            raise UnreadProtocol(f"the order {order} is none of the table's.")
        return order  # type: ignore[return-value]


def c_protocol(source: str, function: str) -> tuple[Step, ...]:
    """The steps of a function of `shared_memory.c`, in order. A look in vain is a wait, since the function returns and
    is called again. Raises `UnreadProtocol`."""
    read = _Source(source)
    steps: list[Step] = []
    statements = list(_statements(_body(source, function)))
    if not statements or statements.pop() != "return 1":
        raise UnreadProtocol(f"{function} does not end with return 1.")
    for statement in statements:
        step = _step(statement, read)
        if step is None and statement.endswith("return 0") and steps:
            raise UnreadProtocol(f"{function}: {statement}: it returns when it has done a part of its steps.")
        if step is not None and (not steps or steps[-1] != step):
            steps.append(step)
    return tuple(steps)


def _step(statement: str, source: _Source) -> Step | None:
    """The step that a statement is; None for one that nobody else notices."""
    for pattern, made in _STEPS:
        if found := re.fullmatch(pattern, statement):
            return made(found, source)
    for pattern in _NO_STEP:
        is_place = pattern.startswith((r"char \*place", r"const char \*place")) or "rows\\[num_rows" in pattern
        if re.fullmatch(pattern, statement) and (is_place or not _SHARED.search(statement)):
            return None
    raise UnreadProtocol(f"{statement}: no statement that the reader knows.")


def _body(source: str, function: str) -> str:
    found = re.findall(rf"^static \w+ {function}\([^)]*\) \{{\n(.*?)^\}}", source, re.MULTILINE | re.DOTALL)
    if len(found) != 1:
        raise UnreadProtocol(f"there is no function {function}.")
    return re.sub(r"/\*.*?\*/", "", str(found[0]), flags=re.DOTALL)


def _statements(body: str) -> Iterator[str]:
    """Up to each semicolon or brace that stands in no parentheses, blanks made one."""
    if "#" in body or "//" in body or '"' in body:
        raise UnreadProtocol("a function that sends or takes chunks has no directive and no text.")
    depth, begin = 0, 0
    for at, character in enumerate(body):
        depth += (character == "(") - (character == ")")
        if depth == 0 and character in ";{}":
            if statement := " ".join(body[begin:at].split()):
                yield statement
            begin = at + 1
    if body[begin:].strip():
        raise UnreadProtocol(f"{body[begin:].strip()}: no end.")


WAITING = ("exchange_parts", "tree_parts", "wait_for")
"""The functions that sleep."""


def looks_at_bell_first(source: str) -> bool:
    """Whether all of `WAITING` look at the bell before they look for signals, and sleep on what they saw of it. Raises
    `UnreadProtocol` where one does not sleep once."""
    found = []
    for function in WAITING:
        body = _body(source, function)
        if body.count("sleep_on(") != 1 or "if (sleep_on(doorbell, rung)) continue;" not in body:
            raise UnreadProtocol(f"{function} does not sleep once on what it saw of its doorbell.")
        loop = re.search(r"^    for \(int idle = 0;;\) \{\n        (?P<first>.*)$", body, re.MULTILINE)
        found.append(loop is not None and loop["first"] == "uint32_t rung = number_of(doorbell);")
    return all(found)


_ORDER = r"memory_order_(?P<order>\w+)"
_BELL_STEPS: tuple[tuple[str, tuple[tuple[Any, Any], ...]], ...] = (
    (rf"atomic_fetch_add_explicit\(&doorbell->value, 1, {_ORDER}\)", (("add", "value"),)),
    (
        rf"if \(atomic_load_explicit\(&signal->sleepers, {_ORDER}\)\) "
        r"syscall\(SYS_futex, &signal->value, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0\)",
        (("look", "sleepers"), ("wake", "value")),
    ),
    (rf"atomic_fetch_add_explicit\(&signal->sleepers, 1, {_ORDER}\)", (("add", "sleepers"),)),
    (rf"atomic_fetch_sub_explicit\(&signal->sleepers, 1, {_ORDER}\)", (("subtract", "sleepers"),)),
    (
        r"(?:if \(number_of\(signal\) == seen\) )?woken = "
        r"syscall\(SYS_futex, &signal->value, FUTEX_WAIT, seen, &slice, NULL, 0\)",
        (("sleep", "value"),),
    ),
)
_NO_BELL_STEP = (
    r"struct timespec slice =",
    r"0, SLICE_NS",
    r"long woken = 0",
    r"return !\(woken == -1 && errno == ETIMEDOUT\)",
)


def c_doorbell(source: str, function: str) -> tuple[BellStep, ...]:
    """The steps of `ring` or of `sleep_on`. Raises `UnreadProtocol`."""
    steps: list[BellStep] = []
    for statement in _statements(_body(source, function)):
        if statement == "wake(doorbell)":
            steps += c_doorbell(source, "wake")
        else:
            steps += _bell_steps(statement)
    return tuple(steps)


def _bell_steps(statement: str) -> list[BellStep]:
    for pattern, acts in _BELL_STEPS:
        if found := re.fullmatch(pattern, statement):
            order: Any = found.groupdict().get("order", "seq_cst")
            return [BellStep(act, of, "seq_cst" if act in ("wake", "sleep") else order) for act, of in acts]
    if any(re.fullmatch(pattern, statement) for pattern in _NO_BELL_STEP):
        return []
    raise UnreadProtocol(f"{statement}: no statement that the reader knows.")
