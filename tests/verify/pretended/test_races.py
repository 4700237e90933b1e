"""Races between streams in logs written by hand: a line a piece of work, with what must be found."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof.verify.pretended.log import Entry, Place, read_log
from shardproof.verify.pretended.races import races

NEW = Entry("allocate", 1, 0, "7")


def op(stream: int, *, reads: tuple[Place, ...] = (), writes: tuple[Place, ...] = (), thread: int = 1) -> Entry:
    return Entry("op", thread, stream, f"op of {stream}", reads, writes)


def replay(stream: int, memory: int = 7) -> Entry:
    """Of a graph with memory of its own, of the pool that 20 stands for."""
    return Entry("op", 1, stream, "graph replay", (), (20, memory))


POOL = (Entry("allocate", 1, 0, "20"), Entry("allocate", 1, 3, "7"), Entry("in graph", 1, 3, "7"))
MADE = (NEW, op(0, writes=(7,)))
RECORDED, WAITED = Entry("record", 1, 0, "1"), Entry("wait", 1, 5, "1")
USED = op(5, reads=(7,))
AWAY = (Entry("allocate host", 1, 0, "9"), op(0, writes=(9,)))

CASES = {
    "an event orders two streams": ([*MADE, RECORDED, WAITED, USED], []),
    "one stream orders itself": ([*MADE, op(0, reads=(7,)), op(0, writes=(7,)), Entry("free", 1, 0, "7")], []),
    "nothing orders them": ([*MADE, USED], ["read-before-written"]),
    "an event before the work": ([NEW, RECORDED, op(0, writes=(7,)), WAITED, USED], ["read-before-written"]),
    "another stream waits": ([*MADE, RECORDED, Entry("wait", 1, 6, "1"), USED], ["read-before-written"]),
    "the next write comes too early": ([*MADE, RECORDED, WAITED, USED, op(0, writes=(7,))], ["written-while-read"]),
    "two writes": ([*MADE, op(5, writes=(7,))], ["written-twice"]),
    "the host waits and goes on": ([*MADE, Entry("host waits for stream", 1, 0, ""), USED], []),
    "another thread waited": (
        [*MADE, Entry("host waits for stream", 2, 0, ""), USED],
        ["read-before-written"],
    ),
    "let go of while another stream uses it": (
        [*MADE, RECORDED, WAITED, USED, Entry("free", 1, 0, "7")],
        ["freed-in-use"],
    ),
    "let go of, but recorded": (
        [*MADE, RECORDED, WAITED, Entry("record_stream", 1, 5, "7"), USED, Entry("free", 1, 0, "7")],
        [],
    ),
    "recorded for a stream that has waited for the one that uses it": (
        [
            *MADE,
            RECORDED,
            WAITED,
            Entry("record_stream", 1, 6, "7"),
            USED,
            Entry("record", 1, 5, "2"),
            Entry("wait", 1, 6, "2"),
            Entry("free", 1, 0, "7"),
        ],
        [],
    ),
    "recorded for another stream": (
        [*MADE, RECORDED, WAITED, Entry("record_stream", 1, 6, "7"), USED, Entry("free", 1, 0, "7")],
        ["freed-in-use"],
    ),
    "its own stream has waited before it is let go of": (
        [*MADE, RECORDED, WAITED, USED, Entry("record", 1, 5, "2"), Entry("wait", 1, 0, "2"), Entry("free", 1, 0, "7")],
        [],
    ),
    "a buffer of the host is written while another stream reads it": (
        [*AWAY, RECORDED, WAITED, op(5, reads=(9,)), op(0, writes=(9,))],
        ["written-while-read"],
    ),
    "a buffer of the host is read before it is there": ([*AWAY, op(5, reads=(9,))], ["read-before-written"]),
    "other bytes of a buffer of the host": (
        [AWAY[0], op(0, writes=((9, 0, 64),)), op(5, reads=((9, 64, 128),)), op(6, writes=((9, 128, 192),))],
        [],
    ),
    "bytes of a buffer of the host that overlap": (
        [AWAY[0], op(0, writes=((9, 0, 64),)), op(5, reads=((9, 32, 128),)), op(6, writes=((9, 120, 192),))],
        ["read-before-written", "written-while-read"],
    ),
    "a part and the whole": ([AWAY[0], op(0, writes=((9, 0, 64),)), op(5, reads=(9,))], ["read-before-written"]),
    "the end of a buffer of the host waits for its copies": (
        [*AWAY, RECORDED, WAITED, op(5, reads=(9,)), Entry("free host", 1, 0, "9")],
        [],
    ),
    "memory of a graph is let go of after a replay": (
        [
            *POOL,
            replay(0),
            Entry("free", 2, 0, "7"),
            *(Entry("record", 1, 0, "1"), Entry("wait", 1, 6, "1")),
            replay(6),
        ],
        [],
    ),
    "memory of a graph is let go of while what is no replay reads it": (
        [*POOL, replay(0), RECORDED, WAITED, USED, Entry("free", 1, 0, "7")],
        ["freed-in-use"],
    ),
    "two graphs of a pool are replayed at the same time": ([*POOL, replay(0), replay(6, 8)], ["written-twice"]),
    "order passes through a third stream": (
        [*MADE, RECORDED, WAITED, op(5), Entry("record", 1, 5, "2"), Entry("wait", 1, 6, "2"), op(6, reads=(7,))],
        [],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_race_is_found_where_nothing_orders_two_uses(name: str) -> None:
    entries, rules = CASES[name]
    assert [race.rule for race in races(entries)] == rules


def test_a_race_names_both_uses() -> None:
    entries = [NEW, Entry("op", 1, 0, "aten::add", (), (7,), "0F1"), Entry("collective", 1, 8, "send", (7,), (), "")]
    (race,) = races(entries)
    assert str(race) == "read-before-written: memory 7: send on stream 8, while aten::add on stream 0 in 0F1 may go on"


def test_equal_races_are_one() -> None:
    entries = [NEW, *[op(0, writes=(7,)), op(5, reads=(7,))] * 3]
    assert [race.rule for race in races(entries)] == ["read-before-written", "written-while-read"]


def test_a_log_that_was_cut_off_has_its_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "1.log"
    path.write_text("allocate\t1\t0\t7\t\t4096\t\t\nop\t1\t0\taten::add\t3,4\t7\t0F0 mlp\t\nop\t1\t0\tat")
    assert list(read_log(path)) == [
        Entry("allocate", 1, 0, "7"),
        Entry("op", 1, 0, "aten::add", (3, 4), (7,), "0F0 mlp"),
    ]
