"""The text that `[train] data` names, as documents of bytes. No torch: it is looked at before
ranks are started, too."""

from __future__ import annotations

import pydoc_data.topics
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from ...core.base.errors import PlanError
from ...core.plan.data_names import STDLIB
from ..base.url_cache import USUAL_CACHE, UrlCache, asked_for
from ..base.urls import Place, UrlPath, place_of

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


def documents_of(data: str, cache: UrlCache = USUAL_CACHE) -> list[bytes]:
    """The documents of `python-stdlib`, of a text file (one), or of a folder of files (read recursively, by name). What
    lies at a URL is fetched to `cache`.

    Raises `PlanError` when there is no such file or nothing in it.
    """
    found = _stdlib_documents() if data == STDLIB else _documents(place_of(data), cache)
    if not any(found):
        raise PlanError(
            f"train.data={data!r} holds no text: {len(found)} files, 0 bytes. Use a text file, or {STDLIB!r}."
        )
    return found


def _documents(path: Place, cache: UrlCache) -> list[bytes]:
    """The text of a file, or of all files under a folder in the order of their names; hidden ones are left out."""
    if isinstance(path, UrlPath):
        with asked_for(path):
            return _read(path, [path] if path.is_file() else _below(path), cache)
    if path.is_dir():
        names = (
            name for name in path.rglob("*") if not any(part.startswith(".") for part in name.relative_to(path).parts)
        )
        files: Sequence[Path] = sorted(
            (name for name in names if name.is_file()), key=lambda name: name.relative_to(path).as_posix()
        )
    elif path.is_file():
        files = (path,)
    else:
        raise PlanError(f"train.data={str(path)!r} is no file and no folder (looked in {Path.cwd()}). {_meant(path)}")
    return _read(path, files, cache)


def _meant(path: Path) -> str:
    """What to do about a name of nothing."""
    if path.with_name(f"{path.name}.bin").is_file():
        return (
            f"{path.name}.bin is there and {path.name}.idx is not: copy it too, or where it never had one name "
            f"{path.name}.bin."
        )
    if path.with_name(f"{path.name}.idx").is_file():
        return f"{path.name}.idx is there and {path.name}.bin is not: copy it too."
    blend = ", or pairs of a weight and a name such as '0.3 news 0.7 books'" if " " in path.name else ""
    return f"Use a text file, or {STDLIB!r}{blend}."


def _below(folder: UrlPath) -> list[UrlPath]:
    """The objects below a URL in the order of their names; hidden ones are left out."""
    below = {each.url[len(folder.url) + 1 :]: each for each in folder.files()}
    if not below:
        raise PlanError(f"train.data={str(folder)!r} is no object and there is none below. Use the URL of a text.")
    return [each for name, each in sorted(below.items()) if not any(part.startswith(".") for part in name.split("/"))]


def _read(path: Place, files: Sequence[Place], cache: UrlCache) -> list[bytes]:
    if pair := next((file for file in files if file.suffix == ".idx" and file.with_suffix(".bin").is_file()), None):
        raise PlanError(
            f"train.data={str(path)!r} holds the token file {pair.name}, which is no text. Name token files, "
            f"such as {str(pair.with_suffix(''))!r}; several with weights: '1 a 1 b'."
        )
    try:
        return [cache.local(file).read_bytes() for file in files]
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
