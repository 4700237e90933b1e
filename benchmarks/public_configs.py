"""Public configurations of other frameworks, each to a verdict: `python benchmarks/public_configs.py FOLDER`.

FOLDER has one folder for each repository, named `owner+name`, with the files at their paths and a file COMMIT. The
texts are not ours to keep: the table, tests/core/imports/public_megatron.tsv, has repository, commit, path, hash and
verdict, and this reproduces it. Nothing of a file is executed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardproof.core.base.errors import ShardproofError
from shardproof.core.imports.account import Imported, Request
from shardproof.core.imports.given import import_file
from shardproof.core.imports.readers import READERS
from shardproof.core.plan.plan import any_plan

DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""What a file that leaves its devices open is read with: the fewest with which its plan holds."""

LONGEST_REASON = 160

COLUMNS = ("repository", "commit", "path", "sha256", "devices", "flags", "unaccounted", "seconds", "verdict", "reason")


@dataclass(frozen=True)
class Row:
    """One file's verdict: `plan`, or `refused` with the reason. `devices` is what --devices said, 0 for nothing."""

    repository: str
    commit: str
    path: str
    sha256: str
    devices: int
    flags: int
    unaccounted: int
    seconds: float  # of one reading
    verdict: str
    reason: str

    def line(self, *, seconds: bool) -> str:
        """The row of the table; times differ from run to run and are left out of a table that is kept."""
        shown = [getattr(self, name) for name in COLUMNS if seconds or name != "seconds"]
        return "\t".join(str(value) for value in shown)


def rows(folder: Path, format: str, suffixes: Sequence[str] = ()) -> Iterator[Row]:
    """The verdict of every text of a format below a folder, each once, in the order of their paths."""
    reader, seen = next(each for each in READERS if each.name == format), set()
    for commit_file in sorted(folder.glob("*/COMMIT")):
        for path in sorted(commit_file.parent.rglob("*")):
            if not path.is_file() or path == commit_file or (suffixes and path.suffix not in suffixes):
                continue
            content = path.read_bytes()
            if content in seen:  # forks keep what they were made of
                continue
            seen.add(content)
            text = content.decode("utf-8", errors="replace")
            name = str(path.relative_to(commit_file.parent))
            if reader.recognises(Request(text, name)):
                commit = commit_file.read_text().strip()
                yield verdict(commit_file.parent.name.replace("+", "/"), commit, name, content, text, format)


def verdict(repository: str, commit: str, path: str, content: bytes, text: str, format: str) -> Row:
    """What becomes of one file, without --devices where it says how many there are."""
    found, devices, reason, seconds = None, 0, "", 0.0
    for devices in (0, *DEVICES):
        start = time.perf_counter()
        try:
            found = import_file(Request(text, path, devices or None), format)
            assert found is not None
            reason = _reason(found)
            if not reason:
                any_plan(found.values, path)
        except ShardproofError as error:
            reason = str(error.problems[0]) if hasattr(error, "problems") else str(error)
        seconds = time.perf_counter() - start
        if not reason or not ("devices" in reason or "dp" in reason):
            break
    flags = len(found.settings) if found is not None else 0
    strange = (
        sum(each.status not in ("mapped", "no-effect", "not-modelled", "refused") for each in found.settings)
        if found
        else 0
    )
    return Row(
        repository,
        commit,
        path,
        hashlib.sha256(content).hexdigest(),
        devices,
        flags,
        strange,
        seconds,
        "refused" if reason else "plan",
        " ".join(reason.split())[:LONGEST_REASON],
    )


def _reason(found: Imported) -> str:
    """Why there is no plan: what is refused besides the number of devices, which is asked for."""
    refused = [each for each in found.of_status("refused") if each.key != "cluster.num_devices"]
    devices = [each for each in found.of_status("refused") if each.key == "cluster.num_devices"]
    if refused:
        return "; ".join(f"{each.flag} {each.value}: {each.why}" for each in refused[:3])
    return "; ".join(f"{each.flag}: {each.why}" for each in devices)


def main() -> int:
    """Prints the table, and on standard error what it comes to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", default="megatron")
    parser.add_argument("--suffixes", nargs="*", default=[], help="only files with these, such as .sh")
    parser.add_argument("--seconds", action="store_true", help="with the time that each took")
    args = parser.parse_args()
    found = list(rows(args.folder, args.format, args.suffixes))
    print("\t".join(name for name in COLUMNS if args.seconds or name != "seconds"))
    for row in found:
        print(row.line(seconds=args.seconds))
    verdicts = Counter(row.verdict for row in found)
    slowest = max((row.seconds for row in found), default=0.0)
    print(
        f"{len(found)} files: {dict(verdicts)}, {sum(row.flags for row in found):,} flags, "
        f"{sum(row.unaccounted for row in found)} unaccounted for, slowest {slowest:.2f} s",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
