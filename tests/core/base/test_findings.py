"""Findings: their text is made from fields, and JSON has all of these."""

from __future__ import annotations

import json

from shardproof import Finding
from shardproof.core.base.findings import Where

FIELDS = ("rule", "severity", "where", "what", "hint", "rank", "action", "axis", "tensor", "microbatch", "key")


def test_the_text_of_a_place_is_made_from_its_parts() -> None:
    place = Where(3, "1F4", "layers.0.mlp.down", 4)
    found = Finding.at("a-rule", "error", place, "this.", "Do that.", axis="tp")
    assert found == Finding(
        *("a-rule", "error", "rank 3, 1F4, layers.0.mlp.down", "this.", "Do that."),
        rank=3,
        action="1F4",
        axis="tp",
        tensor="layers.0.mlp.down",
        microbatch=4,
        key="layout.tp",
    )
    assert str(found) == "error: a-rule at rank 3, 1F4, layers.0.mlp.down: this.\n    Do that."


def test_a_finding_is_about_the_degree_of_its_axis_unless_another_key_is_given() -> None:
    def key_of(axis: str | None, key: str | None = None) -> str | None:
        return Finding.at("a-rule", "error", Where(), "this.", axis=axis, key=key).key

    assert [key_of(axis) for axis in ("etp", "edp", "embedding", None)] == ["layout.etp", None, None, None]
    assert key_of("pp", "schedule.name") == "schedule.name"


def test_json_has_every_field_and_null_where_it_is_unknown() -> None:
    found = json.loads(json.dumps(Finding("a-rule", "error", "here", "this.", rank=0).to_dict()))
    assert tuple(found) == FIELDS and found["rank"] == 0
    assert all(found[name] is None for name in FIELDS[6:])
    assert Finding(**found) == Finding("a-rule", "error", "here", "this.", rank=0)
