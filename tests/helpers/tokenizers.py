"""Tokenizers that tests train themselves: real ones, in Hugging Face's form, of any size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def bpe_tokenizer(folder: Path, texts: Sequence[str], *, vocab_size: int) -> Path:
    """A folder with the tokenizer.json of a byte-level BPE, as GPT-2's, that was trained on `texts`: the first id is
    `<|endoftext|>`."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
