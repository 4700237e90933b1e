"""How large the numbers of a plan may be: bounds with their reasons, and the sentence that refuses what lies beyond.

Options name theirs (`core.base.option`); what names none has that of its unit, or of its type.

The bounds lie far outside any run, and inside what the arithmetic holds: 64-bit integers, float64, and the time and
memory that a plan's verbs may take. They are asked for where numbers come in (`core.plan.build.key_complaint`) and by
the nouns that a config.json or Python fills.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from .names import is_plain

SHOWN_LENGTH = 120
"""Letters of a value that a message repeats."""


@dataclass(frozen=True)
class Bound:
    """Numbers are at most `most`, and those that are not 0 at least `least` in size. `why` says what
    the bound follows from."""

    most: float
    why: str
    least: float = 0.0


LONGEST_NAME = 4096
"""Letters of the longest path that Linux opens (PATH_MAX)."""
LONGEST_TEXT = 100_000
"""Letters of the longest list of links or stages."""

LAYERS = Bound(10_000, "the deepest transformer published has 1,000 (DeepNet, arXiv 2203.00555)")
WIDTH = Bound(
    2**24,
    (
        "the widest published have some ten thousand (MT-NLG 530B, arXiv 2201.11990: 20,480, and 4 "
        "times that in its MLP)"
    ),
)
HEADS = Bound(2**16, "models published have up to some hundred (DeepSeek-V3: 128)")
EXPERTS = Bound(2**16, "models published have up to some thousand (Switch-C, arXiv 2101.03961: 2,048)")
TABLE = Bound(2**30, "vocabularies published have up to some hundred thousand tokens (Gemma 3: 262,144)")
TOKENS = Bound(2**30, "the longest contexts published are ten million tokens (Llama 4 Scout)")
DEVICES = Bound(
    2**20, ("the largest clusters have some hundred thousand devices; what lists all ranks takes seconds for a million")
)
SEQUENCES = Bound(2**30, "a step of more tokens than any data set has")
RATE = Bound(1e36, "no device or link moves or computes a millionth of that, and it is as good as endless", least=1.0)
SECONDS = Bound(1e12, "30,000 years", least=1e-18)
BYTES = Bound(1e18, "a million terabytes", least=1.0)
SHARE = Bound(1e6, "a share is at most 1", least=1e-6)
SINGLE = Bound(2.0**127, "fp32, in which it is computed with, holds little more", least=2.0**-126)
FACTOR = Bound(SINGLE.most, SINGLE.why)
"""Of what training multiplies by, however little it is."""
WHOLE = Bound(10**15, "products of a few such numbers still become floats")

_BY_ENDING = (
    ("_bytes_per_s", RATE),
    ("_flops_per_s", RATE),
    ("_bytes", BYTES),
    ("_s", SECONDS),
    ("_share", SHARE),
    ("_efficiency", SHARE),
)


@cache
def bound_of(field: str, *, whole: bool) -> Bound:
    """The bound of a number of a plan that names none, by the field of the noun that holds it."""
    ending = next((bound for ending, bound in _BY_ENDING if field.endswith(ending)), None)
    return ending or (WHOLE if whole else SINGLE)


def beyond(field: str, value: Any, bound: Bound | None = None) -> str:
    """What is wrong with the size of a number, of those in a list or a table too, such as `must be at most 10,000
    (...)`; empty when nothing is, and for what is no number. Without `bound` it is that of the field's name."""
    if not isinstance(value, dict | list | tuple):
        return _beyond(field, value, bound)
    values = value.values() if isinstance(value, dict) else value
    return next(filter(None, (_beyond(field, each, bound) for each in values)), "")


def _beyond(field: str, value: Any, bound: Bound | None) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    bound = bound or bound_of(field, whole=isinstance(value, int))
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a number that is not endless"
    if abs(value) > bound.most:
        return f"must be at most {_number(bound.most)}: {bound.why}. Look for a mistyped number"
    if value and abs(value) < bound.least:
        return (
            f"must be 0 or at least {_number(bound.least)}: below it nothing is described. Look for a mistyped number"
        )
    return ""


def text_complaint(text: str, *, longest: int) -> str:
    """What is wrong with a text that is a name, a path or a list of them, whatever it says; empty when nothing is."""
    if len(text) > longest:
        return f"has {len(text):,} letters and must have at most {longest:,}"
    if not is_plain(text):
        return (
            "has a letter that no name or path may have: a control character such as a line break, or half of a "
            "UTF-16 pair"
        )
    return ""


def shown(value: Any) -> str:
    """A value as messages repeat it: whole where it is short, else its beginning or how many digits it has.

    >>> shown(12), shown(10**30), shown("a" * 200)[:5], shown([10**5000])
    ('12', 'a whole number of 31 digits', "'aaaa", 'a list with such a number')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**18:
        return f"a whole number of {_digits(value)} digits"
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return f"a {'table' if isinstance(value, dict) else 'list'} with such a number"
    return text if len(text) <= SHOWN_LENGTH else text[:SHOWN_LENGTH] + "..."


def _digits(value: int) -> int:
    """Decimal digits, without writing the number."""
    value = abs(value)
    digits = max(1, math.floor((value.bit_length() - 1) * math.log10(2)))
    return next(number for number in range(digits, digits + 3) if value < 10**number)


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1 <= value < 1e12 else f"{value:g}"
