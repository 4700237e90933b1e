"""Boards on which ranks show where they are: nobody else's file is opened, and those of
torchrun's ranks have no name."""

import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from shardproof.backend.launching.torchrun import _shared_board
from shardproof.backend.watch.watch import Board, LaneAt

PLACE = LaneAt("compute", "step 1", "runs", "0F0", 1, 2)


def test_a_board_with_a_name_is_never_made_where_something_is_nor_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * 100_000)
    (tmp_path / "link").symlink_to(victim)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("victim", "link", "dangling"):
        with pytest.raises(OSError, match=r"File exists"):
            Board.create(tmp_path / name, 2)
    with pytest.raises(OSError, match=r"symbolic links"):
        Board.open(tmp_path / "link", 2)
    assert victim.read_bytes() == b"precious" * 100_000 and not (tmp_path / "nowhere").exists()


def test_a_board_of_another_size_or_kind_is_refused(tmp_path):
    retained = Board.create(tmp_path / "board", 2)
    assert (tmp_path / "board").stat().st_mode & 0o777 == 0o600 and retained.lanes(1) == ()
    with pytest.raises(OSError, match="no board of 3 ranks of this user"):
        Board.open(tmp_path / "board", 3)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no board of 2 ranks"):
        Board.open(tmp_path / "pipe", 2)


def test_a_board_of_another_user_is_refused(tmp_path, monkeypatch):
    Board.create(tmp_path / "board", 2)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(OSError, match="of this user"):
        Board.open(tmp_path / "board", 2)


def test_lanes_and_rows_of_all_ranks_are_seen_by_all_and_the_last_row_counts(tmp_path):
    one, other = Board.create(tmp_path / "board", 2), Board.open(tmp_path / "board", 2)
    one.write(0, 0, PLACE)
    other.write(1, 0, PLACE)
    before = one.content()
    for board, rank, row in ((one, 0, "0F0 0F1"), (other, 1, "1F0 1B0"), (one, 0, "0F0")):
        board.write_row(rank, row.split())
    assert one.lanes(1) == other.lanes(0) == (PLACE,) and one.content() == before
    assert [board.row(rank) for board in (one, other) for rank in (0, 1)] == [("0F0",), ("1F0", "1B0")] * 2


def shared_board_job(transport, _):
    """What each rank reads from a board that both share without a name, and what the temporary
    folder then holds of it."""
    store = dist.PrefixStore("boards", transport._store)
    board = _shared_board(store, 2)
    group = transport.group("boards", "dp", (0, 1))
    board.write_row(transport.global_rank, [f"{transport.global_rank}F0"])
    group.barrier()
    rows = board.row(0), board.row(1)
    group.barrier()
    return rows, [
        path.name for path in Path(os.environ["TMPDIR"]).rglob("*board*") if "workers-" not in str(path.parent)
    ]


def test_ranks_of_one_machine_share_a_board_that_has_no_name(workers):
    assert workers(2).run(shared_board_job) == [((("0F0",), ("1F0",)), [])] * 2


@pytest.mark.parametrize(
    "address", ["/etc/passwd", "1 ../../../etc/passwd", "", "-1 3", "self 0", "1 1 1", "99999999999 1"]
)
def test_an_address_that_a_stranger_has_put_into_the_store_leads_to_no_file(address):
    with pytest.raises(OSError):
        Board.at(address, 1)


def test_an_address_of_anything_but_a_board_leads_nowhere(tmp_path):
    """A file of the right size, memory of another name, a socket: as descriptors of this very process."""
    file = tmp_path / "shardproof-board (deleted)"
    file.write_bytes(bytes(2**20))
    memory = os.memfd_create("other")
    os.ftruncate(memory, 2**20)
    with file.open("r+b") as opened, socket.socket() as connection:
        for descriptor in (opened.fileno(), memory, connection.fileno()):
            with pytest.raises(OSError, match="no board"):
                Board.at(f"{os.getpid()} {descriptor}", 1)
    os.close(memory)
    board = Board.nameless(1)
    board.write(0, 0, PLACE)
    assert Board.at(board.address, 1).lanes(0) == (PLACE,)


def test_a_rank_that_may_not_open_the_first_ones_board_has_its_own():
    store = dist.HashStore()
    board = _shared_board(store, 1)
    again = _shared_board(store, 1)
    board.write(0, 0, PLACE)
    assert again.lanes(0) == (PLACE,)
    del board, again
    assert _shared_board(store, 1).lanes(0) == ()
