"""Which tokenizer made a token file: a small record next to it (`PREFIX.tokenizer.json` is a copy of the tokenizer,
`PREFIX.tokens.json` the record). The tokenizer's digest is compared with that of the model that is trained on it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...core.base.errors import FileError
from ...core.base.files import TABLE_BYTES, read_text
from ...core.base.parsing import parse_json
from ..base.url_cache import USUAL_CACHE, UrlCache
from ..base.urls import AnyPlace, Place

BYTES = "bytes"
"""The tokenizer whose tokens are the bytes of the text, and as its digest."""

_NOT_MEANING = ("truncation", "padding")
"""Settings in a tokenizer.json that change how texts are cut to a batch, and no token of a text."""


_TYPES = {"digest": (str,), "vocab_size": (int,), "end_of_document": (int, type(None))}


@dataclass(frozen=True)
class TokenizerRecord:
    """What made a token file: the `digest` of the tokenizer (`tokenizer_digest`, or `bytes`), the number of its ids,
    and the id that ends documents, None where none was put there."""

    digest: str
    vocab_size: int
    end_of_document: int | None = None

    @property
    def named(self) -> str:
        """In words of a message."""
        return BYTES if self.digest == BYTES else f"the tokenizer with digest {self.digest[:12]}..."

    def to_json(self) -> str:
        """The text of the record's file."""
        return json.dumps({"format": 1, **asdict(self)}, indent=2) + "\n"


def record_path(tokens: AnyPlace) -> AnyPlace:
    """Where the record of a `.bin` file lies."""
    return tokens.with_suffix(".tokens.json")


def tokenizer_path(tokens: AnyPlace) -> AnyPlace:
    """Where the copy of the tokenizer of a `.bin` file lies."""
    return tokens.with_suffix(".tokenizer.json")


def read_record(tokens: Place, cache: UrlCache = USUAL_CACHE) -> TokenizerRecord | None:
    """The record next to a `.bin` file; None where there is none. Raises `FileError` for one that is damaged."""
    path = record_path(tokens)
    if not path.is_file():
        return None
    found = parse_json(read_text(cache.local(path)), str(path))
    values: list[Any] = [found.get(name) for name in _TYPES] if isinstance(found, dict) else []
    if not values or not all(type(value) in _TYPES[name] for name, value in zip(_TYPES, values, strict=True)):
        raise FileError(
            f"{path} is no record of a tokenizer. Write the token file anew with `shardproof tokenize`, or remove it: "
            "then nobody knows which tokenizer made the tokens."
        )
    return TokenizerRecord(*values)


def tokenizer_digest(path: Path) -> str:
    """SHA-256, in hexadecimal, of what a tokenizer.json means: the same whoever wrote the file, with whatever spaces
    and order of keys. Raises `FileError` where it is no JSON object."""
    return hashlib.sha256(json.dumps(_meaning(path), sort_keys=True).encode()).hexdigest()


def _meaning(path: Path) -> dict[str, Any]:
    found = parse_json(read_text(path, most_bytes=TABLE_BYTES), str(path))
    if not isinstance(found, dict):
        raise FileError(f"{path} is no tokenizer: it is not a JSON object. Give a tokenizer.json of Hugging Face's.")
    return {key: value for key, value in found.items() if key not in _NOT_MEANING}
