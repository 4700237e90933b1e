"""Whether a checkpoint is as it was saved: its index, its files, and the tensors in them. Needs no torch,
and makes no tensors."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from typing import Any

from ...core.base.errors import named
from ..base.urls import Place
from ..dcp.files import Reader, digest_of, digest_of_file, exists, length_of, opened, read_small
from ..dcp.index import INDEX_FILE, MAX_INDEX_BYTES, Contents, DamagedError
from ..dcp.older import METADATA_FILE, contents_without_index

STATE_FILE = "state.json"
"""What is known of a checkpoint without reading tensors: `steps` done, `samples` read, the `text` they come
from, and the `problem`."""

STATE_FORMAT = 2
"""`format` of a `STATE_FILE` that has an index next to it; those before have none."""

MAX_STATE_BYTES = 1 << 24


def steps_of(path: Place) -> int:
    """After how many steps a checkpoint was saved, by its folder's name; 0 for a folder of tensors that has another."""
    match = re.fullmatch(r"step-(\d{1,18})", path.name)
    return int(match[1]) if match else 0


def has_index(path: Place) -> bool:
    """Whether a checkpoint has an index, or should: those of earlier versions have not. Raises `DamagedError`
    where that cannot be read."""
    if exists(path / INDEX_FILE):
        return True
    return exists(path / STATE_FILE) and read_state(path).get("format") is not None


def read_state(path: Place) -> dict[str, Any]:
    """What `STATE_FILE` says. Raises `DamagedError` when it cannot be read, or when the folder has
    another checkpoint's name."""
    file, steps = path / STATE_FILE, steps_of(path)
    try:
        state = json.loads(read_small(file, MAX_STATE_BYTES))
        if (
            not isinstance(state, dict)
            or not isinstance(state.get("problem", {}), dict)
            or type(state["steps"]) is not int
        ):
            raise ValueError("it has no steps, or no problem")
        if not all(isinstance(section, dict) for section in state.get("problem", {}).values()):
            raise ValueError("its problem has no sections")
        if not isinstance(state.get("text") or {}, dict):
            raise ValueError("its text is none")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{file} cannot be read ({error}).") from error
    if state["steps"] != steps:
        raise DamagedError(
            f"{path} is a checkpoint after {state['steps']} steps by its {STATE_FILE}. Give it its own name back."
        )
    return state


def contents_of(path: Place) -> Contents:
    """What a checkpoint holds, by its index, or without digests where it is of an earlier version. Raises
    `DamagedError` where the index is damaged, or that of another checkpoint."""
    file, steps = path / INDEX_FILE, steps_of(path)
    if not has_index(path):
        return contents_without_index(path, steps)
    try:
        contents = Contents.from_bytes(read_small(file, MAX_INDEX_BYTES))
    except DamagedError as error:
        raise DamagedError(f"{file} {error}.") from error
    except OSError as error:
        raise DamagedError(f"{file} cannot be read: {_words(error)}.") from error
    if contents.steps != steps:
        raise DamagedError(
            f"{path} is a checkpoint after {contents.steps} steps by its {INDEX_FILE}. Give it its own name back."
        )
    return contents


def quick_damages(path: Place) -> list[str]:
    """What is wrong with a checkpoint as far as can be seen without reading its tensors: its small files
    and the lengths of all."""
    try:
        contents = contents_of(path) if has_index(path) else None
        read_state(path)
    except DamagedError as error:
        return list(error.problems)
    if contents is None:
        return []
    found: list[str] = []
    for name, file in contents.files.items():
        try:
            is_whole = length_of(path / name) == file.num_bytes
        except OSError:
            is_whole = False
        if not is_whole or name in (STATE_FILE, METADATA_FILE):
            found += _damages_of(path, contents, name)
    return found


def damages(path: Place, contents: Contents, share: int, num_shares: int) -> list[str]:
    """What is wrong with the files of a checkpoint, of which one in `num_shares` is looked at, from the `share`-th
    on: each is read once. Files that differ are reported with the tensors that have changed in them. Nothing for a
    checkpoint without digests."""
    names = sorted(contents.files, key=lambda name: (-contents.files[name].num_bytes, name))
    return [problem for name in names[share::num_shares] for problem in _damages_of(path, contents, name)]


def _damages_of(path: Place, contents: Contents, name: str) -> Iterator[str]:
    """What is wrong with one file."""
    file, expected = path / name, contents.files[name]
    try:
        num_bytes, found = digest_of_file(file)
    except OSError as error:
        yield f"{file} cannot be read: {_words(error)}; {_tensors_in(contents, name)}."
        return
    if num_bytes == expected.num_bytes and found == expected.digest:
        return
    is_as_long, changed = num_bytes == expected.num_bytes, _changed(file, contents, name)
    what = "other bytes than were saved" if is_as_long else f"{num_bytes} bytes instead of {expected.num_bytes}"
    yield f"{file} has {what}; {_tensors(changed) if changed else 'no tensor has changed'}."


def _changed(file: Place, contents: Contents, name: str) -> list[str]:
    """The tensors whose values in a file are others than were saved."""
    changed = []
    try:
        with opened(file) as reader:
            for tensor, saved in contents.tensors.items():
                for block in saved.blocks:
                    if block.file == name and not _is_whole(reader, block.first, block.num_bytes, block.digest):
                        changed.append(tensor)
                        break
    except OSError:
        return [
            tensor for tensor, saved in contents.tensors.items() if any(block.file == name for block in saved.blocks)
        ]
    return changed


def _is_whole(reader: Reader, first: int, num_bytes: int, digest: str | None) -> bool:
    try:
        return digest_of(reader.read(first, num_bytes)) == digest
    except OSError:
        return False


def _tensors_in(contents: Contents, name: str) -> str:
    held = [tensor for tensor, saved in contents.tensors.items() if any(block.file == name for block in saved.blocks)]
    return f"it had {_tensors(held)}" if held else "it had no tensor"


def _tensors(names: list[str]) -> str:
    return f"tensor{'s' * (len(names) > 1)} {named(names)}"


def _words(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "it is a link, and a checkpoint's files are its own"
    return error.strerror or str(error)
