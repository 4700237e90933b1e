"""What `train.data` and `train.validation_data` name: one text or token file, or several with weights, as Megatron's
`--data-path` has them (`0.3 news 0.7 books`); and `train.split`."""

from __future__ import annotations

import math
import shlex
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ..base.urls import is_url

STDLIB = "python-stdlib"
"""The standard library's own text, which is no path."""


class NamedData(NamedTuple):
    """One source of a blend: its weight, in the proportion of which samples come from it, and its name."""

    weight: Fraction
    name: str


@lru_cache(maxsize=256)
def named_data(text: str) -> tuple[NamedData, ...]:
    """The sources that a text names: pairs of a weight and a name, where it is made of such pairs, else one name.

    Names with spaces are quoted as for a shell.

    >>> [(str(weight), name) for weight, name in named_data("0.3 news 0.7 'old books'")]
    [('3/10', 'news'), ('7/10', 'old books')]
    >>> named_data("old books")[0].name
    'old books'
    """
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that is never closed: part of a name
        words = []
    weights = [_weight(word) for word in words[::2]]
    if len(words) < 2 or len(words) % 2 or any(weight is None for weight in weights):
        return (NamedData(Fraction(1), text),)
    return tuple(
        NamedData(weight, name) for weight, name in zip(weights, words[1::2], strict=True) if weight is not None
    )


def data_from(folder: Path, text: str) -> str:
    """The same with names that start from `folder`, unless they are absolute."""
    sources = named_data(text)
    if len(sources) == 1 and sources[0].name == text:
        return _from(folder, text)
    words = shlex.split(text)
    return " ".join(
        f"{weight} {shlex.quote(_from(folder, name))}" for weight, name in zip(words[::2], words[1::2], strict=True)
    )


def split_of(text: str) -> tuple[float, float, float]:
    """The shares of training, validation and test data, which add up to 1 but for rounding, of `949,50,1`, as
    Megatron's `--split` has them; those that are not given are 0. Raises `ValueError` where it is no such text."""
    given = [_weight(word.strip()) for word in text.split(",")]
    if not 1 <= len(given) <= 3 or any(share is None or share < 0 for share in given):
        raise ValueError("it is one to three numbers with commas between them, none below 0")
    train, validation, test = [*(float(share) for share in given if share is not None), 0.0, 0.0][:3]
    if not (whole := train + validation + test):
        raise ValueError("its numbers add up to 0")
    return train / whole, validation / whole, test / whole


def _from(folder: Path, name: str) -> str:
    return name if name == STDLIB or is_url(name) else str(folder / name)


def _weight(word: str) -> Fraction | None:
    """A number as it is written; None for another word."""
    try:
        return Fraction(word) if len(word) <= 40 and "/" not in word and math.isfinite(float(word)) else None
    except (ValueError, OverflowError):
        return None
