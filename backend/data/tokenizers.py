"""Tokenizers: texts to ids. Bytes, or what a tokenizer.json says, through the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from ...core.base.errors import FileError, MissingExtraError, PlanError
from ...core.base.files import read_text
from ...core.base.parsing import parse_json
from .text import VOCABULARY_SIZE
from .tokenizer_record import BYTES, TokenizerRecord, tokenizer_digest

USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[SEP]")
"""What ends a document in the tokenizers of GPT-2, Llama 3, Llama 2, Gemma, DeepSeek and BERT."""

MOST_IDS_OF_16_BITS = 65_500
"""Of a vocabulary with fewer ids tokens have 16 bits, of others 32: Megatron-Core's rule (`DType.optimal_dtype`)."""


class Tokenizer(Protocol):
    """Texts to ids. `record` says which tokenizer it is."""

    record: TokenizerRecord

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The ids of each text, whole numbers. Raises `UnicodeDecodeError` for one that is not in UTF-8, where that
        matters."""


class ByteTokenizer:
    """Ids are the bytes of a text. With `ends` the id 256 is what ends a document."""

    def __init__(self, *, ends: bool):
        end = VOCABULARY_SIZE if ends else None
        self.record = TokenizerRecord(BYTES, VOCABULARY_SIZE + ends, end)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The bytes of each text."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]


class JsonTokenizer:
    """What the file `path`, a tokenizer.json, says; special tokens are not added.

    With `ends` the id of `end` is what ends a document, or where that is None, of the text that tokenizer_config.json
    or the usual names say. Raises `FileError` for a file that is no tokenizer, `PlanError` where no text ends a
    document, `MissingExtraError` without the library.
    """

    def __init__(self, path: Path, *, ends: bool, end: str | None = None):
        try:
            import tokenizers
        except ImportError as error:
            raise MissingExtraError(
                "a tokenizer.json is read by the `tokenizers` library, which is not installed. Run "
                "`pip install 'shardproof[tokenize]'`."
            ) from error
        digest = tokenizer_digest(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise FileError(f"{path} is no tokenizer that the `tokenizers` library reads: {error}.") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        end_id = _end_of(path, ids, end) if ends else None
        self.record = TokenizerRecord(digest, max(ids.values(), default=-1) + 1, end_id)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The ids of each text."""
        decoded = [text.decode() for text in texts]
        return [
            np.array(each.ids, dtype=np.int32)
            for each in self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; those that are none of the tokenizer's are left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def open_tokenizer(name: str, *, ends: bool, end: str | None = None) -> Tokenizer:
    """The tokenizer that is called `bytes`, or lies in a tokenizer.json or a folder with one. Raises as `JsonTokenizer`
    does."""
    if name == BYTES:
        if end is not None:
            raise PlanError(f"--eod {end!r} is a token of a tokenizer.json; bytes have id {VOCABULARY_SIZE} for it.")
        return ByteTokenizer(ends=ends)
    return JsonTokenizer(tokenizer_file(name), ends=ends, end=end)


def tokenizer_file(name: str) -> Path:
    """The tokenizer.json that a file or folder name means. Raises `FileError` where there is none."""
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise FileError(f"--tokenizer {name}: there is no {path}. Give a tokenizer.json, or `bytes`.")
    return path


def token_type(num_ids: int) -> np.dtype:
    """The type that ids are written in."""
    return np.dtype("<u2" if num_ids < MOST_IDS_OF_16_BITS else "<i4")


def _end_of(path: Path, ids: dict[str, int], end: str | None) -> int:
    """The id that ends documents."""
    if end is None:
        end = _end_in_config(path.with_name("tokenizer_config.json")) or next((e for e in USUAL_ENDS if e in ids), None)
    if end is None:
        raise PlanError(f"{path} has none of {', '.join(USUAL_ENDS)} to end documents with. Name a token with --eod.")
    if end not in ids:
        raise PlanError(f"{path} has no token {end!r} to end documents with. Name another with --eod.")
    return ids[end]


def _end_in_config(path: Path) -> str | None:
    """`eos_token` of a tokenizer_config.json, where there is one: a text, or an object with it."""
    config = parse_json(read_text(path), str(path)) if path.is_file() else None
    found = config.get("eos_token") if isinstance(config, dict) else None
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None
