"""What ranks send each other is data: nothing that a peer sends is executed, and what is no data
ends the run in words."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import pytest
import torch

from shardproof.backend.transport import gather_values as module
from shardproof.backend.transport.base import TransportError
from shardproof.backend.transport.gather_values import gather_values, run_on_all
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.base.errors import RankFailure


class Makes:
    """Pickled, it is a call that makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def world_of(transport):
    return transport.group("world", "world", range(transport.world_size))


def test_values_of_all_ranks_arrive_everywhere_as_json_has_them():
    def on_rank(transport, _):
        return gather_values(world_of(transport), {"own": [transport.global_rank, 0.1, None, "ä"]}, transport.device)

    assert (
        run_threads(MemoryWorld(2, timeout_s=60), on_rank, None)
        == [[{"own": [rank, 0.1, None, "ä"]} for rank in range(2)]] * 2
    )


@pytest.mark.parametrize("kind", ["pickle", "nested", "digits", "bytes", "huge"])
def test_a_peer_that_sends_something_else_is_refused_and_not_executed(kind, tmp_path):
    made = tmp_path / "made"
    sent = {
        "pickle": pickle.dumps(Makes(made)),
        "nested": b"[" * 100_000,
        "digits": b"9" * 5000,
        "bytes": b"\xff\xfe",
        "huge": b"1",
    }
    content = sent[kind]

    def on_rank(transport, _):
        group = world_of(transport)
        if group.rank == 0:
            with pytest.raises(TransportError, match=r"a rank has sent what is no value|each may be at most"):
                gather_values(group, 1, transport.device)
            return
        group.all_gather(torch.tensor([1 << 40 if kind == "huge" else len(content)]))
        if kind != "huge":
            group.all_gather(torch.frombuffer(bytearray(content), dtype=torch.uint8), [(1,), (len(content),)])

    run_threads(MemoryWorld(2, timeout_s=60), on_rank, None)
    assert not made.exists()


def test_ranks_wait_for_one_that_works_and_raise_what_it_raises(monkeypatch):
    monkeypatch.setattr(module, "ROUND_S", 0.01)

    def on_rank(transport, fails):
        group = world_of(transport)

        def work():
            if transport.global_rank == 1:
                while group.num_calls < 3:  # the ranks have signalled to each other so often while this works
                    time.sleep(0.001)
                if fails:
                    raise OSError(28, "No space left on device")
            return transport.global_rank

        return run_on_all(group, transport.device, work), group.num_calls

    (first, calls), (second, _) = run_threads(MemoryWorld(2, timeout_s=60), on_rank, False)
    assert (first, second) == (0, 1) and calls >= 3
    with pytest.raises(RankFailure, match="rank 1 failed: OSError"):
        run_threads(MemoryWorld(2, timeout_s=60), on_rank, True)
