"""Wrong barriers: changes of the table, of the C code and of a kernel's source, and what must be found in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ...backend.transport.symmetric.barrier import COLLECTIVE, TWO_PHASES, Step
from .c_protocols import c_doorbell, c_protocol, looks_at_bell_first
from .doorbell import DOORBELL_MUTANTS, check_doorbell
from .memory_model import Explored, explore
from .protocols import (
    UnreadProtocol,
    check_board,
    check_chunks,
    check_cleared_late,
    check_collective,
    collective,
    pads_of,
)

Finding = Literal["wrong data", "deadlock", "pad not reset", "refused"]
"""refused: the reader has no step for what the code says, and so it is not right before somebody has looked."""

WRITE, ENTRY_SIGNAL, ENTRY_WAIT, READ, EXIT_SIGNAL, EXIT_WAIT = COLLECTIVE


def relaxed(step: Step) -> Step:
    """The same without an order."""
    return replace(step, order="relaxed")


@dataclass(frozen=True)
class TableMutant:
    """A wrong protocol, made from the table, and what exploring it finds."""

    name: str
    finds: Finding
    check: Callable[[], Explored]


def _signals_left() -> Explored:
    """One launch in which nobody takes the signals of the exit."""
    programs = collective(COLLECTIVE[:5], 2, 1)
    return explore(programs, reset=pads_of(programs))


def _with(*steps: Step) -> Callable[[], Explored]:
    return lambda: check_collective(steps)


TABLE_MUTANTS = (
    TableMutant(
        "relaxed entry", "wrong data", _with(WRITE, relaxed(ENTRY_SIGNAL), ENTRY_WAIT, READ, EXIT_SIGNAL, EXIT_WAIT)
    ),
    TableMutant(
        "missing acquire", "wrong data", _with(WRITE, ENTRY_SIGNAL, relaxed(ENTRY_WAIT), READ, EXIT_SIGNAL, EXIT_WAIT)
    ),
    TableMutant(
        "relaxed exit", "wrong data", _with(WRITE, ENTRY_SIGNAL, ENTRY_WAIT, READ, relaxed(EXIT_SIGNAL), EXIT_WAIT)
    ),
    TableMutant("no exit", "wrong data", _with(*COLLECTIVE[:4])),
    TableMutant("no entry", "wrong data", _with(WRITE, READ, EXIT_SIGNAL, EXIT_WAIT)),
    TableMutant("no entry between two phases", "wrong data", _with(*TWO_PHASES[:5], *TWO_PHASES[7:])),
    TableMutant(
        "swapped pads",
        "wrong data",
        lambda: check_collective(signalled=lambda source, other: f"pad of rank {source} for rank {other}"),
    ),
    TableMutant("pad cleared after a peer may have signalled", "deadlock", check_cleared_late),
    TableMutant("signals of the exit are not taken", "pad not reset", _signals_left),
    *(TableMutant(f"doorbell: {name}", "deadlock", check) for name, check in DOORBELL_MUTANTS.items()),
)


@dataclass(frozen=True)
class SourceMutant:
    """A change of a source text: `before`, which must be there once, becomes `after`. And what must be found."""

    name: str
    finds: Finding
    before: str
    after: str

    def applied(self, source: str) -> str:
        """Raises `ValueError` where the text is not there once."""
        return replaced_once(self.name, source, self.before, self.after)


def replaced_once(name: str, source: str, before: str, after: str) -> str:
    """`source` with `after` in the place of `before`. Raises `ValueError`, with the mutant's name, where that is not
    there once."""
    if source.count(before) != 1:
        raise ValueError(f"mutant {name!r}: {before!r} is there {source.count(before)} times.")
    return source.replace(before, after)


_WAIT = (
    "    if (all->sent[peer] - number_of(peer_signal(all, all->rank, TAKEN, peer)) >= NUM_SLOTS) return 0;\n"
    "    char *place = slot(all, all->rank, peer, all->sent[peer]);\n"
    "    size_t count = least(part->to_send"
)
_PUBLISH = "    publish(peer_signal(all, all->rank, FILLED, peer), ++all->sent[peer]);\n"
_RING = "    ring(own_signal(all, peer, DOORBELL));\n"
_FILL = "    memcpy(place, &part->to_send, sizeof part->to_send);\n"
_FILL_BOARD = "    memcpy(place, &own->to_send, sizeof own->to_send);\n"
_FILL_SUMS = "    int added = add_block(all, tree, at, (float *)(place + CHUNK_HEAD));\n"
_SHOW = "    publish(own_signal(all, all->rank, SHOWN), ++all->shown);\n"
_FILL_ROWS = "    for (int row = 0; row < rows; row++)\n        memcpy(place"
_SENT = "    part->sent += count;\n"
_ANNOUNCE = _SENT + _PUBLISH + _RING
_ADD = "atomic_fetch_add_explicit(&doorbell->value, 1, memory_order_seq_cst)"
_SLOT = "* NUM_SLOTS + chunk % NUM_SLOTS)"

C_MUTANTS = (
    SourceMutant(
        "chunks published relaxed",
        "wrong data",
        "atomic_store_explicit(&signal->value, number, memory_order_release)",
        "atomic_store_explicit(&signal->value, number, memory_order_relaxed)",
    ),
    SourceMutant(
        "signals read relaxed",
        "wrong data",
        "return atomic_load_explicit(&signal->value, memory_order_acquire)",
        "return atomic_load_explicit(&signal->value, memory_order_relaxed)",
    ),
    SourceMutant("slot filled while it is read", "wrong data", _WAIT, _WAIT.partition("\n")[2]),
    SourceMutant("one slot too many is filled", "wrong data", _WAIT, _WAIT.replace(">=", ">")),
    SourceMutant("another signal is waited for", "deadlock", _WAIT, _WAIT.replace("TAKEN", "FILLED")),
    SourceMutant("chunk announced before it is there", "wrong data", _FILL, _PUBLISH + _FILL),
    SourceMutant(
        "board shown before it is there",
        "wrong data",
        _FILL_BOARD,
        _SHOW + _FILL_BOARD,
    ),
    SourceMutant("rows announced before they are there", "wrong data", _FILL_ROWS, _PUBLISH + _FILL_ROWS),
    SourceMutant("sums shown before they are there", "wrong data", _FILL_SUMS, _SHOW + _FILL_SUMS),
    SourceMutant("nobody is rung for a chunk", "deadlock", _ANNOUNCE, _SENT + _PUBLISH),
    SourceMutant("rung for before it is announced", "deadlock", _ANNOUNCE, _SENT + _RING + _PUBLISH),
    SourceMutant("bell rung relaxed", "deadlock", _ADD, _ADD.replace("seq_cst", "relaxed")),
    SourceMutant("a wait under a condition", "refused", _WAIT, _WAIT.replace("if (all", "if (peer > 1 && all", 1)),
    SourceMutant("bytes written after the chunk", "refused", _ANNOUNCE, _SENT + _PUBLISH + "    *place = 0;\n" + _RING),
    SourceMutant("another slot", "refused", _SLOT, _SLOT.replace("chunk", "chunk / 2")),
)

_SIGNAL_SWAP = "        while tl.atomic_cas(theirs, 0, 1, sem=SIGNAL, scope=SYSTEM) != 0:\n            pass\n"
_WAIT_SWAP = "        while tl.atomic_cas(own + peer, 1, 0, sem=WAIT, scope=SYSTEM) != 1:\n            pass\n"
_WAIT_LOOP = "    for peer in tl.static_range(WORLD):\n" + _WAIT_SWAP
_EXIT = "    meet(pads, rank, WORLD, EXIT_SIGNAL, EXIT_WAIT)\n"


def _once(loop: str) -> str:
    """The swap of a loop without the loop."""
    swap = loop.partition(" !=")[0].replace("while ", "")
    return swap + "\n"


KERNEL_MUTANTS = (
    SourceMutant("entry signal relaxed", "wrong data", "tl.constexpr(ENTRY.signal)", 'tl.constexpr("relaxed")'),
    SourceMutant("entry wait relaxed", "wrong data", "tl.constexpr(ENTRY.wait)", 'tl.constexpr("relaxed")'),
    SourceMutant("exit signal relaxed", "wrong data", "tl.constexpr(EXIT.signal)", 'tl.constexpr("relaxed")'),
    SourceMutant("no exit", "wrong data", _EXIT, "    first = tl.program_id(0)\n"),
    SourceMutant("signals in the place of another", "deadlock", "+ first + rank\n", "+ first + peer\n"),
    SourceMutant("only rank 0 is waited for", "wrong data", _WAIT_LOOP, _WAIT_LOOP.replace("WORLD", "1")),
    SourceMutant("waits once", "refused", _WAIT_SWAP, _once(_WAIT_SWAP)),
    SourceMutant("signals once", "refused", _SIGNAL_SWAP, _once(_SIGNAL_SWAP)),
    SourceMutant("waits for no signal", "refused", _WAIT_SWAP, _WAIT_SWAP.replace("!=", "==")),
    SourceMutant("signals for one GPU", "refused", "tl.constexpr(SCOPE)", 'tl.constexpr("gpu")'),
)
"""Of `backend/kernels/meet.py`, under an all-gather."""

_STORES_EVERYWHERE = """    SIZE: tl.constexpr = size_of(out.dtype.element_ty)
    UNITS: tl.constexpr = BLOCK * SIZE // UNIT
    count = (n * SIZE + UNIT - 1) // UNIT
    own = own_buffer(table, rank)
    first"""
_READS_ITS_OWN = "    between_addresses()\n    for peer in"
_MEETS = "    meet_at_entry(pads, rank, WORLD)\n"
_FENCE = "fence.proxy.alias; "

MULTICAST_MUTANTS = (
    SourceMutant("stores everywhere before it meets", "wrong data", _MEETS + _STORES_EVERYWHERE, _STORES_EVERYWHERE),
    SourceMutant("reads what peers store before it meets", "wrong data", _MEETS + _READS_ITS_OWN, _READS_ITS_OWN),
    SourceMutant("no fence between two addresses", "refused", _FENCE, ""),
)
"""Of `backend/kernels/multicast.py`, of its all-gather."""

_PARTS_OF_C = (
    ("put_chunk", "take_chunk", check_chunks),
    ("put_rows", "add_block", check_chunks),
    ("put_board", "take_board", check_board),
    ("show_block", "take_sums", check_board),
)


def check_c(source: str) -> Explored:
    """Chunks for one peer, rows of sums and chunks for all, as the C code sends and takes them, and its doorbell: what
    is wrong first, or all states. Raises `UnreadProtocol`."""
    num_states = 0
    for put, take, check in _PARTS_OF_C:
        sender, receiver = c_protocol(source, put), c_protocol(source, take)
        for found in (check(sender, receiver), _check_ringing(source, sender), _check_ringing(source, receiver)):
            num_states += found.num_states
            if not found.ok:
                return found
    return Explored("ok", num_states)


def _check_ringing(source: str, steps: tuple[Step, ...]) -> Explored:
    """The doorbell as the C code rings it after these steps."""
    acts = [step.act for step in steps if step.act in ("signal", "ring")]
    return check_doorbell(
        c_doorbell(source, "ring") if "ring" in acts else (),
        c_doorbell(source, "sleep_on"),
        rings_first=acts[:1] == ["ring"],
        looks_first=not looks_at_bell_first(source),
    )


def found_in_c(source: str) -> str:
    """The kind of what `check_c` finds, or refused."""
    try:
        return check_c(source).kind
    except UnreadProtocol:
        return "refused"
