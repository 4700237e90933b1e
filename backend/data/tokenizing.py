"""Pieces of text to ids, in several processes: each has a pipe of its own, gets every so many-th unit, and answers in
order, so that the ids come in the order of the text however many there are."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from ...core.base.errors import FileError, ShardproofError
from .pieces import Piece, documents
from .tokenizers import Tokenizer, open_tokenizer, token_type

AHEAD = 2
"""Units that a process is given before it has answered, so that it never waits for the one that writes."""


class Settings(NamedTuple):
    """How texts become ids: the tokenizer's name, the key of JSONL lines, and whether and with what token documents
    end."""

    tokenizer: str
    key: str
    append_end: bool
    end: str | None


class Ids(NamedTuple):
    """The ids of a unit, as bytes; the tokens of every document in it that has any, int32; and bytes of text."""

    ids: bytes
    lengths: np.ndarray
    num_bytes: int


def tokenized(units: Iterable[tuple[Piece, ...]], settings: Settings, num_processes: int) -> Iterator[Ids]:
    """The ids of every unit in order. Raises `FileError` for a text that cannot be tokenized."""
    left = iter(units)
    first = list(itertools.islice(left, num_processes))  # no more processes than there are units
    if len(first) <= 1:
        tokenizer = _opened(settings)
        yield from (_ids(unit, settings, tokenizer) for unit in itertools.chain(first, left))
        return
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(contextlib.closing(_Worker(settings))) for _ in first]
        yield from _in_turn(itertools.chain(first, left), workers)


def _in_turn(units: Iterator[tuple[Piece, ...]], workers: list[_Worker]) -> Iterator[Ids]:
    """Unit `i` goes to worker `i` modulo their number, and its answer is awaited in turn."""
    turns = itertools.cycle(workers)
    for unit, worker in zip(itertools.islice(units, AHEAD * len(workers)), turns, strict=False):
        worker.send(unit)
    for worker in itertools.cycle(workers):
        if not worker.num_pending:
            return
        yield worker.receive()
        for unit in itertools.islice(units, 1):
            worker.send(unit)


class _Worker:
    """One process that makes ids of units. It ends with `close`, or when this process does."""

    def __init__(self, settings: Settings):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, settings), daemon=True)
        self._process.start()
        theirs.close()
        self.num_pending = 0

    def send(self, unit: tuple[Piece, ...]) -> None:
        self.num_pending += 1
        try:
            self._pipe.send(unit)
        except BrokenPipeError:
            raise self._gone() from None

    def receive(self) -> Ids:
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._gone() from None
        self.num_pending -= 1
        if isinstance(answer, str):
            raise FileError(answer)
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join()

    def _gone(self) -> ShardproofError:
        self._process.join(1)
        return ShardproofError(
            f"a process that makes tokens ended with code {self._process.exitcode}, perhaps for want of memory: a "
            "document is in memory as a whole, once a process. Use fewer --jobs."
        )


def _work(pipe: Connection, settings: Settings) -> None:
    """The life of a worker: units in, ids or the words of an error out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the one that writes ends us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for every core already
    tokenizer = _opened(settings)
    while True:
        try:
            unit = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(_ids(unit, settings, tokenizer))
        except (ShardproofError, OSError) as error:
            pipe.send(str(error))


def _opened(settings: Settings) -> Tokenizer:
    return open_tokenizer(settings.tokenizer, ends=settings.append_end, end=settings.end)


def _ids(unit: tuple[Piece, ...], settings: Settings, tokenizer: Tokenizer) -> Ids:
    """The ids of one unit; documents without any are left out."""
    record, encoded = tokenizer.record, list[np.ndarray]()
    for piece in unit:
        try:
            encoded += [ids for ids in tokenizer.encode(list(documents(piece, settings.key))) if len(ids)]
        except UnicodeDecodeError as error:
            raise FileError(
                f"{piece.path} is no text in UTF-8: {error.reason}. Convert it first, or use --tokenizer bytes."
            ) from None
    dtype = token_type(record.vocab_size)
    if record.end_of_document is not None:
        encoded = [np.append(ids.astype(dtype), dtype.type(record.end_of_document)) for ids in encoded]
    flat = np.concatenate([np.zeros(0, dtype), *(ids.astype(dtype) for ids in encoded)])
    lengths = np.array([len(ids) for ids in encoded], dtype=np.int32)
    return Ids(flat.tobytes(), lengths, sum(piece.hi - piece.lo for piece in unit))
