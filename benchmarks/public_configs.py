"""Other people's configurations in public repositories, each to a verdict: what the committed tables say, found again.

Usage: python benchmarks/public_configs.py --folder DIR --table tests/core/imports/public_torchtitan.tsv [--write]

DIR has the files under OWNER+NAME/COMMIT/PATH, and next to scripts what they take in (`source`). A path may end in
#NAME, the function of a Python file with several configurations. A table's columns are repository, commit, path, sha256
of the file, format, verdict (plan, refused, or unreadable), settings in the file, settings of it that are unaccounted
for, and the first reason. Texts are not kept.

Files leave open what is said on the command line otherwise: the devices, of which the first number of DEVICES that
fits is taken; and where no model is in the format, llama3.1-8b, sequences of 4,096 tokens, eight of them a device.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from shardproof.core.base.errors import ShardproofError
from shardproof.core.base.parsing import parse_json
from shardproof.core.imports.account import Imported, Request
from shardproof.core.imports.readers import reader_of
from shardproof.core.plan.plan import any_plan
from shardproof.core.plan.toml import Given

COLUMNS = ("repository", "commit", "path", "sha256", "format", "verdict", "settings", "unaccounted", "reason")
DEVICES = (None, 64, 512, 2048, 16384, 8, 1, 48, 96)
WITHOUT_MODEL = ("deepspeed", "accelerate")
MODEL = {"preset": Given("llama3.1-8b", "--model")}


def main() -> int:
    """Prints what differs from the table, and how many became what; with --write puts the table right. Exit code 1
    where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    with args.table.open(encoding="utf-8", newline="") as file:
        old = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    new, longest_s = [], 0.0
    for row in old:
        begin_s = perf_counter()
        new.append(judged(args.folder, row["repository"], row["commit"], row["path"]))
        longest_s = max(longest_s, perf_counter() - begin_s)
    changed = [(a, b) for a, b in zip(old, new, strict=True) if dict(a) != b]
    for before, after in changed:
        print(f"{after['repository']} {after['path']}: {before.get('verdict')} -> {after['verdict']} {after['reason']}")
    if args.write:
        with args.table.open("w", encoding="utf-8", newline="") as file:
            file.write("\t".join(COLUMNS) + "\n")
            file.writelines("\t".join(row[name] for name in COLUMNS) + "\n" for row in new)
    count = Counter(row["verdict"] for row in new)
    unaccounted = sum(int(row["unaccounted"]) for row in new)
    print(f"{len(new)} files: {dict(count)}; {unaccounted} settings unaccounted for; at most {longest_s:.2f} s each")
    return 1 if changed and not args.write else 0


def judged(folder: Path, repository: str, commit: str, path: str) -> dict[str, str]:
    """The row of one file."""
    name, _, function = path.partition("#")
    file = folder / repository.replace("/", "+") / commit / name  # scripts take in what lies next to them
    data = file.read_bytes()
    verdict, imported, reason = verdict_of(data.decode("utf-8"), str(file), {"config": function} if function else {})
    written = [each.flag for each in imported.settings if each.line] if imported is not None else []
    leaves = set(_leaves(data.decode("utf-8"), name)) if imported is not None else set()
    return {
        "repository": repository,
        "commit": commit,
        "path": path,
        "sha256": hashlib.sha256(data).hexdigest(),
        "format": imported.format if imported is not None else "",
        "verdict": verdict,
        "settings": str(len(written)),
        "unaccounted": str(len(leaves - set(written))),
        "reason": " ".join(reason.replace(str(file), name).split())[:200],
    }


def verdict_of(text: str, name: str, variables: dict[str, str]) -> tuple[str, Imported | None, str]:
    """`plan`, `refused` or `unreadable`, the account of a file where it has one, and the first reason."""
    first: tuple[str, Imported | None, str] | None = None
    for devices in DEVICES:
        request = Request(text, name, devices, {}, variables)
        reader = reader_of(request)
        if reader is None:
            return "unreadable", None, "no reader recognises it"
        model = MODEL if reader.name in WITHOUT_MODEL else {}
        try:
            imported = reader.read(Request(text, name, devices, model, variables))
        except ShardproofError as error:
            return "unreadable", None, str(error.problems[0])
        refused = sorted(imported.of_status("refused"), key=lambda each: "--devices" in each.why)
        why = f"{refused[0].flag}: {refused[0].why}" if refused else ""
        judged_so = ("refused", imported, why) if refused else _plan_of(imported, name)
        if judged_so[0] == "plan":
            return judged_so
        first = first or judged_so
        if refused and "--devices" not in refused[0].why:
            return judged_so
    assert first is not None
    return first


def _plan_of(imported: Imported, name: str) -> tuple[str, Imported, str]:
    values = dict(imported.values)
    if imported.format in WITHOUT_MODEL:
        size = 8 * values["cluster"]["num_devices"].value
        usual = {"sequence": Given(4096, "--sequence"), "global": Given(size, "--global-batch")}
        values |= {"model": MODEL, "batch": {**usual, **values.get("batch", {})}}
    try:
        any_plan(values, name)
    except ShardproofError as error:
        return "refused", imported, str(error.problems[0])
    return "plan", imported, ""


def _leaves(text: str, name: str) -> Iterator[str]:
    """The names of a file's settings, found without the readers; of formats whose settings are its leaves."""
    if name.endswith(".toml"):
        yield from _paths(tomllib.loads(text))
    elif name.endswith(".json"):
        yield from _paths(parse_json(text, name))
    elif name.endswith((".yaml", ".yml")) and "_target_" not in text:
        import yaml

        yield from _paths(yaml.safe_load(text))


def _paths(tables: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tables.items():
        if isinstance(value, dict) and value:
            yield from _paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


if __name__ == "__main__":
    sys.exit(main())
