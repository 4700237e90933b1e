"""The tables of public configurations: well formed, large enough, and nothing unaccounted for. What they say is found
again by `python benchmarks/public_configs.py`, which needs the files."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


TABLES = [("public_torchtitan.tsv", 60, 0.5), ("public_others.tsv", 40, 0.5), ("public_megatron.tsv", 100, 0.2)]
"""A table, the files that it has at least, and the share of them that are plans at least."""


@pytest.mark.parametrize(("name", "least", "share"), TABLES)
def test_a_table_has_enough_files_and_no_setting_is_unaccounted_for(name: str, least: int, share: float):
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert len(rows) >= least
    assert len({(row["repository"], row["commit"], row["path"]) for row in rows}) == len(rows)
    assert all(len(row["commit"]) == 40 and len(row["sha256"]) == 64 for row in rows)
    assert {row["unaccounted"] for row in rows} == {"0"}
    assert all(bool(row["reason"]) == (row["verdict"] != "plan") for row in rows)
    count = Counter(row["verdict"] for row in rows)
    assert count["plan"] >= len(rows) * share - 1
    assert set(count) <= {"plan", "refused", "unreadable"}
