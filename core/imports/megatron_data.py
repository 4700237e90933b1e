"""Megatron's arguments for training data <-> `train.data`, `train.split` and `train.validation_data`.

`--data-path` and its per-split sisters have prefixes of token files, or pairs of a weight and a prefix
(`get_blend_from_list` of Megatron-Core). What names no file that is known here (`$DATA`) changes no step, and is left
out; files of data arguments are not read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from ..plan.data_names import STDLIB, named_data, split_of
from ..plan.plan import Plan
from .megatron_reading import Reading

USUAL_SPLIT = "969,30,1"
"""Megatron's own, where `--data-path` has none."""
_LISTS = ("--data-args-path", "--per-split-data-args-path")


def read_data(reading: Reading) -> None:
    """Fills the keys of data, as far as the command names them."""
    for flag in _LISTS:
        reading.say(flag, "no-effect", "the file of data arguments is not read, and a step has as many tokens")
    reading.say("--test-data-path", "no-effect", "training reads no test data")
    train = "--data-path" if reading.is_written("--data-path") else "--train-data-path"
    if (data := _blend(reading, train)) is None:
        return
    reading.put("train.data", data, train)
    if train == "--train-data-path":
        if (held_out := _blend(reading, "--valid-data-path")) is not None:
            reading.put("train.validation_data", held_out, "--valid-data-path")
        return
    _read_split(reading)


def data_lines(plan: Plan) -> Iterator[tuple[str, ...]]:
    """The same keys as arguments, each a flag with its values. The standard library's text is no file of Megatron's."""
    train = plan.train
    if train.data == STDLIB:
        return
    if train.validation_data is not None:
        yield "--train-data-path", *_words(train.data)
        yield "--valid-data-path", *_words(train.validation_data)
        return
    yield "--data-path", *_words(train.data)
    yield "--split", "90,10" if train.split is None else train.split


def _blend(reading: Reading, flag: str) -> str | None:
    """What a flag names, as a plan has it; None where that is nothing, or not known."""
    if not reading.is_written(flag):
        return None
    each = reading.last[flag]
    if each.unknown or not each.values:
        reading.say(flag, "no-effect", "which data it names is not known here, and a step has as many tokens")
        return None
    if len(each.values) == 1:
        return each.values[0]
    text = " ".join(map(shlex.quote, each.values))
    if len(named_data(text)) * 2 == len(each.values):
        return text
    why = "several files without weights count by their sizes, which are not looked at. Give each a weight"
    reading.say(flag, "not-modelled", why)
    return None


def _read_split(reading: Reading) -> None:
    flag = "--split"
    if reading.is_written(flag) and reading.last[flag].unknown:
        return
    text = re.sub(r"[\s,/]+", ",", (reading.text(flag) or "").strip()) if reading.given(flag) else USUAL_SPLIT
    try:
        split_of(text)
    except ValueError as error:
        reading.say(flag, "refused", f"{error}", "train.split")
        return
    reading.put("train.split", text, flag)


def _words(data: str) -> list[str]:
    """A prefix, or weights and prefixes."""
    return [data] if len(named_data(data)) == 1 else shlex.split(data)
