"""The index of a Megatron token file (`PREFIX.idx`), byte by byte as Megatron-Core's `IndexedDataset` has it.

In order, all little-endian: the 9 bytes `MMIDIDX\\0\\0`; the version, 1 (uint64); the code of the tokens' type (uint8);
the numbers of sequences and of document indices (uint64 each); tokens of every sequence (int32); the byte at which it
begins in `PREFIX.bin` (int64); for every document the sequence that begins it, and after the last the number of
sequences (int64); and in multimodal files a mode for every sequence (int8). Sequences lie in `PREFIX.bin` without gaps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ...core.base.errors import FileError
from ..base.urls import Place

MAGIC, VERSION = b"MMIDIDX\0\0", 1
_HEAD = struct.Struct("<9sQBQQ")
_BLOCK = 2**20
"""Entries that are checked at once: an index of any length takes some 20 MB to check."""

TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
"""Code -> type of tokens, as Megatron-Core numbers them. Tokens that are no whole numbers are refused."""


@dataclass(frozen=True)
class MegatronIndex:
    """What `PREFIX.idx` says. Arrays are read-only views of the file: `lengths` int32 [sequences] in tokens, `pointers`
    int64 [sequences] in bytes, `documents` int64 [documents + 1] in sequences, `modes` int8 [sequences] or None."""

    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray
    modes: np.ndarray | None = None

    @property
    def num_documents(self) -> int:
        """Documents, those that are empty too."""
        return len(self.documents) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self._token_of(len(self.lengths))

    def first_token(self, document: int) -> int:
        """The place in the file of a document's first token; of the document after the last, the number of tokens."""
        return self._token_of(int(self.documents[document]))

    def starts(self, first: int, last: int) -> np.ndarray:
        """The places of the first tokens of the documents `first <= i < last` that hold any, int64, ascending."""
        ends = np.append(self.pointers // self.dtype.itemsize, self.num_tokens)[self.documents[first : last + 1]]
        return ends[:-1][ends[:-1] < ends[1:]]

    def _token_of(self, sequence: int) -> int:
        if sequence < len(self.lengths):
            return int(self.pointers[sequence]) // self.dtype.itemsize
        return self._token_of(sequence - 1) + int(self.lengths[-1]) if sequence else 0


def read_index(file: Path, named: Place | None = None) -> MegatronIndex:
    """The index in a file, memory-mapped and checked: sizes, sequences without gaps, documents in order. `named` is
    what messages call it, where the file is a copy.

    Raises `FileError` where it is no such file or is damaged, `OSError` where it cannot be opened.
    """
    path, size = named or file, file.stat().st_size
    if size < _HEAD.size:
        raise _damaged(path, f"it has {size} bytes and its head alone {_HEAD.size}")
    content = np.memmap(file, dtype=np.uint8, mode="r")
    magic, version, code, num_sequences, num_indices = _HEAD.unpack(bytes(content[: _HEAD.size]))
    if magic != MAGIC or version != VERSION:
        raise FileError(
            f"{path} is no index of a Megatron token file: it begins with {magic[:7]!r}, version {version}, and not "
            f"with {MAGIC[:7]!r}, version {VERSION}. Give PREFIX.bin of a file that `shardproof tokenize` or "
            "Megatron-LM's preprocess_data.py wrote."
        )
    dtype = _dtype(path, code)
    whole = _HEAD.size + 12 * num_sequences + 8 * num_indices
    if size not in (whole, whole + num_sequences):
        raise _damaged(path, f"it has {size} bytes, and {num_sequences} sequences and {num_indices} indices {whole}")
    lengths, pointers, documents, modes = (
        content[lo:hi].view(kind) for lo, hi, kind in _places(num_sequences, num_indices, size)
    )
    index = MegatronIndex(dtype, lengths, pointers, documents, modes if len(modes) else None)
    for problem in _problems(index):
        raise _damaged(path, problem)
    return index


def write_index(file: BinaryIO, dtype: np.dtype, lengths: np.ndarray, documents: np.ndarray) -> None:
    """Writes the index of sequences that follow one another: `lengths` [sequences] in tokens, `documents`
    [documents + 1] the sequence that begins each, and at last their number."""
    code = next(code for code, kind in TYPES.items() if dtype == kind)
    file.write(_HEAD.pack(MAGIC, VERSION, code, len(lengths), len(documents)))
    file.write(np.asarray(lengths, dtype="<i4").tobytes())
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    file.write((ends - np.asarray(lengths, dtype=np.int64) * dtype.itemsize).astype("<i8").tobytes())
    file.write(np.asarray(documents, dtype="<i8").tobytes())


def _places(num_sequences: int, num_indices: int, size: int) -> Iterator[tuple[int, int, str]]:
    """First and last byte and the type of each array."""
    lo = _HEAD.size
    for num_bytes, kind in ((4 * num_sequences, "<i4"), (8 * num_sequences, "<i8"), (8 * num_indices, "<i8")):
        yield lo, lo + num_bytes, kind
        lo += num_bytes
    yield lo, size, "i1"


def _dtype(path: Place, code: int) -> np.dtype:
    if code not in TYPES or not issubclass(kind := TYPES[code], np.integer):
        whole = ", ".join(f"{each} ({np.dtype(kind).name})" for each, kind in TYPES.items() if each < 6 or each == 8)
        raise FileError(f"{path}: its tokens are of the type with code {code}. Tokens are of one of {whole}.")
    return np.dtype(kind).newbyteorder("<")


def _problems(index: MegatronIndex) -> Iterator[str]:
    """What is wrong with the numbers of an index, the first thing first."""
    end = 0
    for lo in range(0, len(index.lengths), _BLOCK):
        lengths = index.lengths[lo : lo + _BLOCK].astype(np.int64)
        if lengths.min() < 0:
            yield f"sequence {lo + int(lengths.argmin())} has {lengths.min()} tokens"
        ends = end + np.cumsum(lengths) * index.dtype.itemsize
        begins = np.append(end, ends[:-1])
        if (wrong := np.flatnonzero(index.pointers[lo : lo + _BLOCK] != begins)).size:
            at = int(wrong[0])
            yield f"sequence {lo + at} begins at byte {index.pointers[lo + at]} and the one before ends at {begins[at]}"
        end = int(ends[-1])
    documents = index.documents
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != len(index.lengths):
        yield f"its documents are not of the sequences 0 to {len(index.lengths)}"
    for lo in range(0, len(documents) - 1, _BLOCK):
        if (np.diff(documents[lo : lo + _BLOCK + 1]) < 0).any():
            yield "a document begins before the one before it"


def _damaged(path: Place, why: str) -> FileError:
    return FileError(f"{path} is damaged: {why}. Copy it again, or write it anew with `shardproof tokenize`.")
