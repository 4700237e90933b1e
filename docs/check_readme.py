"""Runs the commands of README's `console` blocks anew in a terminal of 80 columns, and prints
where README says otherwise.

Usage: python docs/check_readme.py [--all] [--write]. Exit code 1 when something differs. Cheap are all commands but
those of which a word is in `SLOW`: they start processes and need torch, and run with --all. A line `...` in a block
stands for any lines, and times that a command took itself (`in 1.93 s`) are not compared. --write puts what was printed
into the blocks without `...`.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
WIDTH = 80
SLOW = frozenset({"demo", "train", "calibrate", "--dynamic", "--mutations"})

_BLOCK = re.compile(r"^```console\n\$ ((?:.*\\\n)*.*)\n((?:.*\n)*?)```$", re.MULTILINE)
_ELAPSED = re.compile(r"\bin [\d.]+ m?s\b")


@dataclass(frozen=True)
class Block:
    """A command as README writes it, with a backslash where it goes on on the next line, and what
    README says that it prints."""

    written: str
    shown: str

    @property
    def command(self) -> str:
        """The command on one line."""
        return " ".join(self.written.replace("\\\n", " ").split())

    @property
    def is_cheap(self) -> bool:
        """True for a command that starts no processes."""
        return not SLOW & set(shlex.split(self.command))

    @property
    def is_whole(self) -> bool:
        """True when nothing of the output is left out."""
        return "...\n" not in [line.lstrip() for line in self.shown.splitlines(keepends=True)]

    def matches(self, printed: str) -> bool:
        """Whether the command printed what README says."""
        lines = (
            "(?:.*\n)*?" if line.strip() == "..." else _ELAPSED.sub("in TIME", re.escape(_ELAPSED.sub("in TIME", line)))
            for line in self.shown.splitlines(keepends=True)
        )
        return re.fullmatch("".join(lines), _ELAPSED.sub("in TIME", printed)) is not None


def blocks(text: str) -> list[Block]:
    """The `console` blocks of a page."""
    return [Block(*found) for found in _BLOCK.findall(text)]


def printed_by(command: str) -> str:
    """What a command prints on standard output in a terminal of `WIDTH` columns."""
    program, *arguments = shlex.split(command)
    assert program == "shardproof", command
    environment = {**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    call = [sys.executable, "-m", "shardproof", *arguments]
    return subprocess.run(
        call, cwd=README.parent, env=environment, stdout=subprocess.PIPE, text=True, check=False
    ).stdout


def main(options: list[str]) -> int:
    """1 when a command printed something else than README says."""
    text, differing = README.read_text(), 0
    for block in blocks(text):
        if not (block.is_cheap or "--all" in options):
            print(f"not run, --all does: {block.command}")
            continue
        printed = printed_by(block.command)
        if block.matches(printed):
            print(f"as README says: {block.command}")
        elif "--write" in options and block.is_whole:
            README.write_text(
                README.read_text().replace(f"{block.written}\n{block.shown}```", f"{block.written}\n{printed}```")
            )
            print(f"written anew: {block.command}")
        else:
            differing += 1
            print(f"OTHERWISE: {block.command}")
            shown, now = (each.splitlines(keepends=True) for each in (block.shown, printed))
            print("".join(difflib.unified_diff(shown, now, "README", "printed", n=0)))
    return min(differing, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
