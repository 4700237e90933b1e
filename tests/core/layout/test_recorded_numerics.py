"""The recorded numerics: equal for all layouts of a problem, read back strictly, refused by name where unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.modules import modular, module
from helpers.plans import plan
from shardproof import Layout, Plan
from shardproof.core.base.errors import PlanError
from shardproof.core.commands.cli import main
from shardproof.core.layout.recorded_numerics import VERSION, RecordedNumerics
from shardproof.core.plan.plan import recorded_numerics
from shardproof.core.plan.sections import Numerics
from shardproof.verify.ledger.file import read_ledger

MACHINE = {"device": "cpu", "torch": "2.13.0"}


def exact(layout: Layout, **blocks: int) -> Plan:
    """A model of 30 heads and 60 samples, which degrees 2, 3, 5 and 6 divide."""
    sizes = {"num_heads": 30, "num_kv_heads": 30, "hidden_size": 60, "head_dim": 2, "ffn_hidden_size": 120}
    return plan(layout, **sizes, num_layers=6, samples=60, sequence=120, numerics=Numerics("exact", **blocks))


@given(
    st.sampled_from((1, 2, 3, 5, 6)),
    st.sampled_from((1, 2, 3, 6)),
    st.sampled_from((1, 2, 3, 5, 6)),
    st.sampled_from((1, 2, 5)),
)
@settings(max_examples=25)
def test_the_record_is_that_of_the_problem_in_every_layout(tp: int, pp: int, dp: int, cp: int) -> None:
    blocks = {"gradient_token_block": 2, "reduction_token_block": 2}
    one = recorded_numerics(exact(Layout(), **blocks))
    assert recorded_numerics(exact(Layout(tp=tp, pp=pp, dp=dp, cp=cp), **blocks)) == one
    assert one.leaves["gradient_token_block"] == 2 and one.leaves["heads"] == {"num_items": 30, "block": 1}


def test_fast_numerics_whose_bits_depend_on_the_layout_have_no_leaves() -> None:
    assert recorded_numerics(plan(mode="fast")).leaves == {}


def test_modules_have_leaves_of_their_own() -> None:
    leaves = recorded_numerics(modular(module("left"), module("right", ["left"], tp=2), samples=2)).leaves
    assert leaves["left.heads"] == leaves["right.heads"] and "heads" not in leaves


def test_a_record_is_read_back_as_it_was_written() -> None:
    record = recorded_numerics(exact(Layout(tp=3)), MACHINE)
    assert RecordedNumerics.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_what_differs_has_a_name() -> None:
    blocks = ({"gradient_token_block": block, "reduction_token_block": 5} for block in (10, 20))
    one, other = (recorded_numerics(exact(Layout(), **each)) for each in blocks)
    assert list(one.differences(other)) == [("gradient_token_block", 10, 20)]


def test_a_leaf_that_one_full_record_lacks_is_one_that_it_did_not_cut() -> None:
    cut = RecordedNumerics("exact", {"queries": 3, "expert_ffn": None})
    assert list(cut.differences(RecordedNumerics("exact"))) == [("queries", 3, None)]
    assert list(RecordedNumerics("exact").differences(cut)) == [("queries", None, 3)]


def test_what_version_1_or_fast_numerics_do_not_say_does_not_count() -> None:
    cut = RecordedNumerics("exact", {"queries": 3})
    assert list(cut.differences(RecordedNumerics("exact", version=1))) == []
    assert list(cut.differences(RecordedNumerics("fast"))) == [("mode", "exact", "fast")]


def test_version_1_had_mode_and_leaves_in_one_table() -> None:
    older = {"mode": "exact", "heads": {"num_items": 4, "block": 1}, "expert_ffn": None, "gradient_token_block": 16}
    record = RecordedNumerics.of_version_1(older)
    assert record.version == 1 and record.pinned == older
    assert RecordedNumerics.of_version_1({}).pinned == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 3}, "recorded as version 3, and this shardproof reads 1 and 2"),
        ({"version": None}, "recorded as version None"),
        ({"version": 2.0}, "recorded as version 2.0"),
        ({"mode": "fast"}, "fast and have the leaf 'heads'"),
        ({"mode": "quick"}, "mode of its numerics is 'quick'"),
        ({"leaves": {"heads": {"num_items": 4}}}, "the leaf 'heads' of its numerics is"),
        ({"leaves": {"heads": {"num_items": 4, "block": 0}}}, "the leaf 'heads'"),
        ({"leaves": {"heads": True}}, "the leaf 'heads' of its numerics is true"),
        ({"leaves": []}, "the leaves of its numerics are"),
        ({"machine": {"torch": 2}}, "not a table of texts"),
        ({"machine": {"torch\x1b[2J": "2"}}, "not a table of texts"),
        ({"tile": 8}, "its numerics have 'tile', which version 2 has not"),
    ],
)
def test_a_record_that_is_none_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    written = recorded_numerics(exact(Layout()), MACHINE).to_json() | change
    with pytest.raises(ValueError, match=words):
        RecordedNumerics.from_json(written)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(("version", "mode", "leaves", "machine", "other")), JSON), JSON)
def test_anything_else_is_a_value_error(change: dict[str, Any], other: Any) -> None:
    for value in (recorded_numerics(exact(Layout())).to_json() | change, other):
        try:
            record = RecordedNumerics.from_json(value)
        except ValueError:
            continue
        assert record.version == VERSION and record.to_json() == value


def ledger_of(folder: Path, numerics: dict[str, Any] | None, **changed: Any) -> Path:
    """A ledger of `plan()` without a tensor, with that record in its header; None is version 1, which had none."""
    header = {"format": 3, "rank": 0, "world_size": 1, "environment": {}, "plan": plan().to_toml(), **changed}
    folder.mkdir()
    (folder / "rank-0.jsonl").write_text(json.dumps(header if numerics is None else {**header, "numerics": numerics}))
    return folder


def test_a_ledger_of_version_1_has_the_numerics_of_its_plan(tmp_path: Path) -> None:
    assert read_ledger(ledger_of(tmp_path / "run", None)).numerics == recorded_numerics(plan())


@pytest.mark.parametrize(
    ("numerics", "changed", "words"),
    [
        ({"version": 7}, {}, "recorded as version 7, and this shardproof reads 1 and 2"),
        (recorded_numerics(plan(mode="fast")).to_json(), {}, "its numerics are fast, and those of its plan exact"),
        (None, {"environment": {"\x1b[2J": "cpu"}}, "not a table of texts"),
    ],
)
def test_a_ledger_is_refused_before_a_bit_is_compared(
    tmp_path: Path, numerics: dict[str, Any] | None, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        read_ledger(ledger_of(tmp_path / "run", numerics, **changed))
    assert main(["verify", str(tmp_path / "run"), "--against", str(tmp_path / "run")]) == 2
