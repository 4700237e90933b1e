"""What digests of checkpoints cost: a state of 1 GB saved and loaded by `torch.distributed.checkpoint`
itself and by us, in turns.

    python benchmarks/checkpoints.py [FOLDER] [GIGABYTES]

DCP alone is `dcp.save` and `dcp.load` of one process; ours writes the same files and digests every block and every
file, and reads each file once before it fills tensors. Processor seconds, since disks are slower than either: the
medians of three rounds, and their ratios.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from shardproof.backend.checkpoint.tensors import Piece, read_tensors, write_tensors
from shardproof.backend.checkpoint.whole import contents_of, damages
from shardproof.backend.transport.memory import MemoryWorld

ROUNDS, TENSORS = 3, 50


def main(parent: str | None = None, gigabytes: str = "1") -> None:
    """Prints a line per operation."""
    transport = MemoryWorld(1).transport(0)
    world, device = transport.group("world", "world", range(1)), transport.device
    rows = int(float(gigabytes) * 1e9 / TENSORS / 4 / 1000)
    state = {f"t{number}": torch.rand(rows, 1000) for number in range(TENSORS)}
    pieces = [
        Piece(name, tuple(values.shape), (slice(0, rows), slice(0, 1000)), values) for name, values in state.items()
    ]
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        start_s = time.process_time()
        work()
        seconds.setdefault(name, []).append(time.process_time() - start_s)

    with tempfile.TemporaryDirectory(dir=parent) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(ROUNDS):
            theirs, ours = Path(folder, f"dcp-{number}"), Path(folder, f"ours-{number}")
            timed("save, DCP alone", lambda theirs=theirs: dcp.save(state, checkpoint_id=theirs, no_dist=True))
            timed("save, with digests", lambda ours=ours: write_tensors(ours, pieces, world, device))
            timed("load, DCP alone", lambda theirs=theirs: dcp.load(state, checkpoint_id=theirs, no_dist=True))
            timed("load, with digests", lambda ours=ours: read_tensors(ours, pieces, world, device))
            timed("check alone", lambda ours=ours: damages(ours, contents_of(ours), 0, 1))
            shutil.rmtree(theirs)
            shutil.rmtree(ours)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    for name, median_s in medians.items():
        print(f"{name:20} {median_s:6.2f} s of processor time")
    for kind in ("save", "load"):
        print(
            f"{kind}: {medians[f'{kind}, with digests'] / medians[f'{kind}, DCP alone']:.2f} times as long with digests"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
