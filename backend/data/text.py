"""The text that `[train] data` names, as documents of bytes. No torch: it is looked at before
ranks are started, too."""

from __future__ import annotations

import pydoc_data.topics
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from ...core.base.errors import PlanError
from ...core.plan.data_names import STDLIB

VOCABULARY_SIZE = 256
"""Tokens are bytes."""

_NAMES = """
argparse ast asyncio/base_events asyncio/events asyncio/streams asyncio/tasks base64 bdb calendar cmd code codecs
configparser contextlib copy csv dataclasses difflib doctest enum fileinput fractions ftplib functools getopt gettext
gzip heapq hmac imaplib inspect ipaddress json/decoder json/encoder locale logging/__init__ mailbox mimetypes netrc
optparse os pdb pickle pickletools platform plistlib poplib pprint profile pstats pydoc quopri random sched selectors
shelve shlex shutil smtplib socket socketserver ssl statistics subprocess tarfile tempfile textwrap threading timeit
tokenize trace traceback tracemalloc types unittest/case unittest/mock urllib/parse urllib/request uuid warnings wave
weakref webbrowser zipapp
"""
STDLIB_SOURCES = tuple(_NAMES.split())
"""Sources that are training text: files of the standard library in every CPython since 3.11, none of them
written at build time."""


def documents_of(data: str) -> list[bytes]:
    """The documents of `python-stdlib`, of a text file (one), or of a folder of files (read recursively, by name).

    Raises `PlanError` when there is no such file or nothing in it.
    """
    found = _stdlib_documents() if data == STDLIB else _documents(Path(data))
    if not any(found):
        raise PlanError(
            f"train.data={data!r} holds no text: {len(found)} files, 0 bytes. Use a text file, or {STDLIB!r}."
        )
    return found


def _documents(path: Path) -> list[bytes]:
    """The text of a file, or of all files under a folder in the order of their names; hidden ones are left out."""
    if path.is_dir():
        names = (
            name for name in path.rglob("*") if not any(part.startswith(".") for part in name.relative_to(path).parts)
        )
        files: Iterable[Path] = sorted(
            (name for name in names if name.is_file()), key=lambda name: name.relative_to(path).as_posix()
        )
    elif path.is_file():
        files = (path,)
    else:
        raise PlanError(
            f"train.data={str(path)!r} is no file and no folder (looked in {Path.cwd()}). Use a text "
            f"file, or {STDLIB!r}."
        )
    if pair := next((file for file in files if file.suffix == ".idx" and file.with_suffix(".bin").is_file()), None):
        raise PlanError(
            f"train.data={str(path)!r} holds the token file {pair.name}, which is no text. Name token files, "
            f"such as {str(pair.with_suffix(''))!r}; several with weights: '1 a 1 b'."
        )
    try:
        return [file.read_bytes() for file in files]
    except OSError as error:
        raise PlanError(f"train.data={str(path)!r} cannot be read: {error.strerror} ({error.filename}).") from error


def _stdlib_documents() -> list[bytes]:
    """Python's reference text and the sources of `STDLIB_SOURCES`, in a fixed order. Raises `PlanError` where
    sources are not installed."""
    topics = pydoc_data.topics.topics
    documents = [f"{name}\n\n{topics[name]}".encode() for name in sorted(topics)]
    folder = Path(sysconfig.get_path("stdlib"))
    try:
        return documents + [(folder / f"{name}.py").read_bytes() for name in STDLIB_SOURCES]
    except OSError as error:
        raise PlanError(
            f"train.data={STDLIB!r} needs the standard library's sources: {error}. Use a text file instead."
        ) from error
