"""Wrong barriers: changes of the table, of the C code and of a kernel's source that the model checker must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ...backend.transport.symmetric.barrier import COLLECTIVE, Step
from .memory_model import Explored
from .protocols import check_chunks, check_cleared_late, check_collective
from .source_protocols import c_protocol

Where = Literal["table", "C source", "kernel source"]

WRITE, ENTRY_SIGNAL, ENTRY_WAIT, READ, EXIT_SIGNAL, EXIT_WAIT = COLLECTIVE


def relaxed(step: Step) -> Step:
    """The same without an order."""
    return replace(step, order="relaxed")


@dataclass(frozen=True)
class TableMutant:
    """A wrong protocol, made from the table."""

    name: str
    check: Callable[[], Explored]


TABLE_MUTANTS = (
    TableMutant(
        "relaxed entry",
        lambda: check_collective((WRITE, relaxed(ENTRY_SIGNAL), ENTRY_WAIT, READ, EXIT_SIGNAL, EXIT_WAIT)),
    ),
    TableMutant(
        "missing acquire",
        lambda: check_collective((WRITE, ENTRY_SIGNAL, relaxed(ENTRY_WAIT), READ, EXIT_SIGNAL, EXIT_WAIT)),
    ),
    TableMutant(
        "relaxed exit",
        lambda: check_collective((WRITE, ENTRY_SIGNAL, ENTRY_WAIT, READ, relaxed(EXIT_SIGNAL), EXIT_WAIT)),
    ),
    TableMutant("no exit", lambda: check_collective(COLLECTIVE[:4])),
    TableMutant("no entry", lambda: check_collective((WRITE, READ, EXIT_SIGNAL, EXIT_WAIT))),
    TableMutant(
        "swapped pads",
        lambda: check_collective(signalled=lambda source, other: f"pad of rank {source} for rank {other}"),
    ),
    TableMutant("pad cleared after a peer may have signalled", check_cleared_late),
)


@dataclass(frozen=True)
class SourceMutant:
    """A change of a source text: every `before`, of which there must be one, becomes `after`."""

    name: str
    before: str
    after: str

    def applied(self, source: str) -> str:
        """Raises `ValueError` where the text is not there once."""
        if source.count(self.before) != 1:
            raise ValueError(f"mutant {self.name!r}: {self.before!r} is there {source.count(self.before)} times.")
        return source.replace(self.before, self.after)


C_MUTANTS = (
    SourceMutant(
        "chunks published relaxed",
        "atomic_store_explicit(&signal->value, number, memory_order_release)",
        "atomic_store_explicit(&signal->value, number, memory_order_relaxed)",
    ),
    SourceMutant(
        "signals read relaxed",
        "return atomic_load_explicit(&signal->value, memory_order_acquire)",
        "return atomic_load_explicit(&signal->value, memory_order_relaxed)",
    ),
    SourceMutant(
        "slot filled while it is read",
        "    if (all->sent[peer] - number_of(peer_signal(all, all->rank, TAKEN, peer)) >= NUM_SLOTS) return 0;\n"
        "    char *place = slot(all, all->rank, peer, all->sent[peer]);\n"
        "    size_t count = least(part->to_send",
        "    char *place = slot(all, all->rank, peer, all->sent[peer]);\n    size_t count = least(part->to_send",
    ),
    SourceMutant(
        "chunk announced before it is there",
        "    memcpy(place, &part->to_send, sizeof part->to_send);\n",
        "    publish(peer_signal(all, all->rank, FILLED, peer), ++all->sent[peer]);\n"
        "    memcpy(place, &part->to_send, sizeof part->to_send);\n",
    ),
)

KERNEL_MUTANTS = (
    SourceMutant("entry signal relaxed", "tl.constexpr(ENTRY.signal)", 'tl.constexpr("relaxed")'),
    SourceMutant("entry wait relaxed", "tl.constexpr(ENTRY.wait)", 'tl.constexpr("relaxed")'),
    SourceMutant("exit signal relaxed", "tl.constexpr(EXIT.signal)", 'tl.constexpr("relaxed")'),
    SourceMutant("no exit", "    meet(pads, rank, WORLD, EXIT_SIGNAL, EXIT_WAIT)\n", "    first = tl.program_id(0)\n"),
)
"""Of `backend/kernels/meet.py`."""


def check_c(source: str) -> Explored:
    """Chunks for one peer and chunks for all, as the C code sends and takes them: the first that is wrong."""
    for name in ("chunk", "board"):
        found = check_chunks(c_protocol(source, f"put_{name}"), c_protocol(source, f"take_{name}"))
        if not found.ok:
            return found
    return found
