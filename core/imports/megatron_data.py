"""Megatron's arguments for training data <-> `train.data`, `train.split` and `train.validation_data`.

`--data-path` and its per-split sisters have prefixes of token files, or pairs of a weight and a prefix
(`get_blend_from_list` of Megatron-Core); `--data-args-path` and its sister name a file of them, which is read where it
lies next to the script, as data. What names no file that is known here (`$DATA`) changes no step, and is left out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..base.errors import FileError
from ..base.files import read_text
from ..base.parsing import parse_json
from ..plan.data_names import STDLIB, named_data, split_of
from ..plan.plan import Plan
from .megatron_reading import Reading
from .shell_sourced import next_to

USUAL_SPLIT = "969,30,1"
"""Megatron's own, where the data have none."""
_FILE, _FILE_OF_SPLITS = "--data-args-path", "--per-split-data-args-path"


def read_data(reading: Reading) -> None:
    """Fills the keys of data, as far as the command names them."""
    reading.say("--test-data-path", "no-effect", "training reads no test data")
    if reading.is_written(_FILE_OF_SPLITS):
        _read_file_of_splits(reading)
        return
    flag = next((each for each in ("--data-path", _FILE) if reading.is_written(each)), "--train-data-path")
    words = _words_of_file(reading) if flag == _FILE else _words_of(reading, flag)
    if (data := _blend(reading, flag, words)) is None:
        return
    reading.put("train.data", data, flag)
    if flag == "--train-data-path":
        held_out = "--valid-data-path"
        if (data := _blend(reading, held_out, _words_of(reading, held_out))) is not None:
            reading.put("train.validation_data", data, held_out)
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


def _words_of(reading: Reading, flag: str) -> list[str]:
    """The values of a flag; none where it is not given, or not known."""
    if not reading.is_written(flag):
        return []
    each = reading.last[flag]
    if each.unknown or not each.values:
        reading.say(flag, "no-effect", "which data it names is not known here, and a step has as many tokens")
        return []
    return list(each.values)


def _words_of_file(reading: Reading) -> list[str]:
    """What the file has whose words are the values of `--data-path`."""
    text = _text_of_file(reading, _FILE)
    if text is not None and not text.split():
        reading.say(_FILE, "refused", "the file has no words", "train.data")
    return [] if text is None else text.split()


def _read_file_of_splits(reading: Reading) -> None:
    """A JSON object of lists: train, valid and test."""
    flag = _FILE_OF_SPLITS
    if (text := _text_of_file(reading, flag)) is None:
        return
    try:
        lists = parse_json(text, flag)
    except FileError:
        lists = None
    words = {} if not isinstance(lists, dict) else {name: lists.get(name) or [] for name in ("train", "valid")}
    if not words or not all(isinstance(each, list) for each in words.values()):
        reading.say(flag, "refused", 'it is no JSON object such as {"train": ["0.3", "a", "0.7", "b"]}', "train.data")
        return
    for name, key in (("train", "train.data"), ("valid", "train.validation_data")):
        if (data := _blend(reading, flag, list(map(str, words[name])))) is not None:
            reading.put(key, data, flag)


def _text_of_file(reading: Reading, flag: str) -> str | None:
    """The text of the file that a flag names; None, with the reason, for one that is not at hand."""
    if not (named := _words_of(reading, flag)):
        return None
    try:
        file = next_to(Path(reading.source).parent, Path(named[0]))
        if file is not None and file.is_file():
            return read_text(file)
    except (OSError, ValueError, FileError):
        pass
    reading.say(flag, "no-effect", "no such text lies next to the script, and a step has as many tokens")
    return None


def _blend(reading: Reading, flag: str, words: Sequence[str]) -> str | None:
    """What words name, as a plan has it; None where that is nothing, or not modelled."""
    if len(words) < 2:
        return words[0] if words else None
    text = " ".join(map(shlex.quote, words))
    if len(named_data(text)) * 2 == len(words):
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
