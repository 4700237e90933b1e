"""How many rows the token table of a Megatron command has."""

from __future__ import annotations

import re

from .megatron_flags import RELEASES
from .megatron_reading import Reading

TOKENIZERS = {
    "GPT2BPETokenizer": 50257,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
    "Llama2Tokenizer": 32000,
    "GPTSentencePieceTokenizer": 256000,
    "TikTokenizer": 131072,
    "SFTTokenizer": 131072,
}
"""--tokenizer-type -> its usual number of tokens; the files themselves are not read."""

TOKENIZER_FILES = (
    (r"llama-?_?(3|4)", 128256),
    (r"qwen-?_?(1\.5|2|2\.5|3)", 151936),
    (r"deepseek-?_?(v3|r1)|deepseek-ai/deepseek-v3|kimi", 129280),
    (r"deepseek", 102400),
    (r"mi[sx]tral", 32000),
    (r"llama", 32000),
    (r"gpt2|gpt-2", 50257),
    (r"gemma", 256000),
    (r"bloom|t5-small|bigscience", 250680),
)
"""What the name of a tokenizer's file tells -> tokens."""

ASSUMED_VOCABULARY = 50257


def read_vocabulary(reading: Reading) -> None:
    """Rows of the token table, with Megatron's padding."""
    if (padded := reading.integer("--padded-vocab-size")) is not None:
        reading.put("model.vocab_size", padded, "--padded-vocab-size")
        return
    if (padded := reading.integer("--pad-vocab-size-to")) is not None:
        reading.put("model.vocab_size", padded, "--pad-vocab-size-to")
        return
    tokens, flag = _tokens(reading)
    if tokens is None:
        return
    for extra in ("--extra-vocab-size", "--vocab-extra-ids"):
        tokens += reading.integer(extra) or 0
    divisible = reading.integer("--make-vocab-size-divisible-by") or 128
    tp = reading.integer("--tensor-model-parallel-size") or 1
    multiple = divisible * max(tp, 1)
    rows = -(-tokens // multiple) * multiple
    why = f"{tokens:,} tokens, padded to a multiple of {multiple}"
    extras = (each for each in ("--extra-vocab-size", "--vocab-extra-ids") if reading.is_written(each))
    reading.put("model.vocab_size", rows, flag, "--make-vocab-size-divisible-by", *extras, why=why)
    if reading.is_written("--tokenizer-type") and flag != "--tokenizer-type":
        reading.say("--tokenizer-type", "mapped", why, "model.vocab_size")


def _tokens(reading: Reading) -> tuple[int | None, str]:
    """How many tokens there are, and the flag that says so."""
    kind = reading.last["--tokenizer-type"].value if reading.is_written("--tokenizer-type") else ""
    if (tokens := reading.integer("--vocab-size")) is not None:
        return tokens + (kind == "NullTokenizer" and _before(reading.version)), "--vocab-size"
    if reading.is_written("--vocab-size"):
        return None, ""
    if kind in TOKENIZERS:
        return TOKENIZERS[kind], "--tokenizer-type"
    named = " ".join(
        reading.last[flag].value.lower()
        for flag in (
            "--tokenizer-model",
            "--tokenizer-name-or-path",
            "--patch-tokenizer-type",
            "--tokenizer-type",
            "--vocab-file",
            "--load",
        )
        if reading.is_written(flag)
    )
    found = next((tokens for pattern, tokens in TOKENIZER_FILES if re.search(pattern, named)), None)
    tokens = ASSUMED_VOCABULARY if found is None else found
    how = "as the tokenizer's name tells" if found is not None else "which nothing in the file tells"
    reading.assume(f"model.vocab_size: {tokens:,} tokens, {how} (--set model.vocab_size=N).")
    return tokens, "--tokenizer-type"


def _before(version: str | None) -> bool:
    """True for releases whose NullTokenizer has one token more than --vocab-size says."""
    return version in RELEASES[: RELEASES.index(NULL_TOKENIZER_COUNTS_ALL)]


NULL_TOKENIZER_COUNTS_ALL = "0.18"
"""Release from which --vocab-size counts every token of a NullTokenizer."""
