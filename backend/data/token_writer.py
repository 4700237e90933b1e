"""A token file written whole or not at all: a pair `PREFIX.bin` and `PREFIX.idx`, the record of its tokenizer, and a
copy of the tokenizer."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ...core.base.errors import FileError
from .megatron_index import write_index
from .tokenizer_record import TokenizerRecord, record_path, tokenizer_path


class TokenWriter:
    """Ids and lengths of documents, one after another, into files that have other names until `finish`."""

    def __init__(self, prefix: str, file: BinaryIO, dtype: np.dtype):
        self._prefix = prefix
        self._file = file
        self._dtype = dtype
        self._lengths: list[np.ndarray] = []
        self.num_documents = 0
        self.num_tokens = 0

    def add(self, ids: bytes, lengths: np.ndarray) -> None:
        """Writes the ids of some documents of `lengths` tokens, int32 [documents]."""
        with _named(self._prefix):
            self._file.write(ids)
        self._lengths.append(lengths)
        self.num_documents += len(lengths)
        self.num_tokens += int(lengths.sum(dtype=np.int64))

    def write_index(self, file: BinaryIO) -> None:
        """Writes the index of all that was added: every document is one sequence."""
        lengths = np.concatenate([*self._lengths, np.zeros(0, dtype=np.int32)])
        write_index(file, self._dtype, lengths, np.arange(len(lengths) + 1, dtype=np.int64))


@contextlib.contextmanager
def writing(prefix: str, dtype: np.dtype, record: TokenizerRecord, tokenizer: Path | None) -> Iterator[TokenWriter]:
    """What writes `PREFIX.bin` and the files that belong to it. They have their names when the context has ended
    without an error, and otherwise whatever had those names is as it was.

    While names change, `PREFIX.bin`, which is the last, is missing. Raises `FileError` for a prefix that cannot be
    written.
    """
    path = Path(f"{prefix}.bin")
    if not path.parent.is_dir():
        raise FileError(f"-o {prefix}: there is no folder {path.parent}. Make it, or name another.")
    if Path(prefix).exists():
        raise FileError(
            f"-o {prefix} is the name of another file or folder, which train.data={prefix} would mean. Name another."
        )
    with _private_folder(prefix, path) as folder:
        tokens, index, about, copy = (folder / name for name in ("bin", "idx", "record", "tokenizer"))
        with tokens.open("wb") as file:
            writer = TokenWriter(prefix, file, dtype)
            yield writer
            with _named(prefix):
                _sync(file)
        with _named(prefix):
            with index.open("wb") as file:
                writer.write_index(file)
                _sync(file)
            about.write_text(record.to_json())
            if tokenizer is not None:
                copy.write_bytes(tokenizer.read_bytes())
            path.unlink(missing_ok=True)
            about.replace(record_path(path))
            if tokenizer is not None:
                copy.replace(tokenizer_path(path))
            else:
                tokenizer_path(path).unlink(missing_ok=True)
            index.replace(path.with_suffix(".idx"))
            tokens.replace(path)


@contextlib.contextmanager
def _private_folder(prefix: str, path: Path) -> Iterator[Path]:
    """A new folder next to a file, hidden, which is removed with all that is left in it. Its name is known before it is
    made, so that no interruption leaves it."""
    folder = path.with_name(f".{path.name[:100]}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with _named(prefix):
            folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _named(prefix: str) -> Iterator[None]:
    """Turns what a disk refuses to take into a `FileError` about -o."""
    try:
        yield
    except OSError as error:
        raise FileError(
            f"-o {prefix} cannot be written: {error.strerror}. Make room or name another place; what was there is as "
            "it was."
        ) from error


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
