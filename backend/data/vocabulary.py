"""Whether the ids of the training data are ids of the model: found out before ranks are started, without torch.

Tokens are bytes (`text`), so the data's ids are at most 255, and a model whose vocabulary is of something else would be
fed the wrong tokens. Token files will be a source of their own, and these questions are about what a source holds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...core.plan.plan import AnyPlan, Plan
from .text import VOCABULARY_SIZE, documents_of

MOST_IDS_OF_BYTES = 2 * VOCABULARY_SIZE
"""A vocabulary of bytes has at most as many marks (of ends, of padding) besides the bytes. Vocabularies that tokenizers
learned have thousands of ids: of the model presets that are not of bytes the smallest has 32,000."""

TOKENIZER_FILES = (
    "tokenizer.json",
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


def unknown_ids(plan: Plan) -> list[str]:
    """Ids of the data that the model of a plan has not, one text for each source of them.

    A vocabulary that has all bytes needs no look at the data. Raises `PlanError` for data that cannot be read.
    """
    padding, problems = plan.model.padding_rows, []
    ids = plan.model.vocab_size - padding
    has = f"{_vocabulary(plan)} has ids up to {ids - 1}"
    largest = max(map(_largest, documents_of(plan.train.data))) if ids < VOCABULARY_SIZE else -1
    if largest >= ids:
        problems.append(
            f"train.data={plan.train.data!r} has ids (bytes) up to {largest}, and {has}. "
            f"Use model.vocab_size={largest + 1 + padding} or more."
        )
    fill = plan.train.ignore_token
    if plan.train.padded and fill is not None and fill >= ids:
        problems.append(
            f"train.padded=true fills sequences up with train.ignore_token={fill}, and {has}. "
            f"Use train.ignore_token={ids - 1} or less, or model.vocab_size={fill + 1 + padding} or more."
        )
    return problems


def no_bytes(plan: AnyPlan) -> list[str]:
    """Why bytes are not the tokens of a plan's models, one text for each model; empty where they are."""
    return [of_part(part, problem) for part in plan.parts for problem in _no_bytes(part)]


def of_part(part: Plan, problem: str) -> str:
    """A problem of a part of a plan, which it names where there are several."""
    return f'module "{part.name}": {problem}' if part.name else problem


def _no_bytes(plan: Plan) -> list[str]:
    given = f"train.data={plan.train.data!r} gives bytes, ids 0 to {VOCABULARY_SIZE - 1}"
    if found := _tokenizer_of(plan.train.load):
        return [
            f"train.load={plan.train.load!r} holds {', '.join(found)}: the ids of this model are tokens of that "
            f"tokenizer, and {given}. There is no tokenizer here yet. Load a model of bytes; if this one was trained "
            "on "
            "bytes, take the tokenizer's files out of its folder."
        ]
    if plan.model.vocab_size - plan.model.padding_rows <= MOST_IDS_OF_BYTES:
        return []
    size = f"model.vocab_size={VOCABULARY_SIZE}"
    own = f"Use {size} (--set {size}), or a model of bytes such as --model tiny-llama"
    return [
        f"{_vocabulary(plan)} is no vocabulary of bytes, which has {VOCABULARY_SIZE} to {MOST_IDS_OF_BYTES} ids, and "
        f"{given}. There is no tokenizer here yet. {own if plan.train.load is None else 'Load a model of bytes'}."
    ]


def _vocabulary(plan: Plan) -> str:
    padding = f" with model.padding_rows={plan.model.padding_rows}" if plan.model.padding_rows else ""
    return f"model.vocab_size={plan.model.vocab_size}{padding} of {plan.model.name}"


def _largest(document: bytes) -> int:
    return int(np.frombuffer(document, dtype=np.uint8).max(initial=0))


def _tokenizer_of(folder: str | None) -> list[str]:
    """The files of a tokenizer in a folder of weights."""
    return [] if folder is None else [name for name in TOKENIZER_FILES if (Path(folder) / name).is_file()]
