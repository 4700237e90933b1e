"""Ranks over shared memory of which one is killed in the middle of collectives: `python -m ... KILLS SIZE SEED`
prints a line of JSON for each kill, with what the others raised, and how many seconds after it."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from shardproof.backend.transport.base import Group, TransportError
from shardproof.backend.transport.symmetric.shared_memory import SharedMemoryTransport


def work(group: Group, seed: int) -> None:
    """Collectives of all kinds and sizes, the same on every rank, until one fails."""
    chosen = random.Random(seed)
    while True:
        count = chosen.choice((1, 1000, 300_000))
        match chosen.randrange(4):
            case 0:
                group.all_gather(torch.ones(count))
            case 1:
                group.all_to_all([torch.ones(count)] * group.size, [(count,)] * group.size)
            case 2:
                group.all_reduce(torch.ones(2 * count), "sum")
            case _:
                group.barrier()


def rank(number: int, size: int, store: Path, seed: int, started: Connection, ended: Connection) -> None:
    """One process: works until a peer is gone, and says what it heard, and when."""
    transport = SharedMemoryTransport(dist.FileStore(str(store), size), number, size, timeout_s=60)
    group = transport.group("world", "dp", range(size))
    assert not transport.reasons, transport.reasons
    started.send(number)
    try:
        work(group, seed)
    except TransportError as error:
        ended.send((number, time.monotonic(), str(error)))
    transport.close()


def kill_one(size: int, seed: int, folder: Path) -> dict[str, object]:
    """Starts ranks, kills one after a while, and waits for the words of the others."""
    chosen = random.Random(seed)
    pipes = [(Pipe(duplex=False), Pipe(duplex=False)) for _ in range(size)]
    children = []
    for number, ((_, started), (_, ended)) in enumerate(pipes):
        child = os.fork()
        if not child:
            torch.set_num_threads(1)
            rank(number, size, folder / f"store-{seed}", seed, started, ended)
            os._exit(0)
        children.append(child)
    for (started, _), _ in pipes:
        started.recv()
    time.sleep(chosen.uniform(0.0, 0.05))
    victim = chosen.randrange(size)
    killed = time.monotonic()
    os.kill(children[victim], signal.SIGKILL)
    heard = [ended.recv() for number, (_, (ended, _)) in enumerate(pipes) if number != victim and ended.poll(30)]
    for child in children:
        os.waitpid(child, 0)
    return {
        "victim": victim,
        "heard": [number for number, _, _ in heard],
        "words": [words for _, _, words in heard],
        "seconds": max((when - killed for _, when, _ in heard), default=None),
    }


if __name__ == "__main__":
    kills, size, first_seed = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as made:
        for one in range(first_seed, first_seed + kills):
            print(json.dumps(kill_one(size, one, Path(made))), flush=True)
