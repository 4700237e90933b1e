"""Files of token ids, memory-mapped: Megatron's pairs `PREFIX.bin` and `PREFIX.idx`, and plain `.bin` files of 16 and
32 bits. At a URL the index is fetched, and tokens are read by ranges. No torch: they are looked at before ranks are
started, too."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...core.base.errors import FileError
from ...core.plan.train import Train
from ..base.url_cache import USUAL_CACHE, UrlCache, asked_for
from ..base.urls import Place, UrlPath, place_of
from .megatron_index import MegatronIndex, read_index
from .remote_tokens import RemoteTokens, Tokens, rows_of
from .tokenizer_record import TokenizerRecord, read_record

PLAIN_HEADS = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}
"""First number of the head of llm.c's files -> its version and the type of tokens (`dev/data/data_common.py` there: of
GPT-2 and of Llama 3). The head has 256 numbers of 32 bits: that, the version, the number of tokens, and zeros."""
_HEAD_NUMBERS = 256

WIDE = ".uint32.bin"
"""The end of the name of a plain file without a head whose tokens have 32 bits; those of all others, nanoGPT's, 16."""

SAMPLED_PIECES, PIECE_BYTES = 64, 2**16
"""What a digest reads of an array of more than 4 MiB: so many pieces, the first and the last among them."""


@dataclass(frozen=True)
class TokenFile:
    """An open token file. `ids` is a read-only view of it, of whole numbers, [num_tokens]; `index` says where documents
    begin and is None for plain files, which do not say; `record` says which tokenizer made it, None where none was
    written next to it."""

    path: Place
    ids: Tokens
    index: MegatronIndex | None
    record: TokenizerRecord | None

    @property
    def num_documents(self) -> int:
        """Documents; 1 for a plain file."""
        return 1 if self.index is None else self.index.num_documents

    def starts(self, lo: int, hi: int) -> np.ndarray:
        """Where documents begin in the tokens `lo <= i < hi`, counted from `lo`: int64, ascending from 0."""
        if self.index is None or hi <= lo:
            return np.zeros(int(hi > lo), dtype=np.int64)
        begins = self._document_starts
        first, last = np.searchsorted(begins, [lo, hi])
        return np.unique(np.append(0, begins[first:last] - lo))

    def digest(self, lo: int, hi: int) -> str:
        """SHA-256, in hexadecimal, of the type and number of the tokens `lo <= i < hi`, of the index, and of sampled
        pieces of both (`sampled`): the same for a copy of the file, and it reads some MB of a file of any size. A
        change that misses all pieces is not seen."""
        digest = hashlib.sha256(f"{self.ids.dtype.str} {lo} {hi} {len(self.ids)}".encode())
        arrays = () if self.index is None else (self.index.lengths, self.index.documents)
        for array in (self.ids[lo:hi], *arrays):
            digest.update(str(len(array)).encode())
            for piece in sampled(array):
                digest.update(np.ascontiguousarray(piece).data)
        return digest.hexdigest()

    def largest_sampled(self) -> int:
        """The largest id of sampled pieces of the file; -1 for an empty file."""
        return max((int(piece.max()) for piece in sampled(self.ids) if len(piece)), default=-1)

    @functools.cached_property
    def _document_starts(self) -> np.ndarray:
        assert self.index is not None
        return self.index.starts(0, self.index.num_documents)


def cache_of(train: Train) -> UrlCache:
    """Where this host keeps what a run reads of URLs."""
    return UrlCache(train.data_cache, train.data_cache_bytes)


def token_file_of(name: str) -> Place | None:
    """The `.bin` file that a name means, be it `PREFIX.bin`, `PREFIX.idx` or the PREFIX of both; None for the name of
    something else. Raises `FileError` for a URL with a query, of which no other name can be made, and where a store
    does not answer."""
    path = place_of(name)
    if isinstance(path, UrlPath):
        if "?" in path.url:
            raise FileError(
                f"train.data={name!r} has a query (?...), and what lies next to it is read too. Use a URL without."
            )
        with asked_for(path):
            return _token_file_at(path)
    return _token_file_at(path)


def _token_file_at(path: Place) -> Place | None:
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix(".bin")
    bin_file, index = path.with_name(f"{path.name}.bin"), path.with_name(f"{path.name}.idx")
    return bin_file if not path.exists() and bin_file.is_file() and index.is_file() else None


def open_tokens(path: Place, cache: UrlCache = USUAL_CACHE) -> TokenFile:
    """The token file `path`, which ends in `.bin`, checked against its index or head. What is read of a URL goes to
    `cache`.

    Ids themselves are looked at when they are read. Raises `FileError` where there is none, or it is damaged.
    """
    if isinstance(path, UrlPath):
        with asked_for(path):
            return _opened(path, cache)
    try:
        return _opened(path, cache)
    except OSError as error:
        raise FileError(
            f"{error.filename or path} cannot be read: {error.strerror}. Give PREFIX of a pair PREFIX.bin and "
            "PREFIX.idx, or a plain .bin file."
        ) from error


def _opened(path: Place, cache: UrlCache) -> TokenFile:
    index_path, content = path.with_suffix(".idx"), _Content(path, cache)
    index = read_index(cache.local(index_path), index_path) if index_path.exists() else None
    ids = _plain(content) if index is None else _of_index(content, index)
    return TokenFile(path, ids, index, read_record(path, cache))


@dataclass(frozen=True)
class _Content:
    """The bytes of a token file, on a disk or at a URL."""

    path: Place
    cache: UrlCache

    @functools.cached_property
    def size(self) -> int:
        """Bytes. Raises `OSError` where there is no such file."""
        return self.path.size() if isinstance(self.path, UrlPath) else self.path.stat().st_size

    def first(self, num_bytes: int) -> bytes:
        """The first bytes."""
        if isinstance(self.path, UrlPath):
            return self.cache.blocks(self.path).read([(0, num_bytes)])[0]
        with self.path.open("rb") as file:
            return file.read(num_bytes)

    def tokens(self, dtype: np.dtype, offset: int) -> Tokens:
        """The tokens from a byte on."""
        if self.size == offset:  # nothing cannot be mapped
            return np.zeros(0, dtype=dtype)
        if isinstance(self.path, UrlPath):
            return RemoteTokens(self.cache.blocks(self.path), dtype, offset, (self.size - offset) // dtype.itemsize)
        return np.memmap(self.path, dtype=dtype, mode="r", offset=offset)


def sampled(array: Tokens) -> Iterator[np.ndarray]:
    """Pieces of an array, evenly spread, its first and last entries among them; all of a small one."""
    size = PIECE_BYTES // array.itemsize
    if len(array) <= SAMPLED_PIECES * size:
        yield from rows_of(array, [(0, len(array))])
        return
    first = ((len(array) - size) * piece // (SAMPLED_PIECES - 1) for piece in range(SAMPLED_PIECES))
    yield from rows_of(array, [(lo, lo + size) for lo in first])


def _of_index(content: _Content, index: MegatronIndex) -> Tokens:
    """The tokens next to an index."""
    path, expected, found = content.path, index.num_tokens * index.dtype.itemsize, content.size
    if found != expected:
        raise FileError(
            f"{path} has {found} bytes, and by {path.with_suffix('.idx').name} it has {expected}: it is "
            f"{'cut off' if found < expected else 'of another index'}. Copy both again, or write them anew with "
            "`shardproof tokenize`."
        )
    return content.tokens(index.dtype, 0)


def _plain(content: _Content) -> Tokens:
    """The tokens of a file without an index."""
    path, size = content.path, content.size
    head = np.frombuffer(content.first(12), dtype="<i4").tolist() if size >= 4 * _HEAD_NUMBERS else []
    if head and head[0] in PLAIN_HEADS:
        return _with_head(content, head)
    dtype = np.dtype("<u4" if path.name.endswith(WIDE) else "<u2")
    if size == 0 or size % dtype.itemsize:
        raise FileError(
            f"{path} has {size} bytes, which are no whole tokens of {dtype.itemsize} bytes each, and there is no "
            f"{path.with_suffix('.idx').name} next to it. Copy it again; the name of a plain file of 32 bits ends in "
            f"{WIDE}."
        )
    return content.tokens(dtype, 0)


def _with_head(content: _Content, head: list[int]) -> Tokens:
    path, size = content.path, content.size
    version, kind = PLAIN_HEADS[head[0]]
    dtype = np.dtype(kind).newbyteorder("<")
    expected = 4 * _HEAD_NUMBERS + head[2] * dtype.itemsize
    if head[1] != version or expected != size:
        raise FileError(
            f"{path}: its head says version {head[1]} and {head[2]} tokens, {expected} bytes with the head, and it has "
            f"{size}; version {version} is known. Copy it again."
        )
    return content.tokens(dtype, 4 * _HEAD_NUMBERS)
