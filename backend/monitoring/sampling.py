"""`sampled`: text from the model, by the forwards of the pipeline that trains it.

The model goes on with the first held-out tokens. Every sample of a batch has the same tokens, the ranks with the head
read the logits of the place that is next, and all agree on the token: the largest logit, or with a temperature the
largest of logits plus noise (Gumbel 1954: that draws from their softmax). The noise of a token is a function of seed,
step, place and id. So exact numerics give the same text in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ...core.plan.plan import AnyPlan
from ...core.plan.train import Train
from ..model.transformer import Head
from ..ranks.training_rank import TrainingRank
from ..transport.base import Group
from ..transport.gather_values import gather_values

MOST_PROMPT = 32
"""Tokens of the held-out text that the model goes on with; of a short sequence half of it."""

Decode = Callable[[Sequence[int]], str]
"""Token ids as text; a tokenizer's, or that of bytes."""


@dataclass(frozen=True)
class Sample:
    """What the model was given, and how it went on."""

    prompt: str
    text: str


def bytes_as_text(ids: Sequence[int]) -> str:
    """Bytes as UTF-8; ids that are none, and bytes that are no characters, are marked by U+FFFD."""
    return b"".join(bytes([each]) if each < 256 else b"\xff" for each in ids).decode("utf-8", "replace")


def sampled(
    rank: TrainingRank, plan: AnyPlan, world: Group, done: int, *, decode: Decode | None = None
) -> Sample | None:
    """Text from the model after `done` steps, the same on every rank; None where none is due. All ranks call this
    together. `decode` makes text of ids; by default they are bytes."""
    decode = decode or bytes_as_text
    every = plan.train.sample_every
    if every is None or (done % every and done != plan.train.steps):
        return None
    device, sequence = rank.transport.device, plan.batch.sequence
    num_given = max(1, min(MOST_PROMPT, sequence // 2))
    given = gather_values(world, rank.batches.prompt(num_given), device)[0]
    tokens = list(given)
    while len(tokens) < min(sequence, num_given + plan.train.sample_tokens):
        read = _Reading(plan.train, done, place=len(tokens) - 1)
        with _read_by(rank.head, read):
            rank.forwards(rank.batches.repeated(tokens + [0] * (sequence - len(tokens))))
        found = [each for each in gather_values(world, read.best, device) if each is not None]
        tokens.append(max(found, key=lambda each: (each[0], -each[1]))[1])
    return Sample(decode(given), decode(tokens[num_given:]))


class _Reading:
    """The best token of a rank's vocabulary behind one place of the first sample: `best` is its score and its id, or
    None on ranks that do not have them."""

    def __init__(self, train: Train, done: int, *, place: int):
        self.best: list[float] | None = None
        self._train, self._done, self._place = train, done, place

    def of(self, head: Head) -> Callable[[Tensor], None]:
        """Who reads the logits of a head."""

        def read(logits_BSV: Tensor) -> None:
            here = (head.context.places() == self._place).nonzero().flatten().tolist()
            if head.context.running_microbatch.first_sample == 0 and here:
                self._choose(logits_BSV[0, here[0]].double().cpu().numpy(), head)

        return read

    def _choose(self, logits: np.ndarray, head: Head) -> None:
        leaves = head.loss.leaves
        lo, hi = leaves.items
        num_ids = leaves.leaves.num_items - head.loss.held_out.padding_rows
        if (count := min(hi, num_ids) - lo) < 1:
            return
        scores = logits[:count] + self._train.sample_temperature * self._noise(num_ids)[lo : lo + count]
        self.best = [float(scores.max()), lo + int(scores.argmax())]

    def _noise(self, num_ids: int) -> np.ndarray:
        """Gumbel noise of every id, from raw Philox words, which are the same in every version of numpy."""
        key = np.array([self._train.seed % 2**64, self._done], dtype=np.uint64)
        words = np.random.Philox(key=key, counter=[0, self._place, 0, 0]).random_raw(num_ids)
        return -np.log(-np.log((words.astype(np.float64) + 0.5) / 2.0**64))


@contextmanager
def _read_by(head: Head | None, reading: _Reading) -> Iterator[None]:
    """Inside, logits are shown to `reading`, on ranks that have a head."""
    if head is None:
        yield
        return
    head.reader = reading.of(head)
    try:
        yield
    finally:
        head.reader = None
