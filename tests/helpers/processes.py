"""Programs that are started, watched and ended: their processes are known by a word in their environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

WAIT_S = 90.0
"""Far more than anything here takes."""
MARK = "SHARDPROOF_TEST_MARK"


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Returns when `is_so()`. Raises `TimeoutError` that says `what` was waited for."""
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(what)
        time.sleep(0.01)


@dataclass
class Started:
    """`python -m MODULE ...` in a session and a temporary folder of its own; its errors go to a file."""

    folder: Path
    arguments: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mark, self.temporary = uuid.uuid4().hex, self.folder / "temporary"
        self.temporary.mkdir(parents=True)
        self._errors = self.folder / "errors.txt"
        # a job started in the background (`pytest &`) inherits SIGINT ignored
        start = (
            "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
        )
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", start, sys.executable, "-m", *self.arguments],
                cwd=self.folder,
                env={**os.environ, MARK: self.mark, "TMPDIR": str(self.temporary), **self.environment},
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def errors(self) -> str:
        """What it has written to standard error so far."""
        return self._errors.read_text()

    def wait_for(self, words: str) -> None:
        """Returns when it has said the words on standard error."""
        wait_until(lambda: words in self.errors or self.process.poll() is not None, f"{words!r} in {self.errors}")
        assert words in self.errors, self.errors

    def end(self, number: signal.Signals, *, group: bool = False) -> int:
        """Sends a signal, to the parent alone or as a terminal does; the exit code."""
        (os.killpg if group else os.kill)(self.process.pid, number)
        return self.process.wait(WAIT_S)

    def left(self) -> list[str]:
        """What has outlived it when nothing more is on the way out: processes, then files; not the folder that
        torchrun itself leaves."""

        def files() -> list[str]:
            return [path.name for path in self.temporary.iterdir() if not path.name.startswith("torchelastic_")]

        try:
            wait_until(lambda: not (processes_of(self.mark) or files()), "nothing left")
        except TimeoutError:
            return [*processes_of(self.mark).values(), *files()]
        return []


def processes_of(mark: str) -> dict[int, str]:
    """The command lines of the live processes with a word in their environment."""
    found = {}
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and f"{MARK}={mark}".encode() in (path / "environ").read_bytes():
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # ended meanwhile
            continue
    return found


def listens(pids: Sequence[int]) -> set[str]:
    """The addresses on which processes listen for TCP connections, as /proc/net has them."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(str(link.readlink()))
            except OSError:
                continue
    addresses = set()
    for file, address in (("tcp", _ipv4), ("tcp6", _ipv6)):
        for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                addresses.add(address(words[1].partition(":")[0]))
    return addresses


def _ipv4(hexadecimal: str) -> str:
    return str(IPv4Address(bytes.fromhex(hexadecimal)[::-1]))


def _ipv6(hexadecimal: str) -> str:
    words = bytes.fromhex(hexadecimal)
    return str(IPv6Address(b"".join(words[at : at + 4][::-1] for at in range(0, 16, 4))))
