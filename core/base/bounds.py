"""How large the numbers of a plan may be: one table, each bound with its reason, and the sentence that
refuses what lies beyond.

The bounds lie far outside any run, and inside what the arithmetic holds: 64-bit integers, float64, and the time and
memory that a plan's verbs may take. They are asked for where numbers come in (`plan_build.key_complaint`) and by the
nouns that a config.json or Python fills.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar

from .errors import PlanError, Problem
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

BOUNDS: dict[str, Bound] = {
    **dict.fromkeys(("model.num_layers", "model.first_dense_layers"), LAYERS),
    **dict.fromkeys(("recompute.num_layers", "recompute.layers", "schedule.max_active_stages"), LAYERS),
    **{
        f"model.{name}": WIDTH
        for name in (
            *("hidden_size", "ffn_hidden_size", "head_dim", "expert_ffn_hidden_size"),
            *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        )
    },
    **dict.fromkeys(("model.num_heads", "model.num_kv_heads"), HEADS),
    **{
        f"model.{name}": EXPERTS
        for name in (
            *("num_experts", "experts_per_token", "num_shared_experts", "num_router_groups", "router_groups_per_token"),
            "expert_capacity_factor",
        )
    },
    "variation.expert_capacity": EXPERTS,
    "variation.expert_imbalance": EXPERTS,
    **dict.fromkeys(("model.vocab_size", "model.padding_rows", "train.ignore_token"), TABLE),
    **dict.fromkeys(
        ("model.max_positions", "model.rope_original_positions", "model.sliding_window", "batch.sequence"), TOKENS
    ),
    **{f"layout.{name}": DEVICES for name in ("tp", "pp", "vpp", "dp", "cp", "ep", "etp")},
    **{
        f"cluster.{name}": DEVICES
        for name in (
            *("num_devices", "devices_per_node", "nics_per_node", "nodes_per_leaf", "num_cores", "num_compute_units"),
            *("oversubscription", "attention_half_head_dim"),
        )
    },
    "data_parallel.shard": DEVICES,
    "model.num_mtp_layers": Bound(100, "models published have one (DeepSeek-V3)"),
    **dict.fromkeys(("batch.global_size", "batch.micro_size"), SEQUENCES),
    "train.timeout_s": Bound(1e8, "three years; what waits for threads counts in 64-bit nanoseconds", least=1e-3),
    "variation.hiccups_per_s": Bound(1e6, "pauses of microseconds are part of the times measured", least=1e-12),
    "cluster.rank_skew_root_s": Bound(1e3, "a second's work would wait for a quarter of an hour", least=1e-9),
    "cluster.step_over_kernels": Bound(1e3, "kernels measured one by one take about as long as in a step", least=1e-3),
}
"""Section and field -> the bound of a number that its name does not imply, or that is tighter."""

_BY_ENDING = (
    ("_bytes_per_s", RATE),
    ("_flops_per_s", RATE),
    ("_bytes", BYTES),
    ("_s", SECONDS),
    ("_share", SHARE),
    ("_efficiency", SHARE),
)
_TABLES = {
    **{f"cluster.{name}": RATE for name in ("peak_flops_per_s", "product_curve", "memory_curve")},
    **{f"cluster.{name}": SECONDS for name in ("kernel_curve", "collective_curve")},
    **{f"cluster.{name}_by_dtype": SHARE for name in ("matmul_efficiency", "sustained_share")},
    "variation.stragglers": Bound(1e6, "a device so slow has failed", least=1e-3),
    "variation.slow_links": SHARE,
}
"""Section and field -> the bound of the numbers of a table."""


@cache
def bound_of(section: str, field: str, *, whole: bool) -> Bound:
    """The bound of a number of a plan by the section and the field of the noun that holds it."""
    name = f"{section}.{field}"
    if name in BOUNDS or name in _TABLES:
        return BOUNDS.get(name) or _TABLES[name]
    ending = next((bound for ending, bound in _BY_ENDING if field.endswith(ending)), None)
    return ending or (WHOLE if whole else FACTOR if section in ("optimizer", "train") else SINGLE)


def beyond(section: str, field: str, value: Any) -> str:
    """What is wrong with the size of a number, of those in a list or a table too, such as `must be at most 10,000
    (...)`; empty when nothing is, and for what is no number."""
    if not isinstance(value, dict | list | tuple):
        return _beyond(section, field, value)
    values = value.values() if isinstance(value, dict) else value
    return next(filter(None, (_beyond(section, field, each) for each in values)), "")


def _beyond(section: str, field: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    bound = bound_of(section, field, whole=isinstance(value, int))
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a number that is not endless"
    if abs(value) > bound.most:
        return f"must be at most {_number(bound.most)}: {bound.why}. Look for a mistyped number"
    if value and abs(value) < bound.least:
        return (
            f"must be 0 or at least {_number(bound.least)}: below it nothing is described. Look for a mistyped number"
        )
    return ""


FieldProblem = tuple[str, str]
"""The field of a noun that is wrong, and the sentence that says how."""


class Bounded:
    """A noun of a plan whose numbers lie within their bounds: one that has others raises `problem_type`, with a
    problem for each. `section` is that of its keys."""

    section: ClassVar[str]
    problem_type: ClassVar[type[PlanError]] = PlanError

    def __init_subclass__(cls, *, section: str | None = None, problem_type: type[PlanError] = PlanError) -> None:
        if section is not None:  # else a noun with more fields of the same section
            cls.section, cls.problem_type = section, problem_type

    def __post_init__(self) -> None:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        complaints = [(name, value, beyond(self.section, name, value)) for name, value in values]
        self._refuse((name, f"{name}={shown(value)} {words}.") for name, value, words in complaints if words)

    def _refuse(self, problems: Iterable[FieldProblem]) -> None:
        """Raises `problem_type` where there are problems, with the keys of their fields."""
        if found := [Problem(sentence, f"{self.section}.{name}") for name, sentence in problems]:
            raise self.problem_type(found)


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
