"""A corpus of 1 GB on disk, streamed: how long training waits for data, and how fast the reader alone is.

    python benchmarks/data_streaming.py [FOLDER] [GIGABYTES] [STEPS]

Writes a token file of random documents to FOLDER (a temporary one), removes it from the page cache, and trains a small
model on it with two ranks, a core each: seconds that a rank spends in `Batches.training` (order, reading, checking
ids, copying) over the seconds of its steps, of the rank that waits longest; and the same in processor seconds, to which
other programs add nothing. Then one whole pass over the corpus in the
order of training, after the cache was emptied again, without a model. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardproof.backend.data.corpus import Corpus
from shardproof.backend.data.token_writer import writing
from shardproof.backend.data.tokenizer_record import TokenizerRecord
from shardproof.backend.launching.launch import Workers
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Numerics, Precision
from shardproof.core.plan.train import Train

MODEL = ModelSpec("streamed", 4, 256, 1024, 8, 8, 32, 32_000, 512)
"""19 M parameters, most of them in two tables of 32,000 rows."""
SEQUENCE, SAMPLES, BLOCK = 512, 8, 2**22
WARM_STEPS = 2


def main(parent: str | None = None, gigabytes: str = "1", steps: str = "20") -> None:
    """Prints what was measured."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        prefix = str(Path(folder, "corpus"))
        num_tokens = write_corpus(prefix, int(float(gigabytes) * 1e9) // 2)
        forget(prefix)
        plan = plan_of(prefix)
        with Workers(2, "shm", timeout_s=600) as workers:
            ranks = workers.run(measure_rank, (plan, int(steps)))
        forget(prefix)
        start_s, cpu_start_s = time.perf_counter(), time.process_time()
        read = whole_pass(plan)
        elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_start_s
    wait_s, step_s = max(
        ((wait.wall_s, steps_of.wall_s) for wait, steps_of in ranks), key=lambda pair: pair[0] / pair[1]
    )
    cpu_share = max(wait.cpu_s / steps_of.cpu_s for wait, steps_of in ranks)
    print(
        json.dumps(
            {
                "benchmark": "data_streaming",
                "tokens": num_tokens,
                "step_s": step_s / int(steps),
                "step_cpu_s": max(steps_of.cpu_s for _, steps_of in ranks) / int(steps),
                "waiting_ms_a_step": wait_s / int(steps) * 1e3,
                "waiting_share": wait_s / step_s,
                "waiting_share_of_cpu": cpu_share,
                "trained_tokens_per_s": SAMPLES * SEQUENCE * int(steps) / step_s,
                "read_tokens": read,
                "reader_tokens_per_s": read / elapsed_s,
                "reader_cpu_tokens_per_s": read / cpu_s,
                "load": os.getloadavg()[0],
            }
        )
    )


def write_corpus(prefix: str, num_tokens: int) -> int:
    """A token file of documents of 100 to 2,000 random tokens."""
    generator = np.random.default_rng(7)
    record = TokenizerRecord("0" * 64, MODEL.vocab_size)
    with writing(prefix, np.dtype("<u2"), record, None) as writer:
        while writer.num_tokens < num_tokens:
            ids = generator.integers(0, MODEL.vocab_size, BLOCK, dtype=np.uint16)
            ends = np.cumsum(generator.integers(100, 2000, BLOCK // 1000))
            lengths = np.diff(np.concatenate([[0], ends[ends < BLOCK], [BLOCK]]))
            writer.add(ids.tobytes(), lengths.astype(np.int32))
        return writer.num_tokens


def forget(prefix: str) -> None:
    """Removes the corpus from the page cache."""
    with open(f"{prefix}.bin", "rb") as file:  # noqa: PTH123
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plan_of(prefix: str) -> Plan:
    """Two replicas, one core each."""
    return Plan(
        model=MODEL,
        cluster=cluster_preset("this-host", 2),
        layout=Layout(dp=2),
        batch=Batch(global_size=SAMPLES, micro_size=SAMPLES // 2, sequence=SEQUENCE),
        precision=Precision("fp32"),
        numerics=Numerics("fast"),
        train=Train(data=prefix),
    )


@dataclass
class Seconds:
    """Of the clock and of this process."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Adds what the context takes."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        yield
        self.wall_s += time.perf_counter() - wall_s
        self.cpu_s += time.process_time() - cpu_s


def measure_rank(transport: Any, job: tuple[Plan, int]) -> tuple[Seconds, Seconds]:
    """The job of a rank: what it waited for data, and what its steps took."""
    from shardproof.backend.ranks.training_rank import TrainingRank

    plan, steps = job
    rank = TrainingRank(transport, plan)
    read, waits, whole = rank.batches.training, Seconds(), Seconds()

    def timed(*args: Any) -> Any:
        with waits.running():
            return read(*args)

    for step in range(WARM_STEPS):
        rank.step(step)
    rank.batches.training = timed  # type: ignore[method-assign]
    with whole.running():
        for step in range(WARM_STEPS, WARM_STEPS + steps):
            rank.step(step)
    return waits, whole


def whole_pass(plan: Plan) -> int:
    """Reads every window of the corpus once, in the order of training; how many tokens that were."""
    corpus, train = Corpus.of(plan), plan.train
    num_windows = corpus.train.num_tokens // SEQUENCE - 1
    for first in range(0, num_windows, 64):
        corpus.batch(first, min(first + 64, num_windows), SEQUENCE, train.seed)
    return num_windows * SEQUENCE


if __name__ == "__main__":
    main(*sys.argv[1:])
