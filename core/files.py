"""Files written whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from .errors import PlanError


def write_bytes(path: str | Path, content: bytes) -> None:
    """Writes a file atomically: a temporary file beside it is renamed over it, so nobody sees half of it."""
    target = Path(path)
    if target.is_dir():  # else the renaming fails at the end, with the temporary name in its message
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error  # the user knows this name and not the temporary one
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)  # mkstemp makes files that only their owner reads
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """`write_bytes` of UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, without the mark that some editors put first. Raises `PlanError` for a file that is no text."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: this is not a text file: {error}.") from error
