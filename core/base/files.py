"""The door for files that a user or another program gives: read within limits, written whole or not at all.

Only regular files are read: a FIFO or a device may have no end, or never begin. What is in a file is never executed.
`parsing` turns texts into values.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from .errors import FileError
from .names import is_plain
from .units import format_bytes

DOCUMENT_BYTES = 2 * 2**20
"""Of a plan, cluster file, `config.json` or table of facts. The longest here, a calibrated cluster, has some 100 KB;
TOML is read at about 1 MB/s (tomllib, July 2026), so that more than this would keep a user waiting for an error."""

TABLE_BYTES = 128 * 2**20
"""Of a schedule or a timeline: a million spans take about 70 MB."""

LINE_BYTES = 2**20
"""Of one line of a file that is read line by line: a tensor of a ledger, a published row."""

LINES_BYTES = 16 * 2**30
"""Of a file that is read line by line, and so is never in memory as a whole."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def read_bytes(path: str | Path, *, most_bytes: int = DOCUMENT_BYTES) -> bytes:
    """The content of a regular file. Raises `FileError` for one that is no such file or has more than `most_bytes`;
    `OSError` where it cannot be opened."""
    with _opened(path, most_bytes) as file:
        try:
            content = file.read(most_bytes + 1)
        except OSError as error:  # its own has no name
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    if len(content) > most_bytes:  # it has grown, or does not say how long it is, as files in /proc
        raise _too_long(path, f"more than {format_bytes(most_bytes)}", most_bytes)
    return content


def read_text(path: str | Path, *, most_bytes: int = DOCUMENT_BYTES) -> str:
    """The text of a UTF-8 file, without the mark that some editors put first, every line ending in a newline alone.
    Raises as `read_bytes` does, and `FileError` for a file that is no text."""
    return _as_text(path, read_bytes(path, most_bytes=most_bytes))


def read_packed(path: str | Path, *, most_bytes: int = TABLE_BYTES) -> str:
    """The text of a UTF-8 file that may be compressed with gzip; `most_bytes` holds before and after.
    Raises as `read_text` does."""
    content = read_bytes(path, most_bytes=most_bytes)
    return _as_text(path, _unpacked(path, content, most_bytes) if content[:2] == b"\x1f\x8b" else content)


def read_lines(path: str | Path) -> Iterator[str]:
    """The lines of a UTF-8 file with their newlines, one after another: the last may lack it. Raises as `read_text`
    does, and `FileError` for a line of more than `LINE_BYTES`."""
    with _opened(path, LINES_BYTES) as file:
        while line := file.readline(LINE_BYTES + 1):
            if len(line) > LINE_BYTES:
                raise FileError(
                    f"{path}: a line has more than {format_bytes(LINE_BYTES)}, so this is no file of "
                    "lines. Give another."
                )
            yield _as_text(path, line)


def _check_name(path: str | Path) -> None:
    """Raises `FileError` for no name, as an empty variable of a shell leaves it, and for one with control characters,
    which would end the line of a message that has it. Bytes that are no UTF-8 may be in names."""
    if not os.fspath(path):
        raise FileError("the name of a file is empty. Give one; in a script, look whether the variable is set.")
    if not is_plain(os.fspath(path).encode("utf-8", "replace").decode()):
        raise FileError(
            f"{os.fspath(path)!r} is no name of a file. Give one without control characters such as line breaks."
        )


def check_place(path: str | Path) -> None:
    """Raises `OSError` where a file of this name cannot be written, `FileError` for a name that is none. Verbs that
    work long ask before they start. Nothing is made."""
    _check_name(path)
    if _own_handle(Path(path)) is not None:
        return
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "this is a folder. Name a file", str(path))
    if not target.parent.is_dir():
        folder = f"there is no folder {target.parent if Path(path).is_symlink() else Path(path).parent}"
        raise FileNotFoundError(errno.ENOENT, f"{folder}. Make it, or write elsewhere", str(path))
    is_replaced = not target.exists() or target.is_file()
    if not os.access(target.parent if is_replaced else target, os.W_OK):
        raise PermissionError(
            errno.EACCES, "this cannot be written: its folder is read-only, or another user's", str(path)
        )


def write_bytes(path: str | Path, content: bytes) -> None:
    """Writes a file. Nobody sees half of a regular one: a temporary file next to it is renamed over it, with the
    permissions it had. Links are followed; devices and pipes stay what they are and are written to."""
    _check_name(path)
    named = Path(path)
    if (handle := _own_handle(named)) is not None:
        sys.stdout.flush()
        with os.fdopen(os.dup(handle), "wb", buffering=0) as file:
            _write_all(file, content)
        return
    try:
        before = named.stat()
    except FileNotFoundError:
        before = None
    check_place(path)  # else the renaming fails at the end, with the temporary name in its message
    if before is not None and not stat.S_ISREG(before.st_mode):
        with named.open("ab", buffering=0) as file:
            _write_all(file, content)
        return
    _replace(named, content, before)


def write_text(path: str | Path, text: str) -> None:
    """`write_bytes` of UTF-8; halves of characters, as names of files may have them, are written as escapes."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def _opened(path: str | Path, most_bytes: int) -> BinaryIO:
    """A regular file of at most so many bytes, open for reading."""
    _check_name(path)
    if os.fspath(path) == "-" and not Path(path).exists():
        raise FileError("-: standard input is not read. Give the name of a file.")
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for its writer
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise _not_regular(path, "a socket") from error
        raise
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise _not_regular(path, next((name for test, name in _KINDS if test(found.st_mode)), "no file"))
    if found.st_size > most_bytes:
        os.close(handle)
        raise _too_long(path, format_bytes(found.st_size), most_bytes)
    return os.fdopen(handle, "rb")


def _unpacked(path: str | Path, content: bytes, most_bytes: int) -> bytes:
    """The members of a gzip file, one after another, as long as they are not too long together."""
    unpacked, left = bytearray(), content
    while left:
        member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        try:
            unpacked += member.decompress(left, most_bytes + 1 - len(unpacked))
        except zlib.error as error:
            raise FileError(f"{path}: this gzip file is broken: {error}. Write or copy it again.") from error
        if len(unpacked) > most_bytes:
            raise _too_long(path, f"more than {format_bytes(most_bytes)} when unpacked", most_bytes)
        if not member.eof:
            raise FileError(f"{path}: this gzip file ends too early. Write or copy it again.")
        left = member.unused_data.lstrip(b"\0")  # tapes and some copiers fill up with zeros
    return bytes(unpacked)


def _as_text(path: str | Path, content: bytes) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: this is not a text file: {error}.") from error
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _replace(named: Path, content: bytes, before: os.stat_result | None) -> None:
    target = Path(os.path.realpath(named))
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
    except OSError as error:
        # the user knows this name and not the temporary one
        raise OSError(error.errno, error.strerror, str(named)) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        mode = 0o666 & ~umask if before is None else stat.S_IMODE(before.st_mode)
        Path(temporary).chmod(mode)  # mkstemp makes files that only their owner reads
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


_OWN_HANDLE = re.compile(r"/dev/(?:(?P<name>stdout|stderr)|fd/(?P<fd>\d{1,9}))|/proc/self/fd/(?P<number>\d{1,9})")


def _own_handle(path: Path) -> int | None:
    """The number of the open file of this process that a path names. It may be a regular file, which this process would
    go on writing to after it was replaced."""
    found = _OWN_HANDLE.fullmatch(str(path))
    return found and int(found["fd"] or found["number"] or ("stdout", "stderr").index(found["name"]) + 1)


def _write_all(file: FileIO, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def _not_regular(path: str | Path, kind: str) -> FileError:
    return FileError(f"{path}: this is {kind}, and files are read. Give a file, or copy what is to be read into one.")


def _too_long(path: str | Path, length: str, most_bytes: int) -> FileError:
    return FileError(
        f"{path}: this file has {length}, and at most {format_bytes(most_bytes)} are read of its kind. "
        "Give a shorter one."
    )
