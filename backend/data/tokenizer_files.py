"""The files of a tokenizer: what Hugging Face folders call them, and which go with the weights that a plan trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...core.plan.data_names import named_data
from ...core.plan.plan import Plan
from .token_files import cache_of, token_file_of
from .tokenizer_record import tokenizer_path

TOKENIZER_FILE = "tokenizer.json"
"""What a Hugging Face folder calls a tokenizer of the `tokenizers` library, which alone is compared."""

TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
"""What Hugging Face folders call the files of a tokenizer (`vocab_files_names` in transformers;
tekken.json: Mistral)."""

_WITH_THEM = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""Files that say more of a tokenizer, and are none without the others."""


def tokenizer_of(folder: str) -> list[str]:
    """The names of the files of a tokenizer in a folder of weights."""
    return [name for name in TOKENIZER_FILES if (Path(folder) / name).is_file()]


def tokenizer_files(plan: Plan) -> Mapping[str, Path]:
    """Name -> file of the tokenizer that belongs to the weights of a plan: that of `train.load`, or else the copy next
    to its token files; empty where tokens are bytes or nobody knows."""
    if plan.train.load is not None and (found := tokenizer_of(plan.train.load)):
        folder = Path(plan.train.load)
        return {name: folder / name for name in (*found, *_WITH_THEM) if (folder / name).is_file()}
    for _, name in named_data(plan.train.data):
        path = token_file_of(name)
        if path is not None and (copy := tokenizer_path(path)).is_file():
            return {TOKENIZER_FILE: cache_of(plan.train).local(copy)}
    return {}
