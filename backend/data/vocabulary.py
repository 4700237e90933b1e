"""Whether the ids of the training data are ids of the model, and tokens of its tokenizer: found out before ranks are
started, without torch.

Tokens of a text are its bytes (`text`). Tokens of a token file are those of the tokenizer that `shardproof tokenize`
recorded next to it (`tokenizer_record`); of one without a record nobody knows, and its ids alone are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...core.plan.data_names import named_data
from ...core.plan.plan import AnyPlan, Plan
from ..base.url_cache import UrlCache
from .text import VOCABULARY_SIZE, documents_of
from .token_files import TokenFile, cache_of, open_tokens, token_file_of
from .tokenizer_files import TOKENIZER_FILE, tokenizer_of
from .tokenizer_record import BYTES, TokenizerRecord, tokenizer_digest

MOST_IDS_OF_BYTES = 2 * VOCABULARY_SIZE
"""A vocabulary of bytes has at most as many marks (of ends, of padding) besides the bytes. Vocabularies that tokenizers
learned have thousands of ids: of the model presets that are not of bytes the smallest has 32,000."""


class _Source(NamedTuple):
    """One text or token file of a plan: the key and the name that it was given by, the token file, None for a text, and
    where this host keeps what it reads of URLs."""

    key: str
    name: str
    file: TokenFile | None
    cache: UrlCache

    @property
    def given(self) -> str:
        return f"train.{self.key}={self.name!r}"

    @property
    def record(self) -> TokenizerRecord | None:
        """The tokenizer whose tokens they are; None where nobody knows."""
        return TokenizerRecord(BYTES, VOCABULARY_SIZE) if self.file is None else self.file.record

    def largest(self) -> int:
        """The largest id, in a token file of sampled pieces."""
        if self.file is not None:
            return self.file.largest_sampled()
        return max(map(_largest, documents_of(self.name, self.cache)))


def unknown_ids(plan: Plan) -> list[str]:
    """Ids of the data that the model of a plan has not, one text for each source of them.

    A vocabulary that has all bytes needs no look at a text. Of token files pieces are looked at; ranks look at the rest
    as they read it (`Stream`). Raises `PlanError` for data that cannot be read.
    """
    padding, problems = plan.model.padding_rows, []
    ids = plan.model.vocab_size - padding
    has = f"{_vocabulary(plan)} has ids up to {ids - 1}"
    for source in _sources(plan):
        largest = source.largest() if source.file is not None or ids < VOCABULARY_SIZE else -1
        if largest >= ids:
            problems.append(
                f"{source.given} has ids {'(bytes) ' if source.file is None else ''}up to {largest}, and {has}. "
                f"Use model.vocab_size={largest + 1 + padding} or more."
            )
    fill = plan.train.ignore_token
    if plan.train.padded and fill is not None and fill >= ids:
        problems.append(
            f"train.padded=true fills sequences up with train.ignore_token={fill}, and {has}. "
            f"Use train.ignore_token={ids - 1} or less, or model.vocab_size={fill + 1 + padding} or more."
        )
    return problems


def other_tokens(plan: AnyPlan) -> list[str]:
    """Why the data are not the tokens of a plan's models, one text for each model; empty where they are."""
    return [of_part(part, problem) for part in plan.parts for problem in _other_tokens(part)]


def tokens_are_bytes(plan: Plan) -> bool:
    """Whether all data of a plan are bytes. Raises `PlanError` for data that cannot be read."""
    return all(source.record is not None and source.record.digest == BYTES for source in _sources(plan))


def of_part(part: Plan, problem: str) -> str:
    """A problem of a part of a plan, which it names where there are several."""
    return f'module "{part.name}": {problem}' if part.name else problem


def _other_tokens(plan: Plan) -> list[str]:
    sources = _sources(plan)
    known = {source.record.digest: source for source in sources if source.record is not None}
    if len(known) > 1:
        first, other = list(known.values())[:2]
        return [
            f"{_made_by(first)}, and {_made_by(other)}. Tokenize all data with one tokenizer (`shardproof tokenize`)."
        ]
    if plan.train.load is not None and (found := tokenizer_of(plan.train.load)):
        return [problem for source in sources for problem in _not_of_model(source, plan.train.load, found)][:1]
    return [problem for source in sources for problem in _no_vocabulary(plan, source)][:1]


def _sources(plan: Plan) -> list[_Source]:
    """All texts and token files of a plan. Raises `PlanError` for a token file that is not there or is damaged."""
    sources, cache = [], cache_of(plan.train)
    for key in ("data", "validation_data"):
        for _, name in named_data(getattr(plan.train, key) or ""):
            if name:
                path = token_file_of(name)
                sources.append(_Source(key, name, None if path is None else open_tokens(path, cache), cache))
    return sources


def _not_of_model(source: _Source, folder: str, found: list[str]) -> Iterator[str]:
    """Why data are not tokens of the model in a folder, which comes with the tokenizer files that were `found`."""
    model = f"train.load={folder!r} holds {', '.join(found)}: the ids of this model are tokens of that tokenizer"
    path = Path(folder) / TOKENIZER_FILE
    if not path.is_file():
        yield (
            f"{model}, and only a {TOKENIZER_FILE} can be compared with that of the data. Write one next to them: "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(...)` of transformers does."
        )
        return
    how = f"Use `shardproof tokenize FILES --tokenizer {path} -o PREFIX` and train.data=PREFIX."
    if source.file is None:
        bytes_too = "; if it was trained on bytes, take the tokenizer's files out of its folder"
        yield f"{model}, and {source.given} gives bytes, ids 0 to {VOCABULARY_SIZE - 1}. {how[:-1]}{bytes_too}."
    elif source.record is None:
        yield f"{model}, and nobody recorded which tokenizer made {source.given}. {how}"
    elif source.record.digest != tokenizer_digest(path):
        yield f"{model}, and {_made_by(source)}, which is another. {how}"


def _no_vocabulary(plan: Plan, source: _Source) -> Iterator[str]:
    """Why data are not tokens of a model that comes without a tokenizer: it has too few ids, or is no model of
    bytes."""
    record, num_ids = source.record, plan.model.vocab_size - plan.model.padding_rows
    if record is None:
        return
    if record.digest != BYTES:
        if num_ids < record.vocab_size:
            needed = record.vocab_size + plan.model.padding_rows
            yield (
                f"{_made_by(source)}, which has {record.vocab_size} ids, and {_vocabulary(plan)} has {num_ids}. Use "
                f"model.vocab_size={needed} (--set model.vocab_size={needed})."
            )
    elif num_ids > MOST_IDS_OF_BYTES:
        size = f"model.vocab_size={VOCABULARY_SIZE}"
        own = f"Use {size} (--set {size}), a model of bytes such as --model tiny-llama"
        other = "or tokenize the text (`shardproof tokenize`)"
        yield (
            f"{_vocabulary(plan)} is no vocabulary of bytes, which has {VOCABULARY_SIZE} to {MOST_IDS_OF_BYTES} ids, "
            f"and {source.given} gives bytes, ids 0 to {VOCABULARY_SIZE - 1}. "
            f"{own if plan.train.load is None else 'Load a model of bytes'}, {other}."
        )


def _made_by(source: _Source) -> str:
    return f"{source.given} has tokens of {'' if source.record is None else source.record.named}"


def _vocabulary(plan: Plan) -> str:
    padding = f" with model.padding_rows={plan.model.padding_rows}" if plan.model.padding_rows else ""
    return f"model.vocab_size={plan.model.vocab_size}{padding} of {plan.model.name}"


def _largest(document: bytes) -> int:
    return int(np.frombuffer(document, dtype=np.uint8).max(initial=0))
