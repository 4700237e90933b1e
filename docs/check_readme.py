"""Runs the commands of the `console` blocks of README and of the cookbook anew in a terminal of 80 columns, and prints
where a page says otherwise.

Usage: python docs/check_readme.py [--all] [--write] [PAGE ...]. Exit code 1 when something differs. Cheap are all
commands but those of which a word is in `SLOW`: they start processes and need torch, need what such a command left, or
are searches that take long, and run with --all. A line `...` in a block stands for any lines, and times that a command
took itself (`in 1.93 s`) are not compared. --write puts what was printed into the blocks without `...`.

The commands of a page run one after the other in a folder of their own, from which the repository's `examples` are
seen. What they write there as plan.toml and step.svg is compared with the page's own plan and picture, the files of
its name that lie with it, and with --write takes their place. Where not all commands of a page are run, they have its
own plan.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "cookbook").glob("*.md")))
WIDTH = 80
SLOW = frozenset(
    {"demo", "train", "train-metrics.jsonl", "calibrate", "--dynamic", "--mutations"}
    | {"qwen3-235b-a22b", "deepseek-v3", "16384"}
)

MADE = {"plan.toml": ".toml", "step.svg": ".svg"}
"""What the commands of a page make -> the suffix of the page's own file that has it."""

_BLOCK = re.compile(r"^```console\n\$ ((?:.*\\\n)*.*)\n((?:.*\n)*?)```$", re.MULTILINE)
_ELAPSED = re.compile(r"\bin [\d.]+ m?s\b")


@dataclass(frozen=True)
class Block:
    """A command as a page writes it, with a backslash where it goes on on the next line, and what
    the page says that it prints."""

    written: str
    shown: str

    @property
    def command(self) -> str:
        """The command on one line."""
        return " ".join(self.written.replace("\\\n", " ").split())

    @property
    def is_cheap(self) -> bool:
        """True for a command that starts no processes and takes seconds."""
        return not SLOW & set(shlex.split(self.command))

    @property
    def is_whole(self) -> bool:
        """True when nothing of the output is left out."""
        return "...\n" not in [line.lstrip() for line in self.shown.splitlines(keepends=True)]

    def matches(self, printed: str) -> bool:
        """Whether the command printed what the page says."""
        lines = (
            "(?:.*\n)*?" if line.strip() == "..." else _ELAPSED.sub("in TIME", re.escape(_ELAPSED.sub("in TIME", line)))
            for line in self.shown.splitlines(keepends=True)
        )
        return re.fullmatch("".join(lines), _ELAPSED.sub("in TIME", printed)) is not None


def blocks(text: str) -> list[Block]:
    """The `console` blocks of a page."""
    return [Block(*found) for found in _BLOCK.findall(text)]


def printed_by(command: str, folder: Path) -> str:
    """What a command that runs in a folder prints on standard output in a terminal of `WIDTH` columns."""
    program, *arguments = shlex.split(command)
    assert program == "shardproof", command
    environment = {**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    call = [sys.executable, "-m", "shardproof", *arguments]
    return subprocess.run(call, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False).stdout


def run_page(page: Path, folder: Path, *, everything: bool, write: bool = False) -> list[str]:
    """Runs a page's commands in an empty folder; what is otherwise than the page says, in words."""
    (folder / "examples").symlink_to(ROOT / "examples")
    text, otherwise = page.read_text(), []
    own = {folder / made: page.with_suffix(suffix) for made, suffix in MADE.items()}
    for made, mine in own.items():
        if mine.exists() and made.suffix == ".toml":
            shutil.copy(mine, made)
    for block in blocks(text):
        if not (block.is_cheap or everything):
            print(f"not run, --all does: {block.command}")
            continue
        printed = printed_by(block.command, folder)
        if block.matches(printed):
            print(f"as {page.name} says: {block.command}")
        elif write and block.is_whole:
            page.write_text(
                page.read_text().replace(f"{block.written}\n{block.shown}```", f"{block.written}\n{printed}```")
            )
            print(f"written anew: {block.command}")
        else:
            shown, now = (each.splitlines(keepends=True) for each in (block.shown, printed))
            otherwise.append(
                block.command + "\n" + "".join(difflib.unified_diff(shown, now, page.name, "printed", n=0))
            )
    for made, mine in own.items():
        if made.exists() and write:
            shutil.copy(made, mine)
        elif made.exists() and made.read_bytes() != mine.read_bytes():
            otherwise.append(f"{mine.name} is not what the commands write as {made.name}")
    return otherwise


def main(options: list[str]) -> int:
    """1 when a command printed something else than its page says."""
    named = [Path(each).resolve() for each in options if not each.startswith("-")]
    differing = 0
    for page in named or PAGES:
        with tempfile.TemporaryDirectory() as folder:
            found = run_page(page, Path(folder), everything="--all" in options, write="--write" in options)
        differing += len(found)
        print("".join(f"OTHERWISE: {each}\n" for each in found), end="")
    return min(differing, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
