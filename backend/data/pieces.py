"""Input files as documents: which files there are, where they are cut into pieces that are tokenized one by one, and
the documents of a piece. Cuts depend on the files alone, so that what is written does not depend on the number of
processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ...core.base.bounds import shown
from ...core.base.errors import FileError
from ...core.base.parsing import parse_json

PIECE_BYTES = 4 * 2**20
"""Text of a piece: some seconds of a slow tokenizer's work, and a hundred times what handing it over takes."""

JSONL_SUFFIXES = (".jsonl", ".ndjson")

Cut = Literal["file", "blank lines", "jsonl"]


@dataclass(frozen=True)
class Piece:
    """Bytes `lo <= i < hi` of a file: whole documents, which are the file, end in blank lines, or are lines of JSON."""

    path: Path
    lo: int
    hi: int
    cut: Cut


def input_files(names: Sequence[str]) -> list[Path]:
    """The files that are named, and those in named folders (in the order of their names, hidden ones left out). Raises
    `FileError` for a name of nothing, and where there is no file."""
    found: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = (each for each in path.rglob("*") if each.is_file())
            shown = [each for each in inside if not any(part[0] == "." for part in each.relative_to(path).parts)]
            found += sorted(shown, key=lambda each: each.relative_to(path).as_posix())
        elif path.is_file():
            found.append(path)
        else:
            raise FileError(f"{name} is no file and no folder (looked in {Path.cwd()}). Give text or JSONL files.")
    if not found:
        raise FileError(f"there is no file in {', '.join(names)}. Give text or JSONL files, or folders of them.")
    return found


def units(files: Sequence[Path], *, blank_lines: bool) -> Iterator[tuple[Piece, ...]]:
    """The pieces of all files in order, small ones put together to `PIECE_BYTES` or a little more."""
    unit: list[Piece] = []
    size = 0
    for path in files:
        for piece in _pieces(path, blank_lines):
            unit.append(piece)
            size += piece.hi - piece.lo
            if size >= PIECE_BYTES:
                yield tuple(unit)
                unit, size = [], 0
    if unit:
        yield tuple(unit)


def documents(piece: Piece, key: str) -> Iterator[bytes]:
    """The documents of a piece, as bytes; of JSONL, what is under `key`. Raises `FileError` for a line that is no such
    object, with the byte at which it begins."""
    with piece.path.open("rb") as file:
        file.seek(piece.lo)
        content = file.read(piece.hi - piece.lo)
    if piece.cut == "file":
        yield content
    elif piece.cut == "blank lines":
        yield from _between_blank_lines(content)
    else:
        at = piece.lo
        for line in content.split(b"\n"):
            if line.strip():
                yield _under(key, line, f"{piece.path}: the line that begins at byte {at}")
            at += len(line) + 1


def _pieces(path: Path, blank_lines: bool) -> Iterator[Piece]:
    """The pieces of one file, cut after lines or blank lines."""
    size = path.stat().st_size
    cut: Cut = "jsonl" if path.suffix in JSONL_SUFFIXES else "blank lines" if blank_lines else "file"
    if cut == "file":
        yield Piece(path, 0, size, cut)
        return
    lo = 0
    with path.open("rb") as file:
        while lo < size:
            hi = _next_cut(file, lo + PIECE_BYTES, size, cut)
            yield Piece(path, lo, hi, cut)
            lo = hi


def _next_cut(file: BinaryIO, at: int, size: int, cut: Cut) -> int:
    """The first byte from `at` on before which a document has ended; `size` where there is none."""
    if at >= size:
        return size
    file.seek(at - 1)
    file.readline()  # the rest of a line, of which nobody knows whether it is blank
    if cut == "blank lines":
        while (line := file.readline()) and line.strip():
            pass
    return file.tell()


def _between_blank_lines(content: bytes) -> Iterator[bytes]:
    lines: list[bytes] = []
    for line in content.splitlines(keepends=True):
        if line.strip():
            lines.append(line)
        elif lines:
            yield b"".join(lines)
            lines = []
    if lines:
        yield b"".join(lines)


def _under(key: str, line: bytes, where: str) -> bytes:
    try:
        text = line.decode("utf-8-sig")  # without the mark that some editors put first
    except UnicodeDecodeError as error:
        raise FileError(f"{where} is no text in UTF-8: {error.reason}. Convert the file first.") from None
    value = parse_json(text, where)
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, str):
        raise FileError(
            f"{where} has no text under {key!r}: it {_holds(value, key)}. Use --key, or leave the line out."
        )
    return found.encode()


def _holds(value: Any, key: str) -> str:
    """What a line of JSON has in place of a text, for people."""
    if not isinstance(value, dict):
        return "is no object"
    if key in value:
        return f"has {shown(value[key])} there"
    return f"has the keys {', '.join(map(repr, list(value)[:8]))}"
