"""`docs/rules.md` is what the table of rules says now."""

from __future__ import annotations

from pathlib import Path

import shardproof
from shardproof.verify.schedule.rules import RULES
from shardproof.verify.schedule.rules_page import rules_page

PAGE = Path(shardproof.__file__).parent / "docs" / "rules.md"


def test_page_is_current() -> None:
    assert PAGE.read_text() == rules_page(), "run: python -m shardproof.verify.schedule.rules_page > docs/rules.md"


def test_every_rule_has_a_section_with_its_example_and_what_is_found() -> None:
    page = rules_page()
    for rule in RULES:
        assert f"## {rule.name}\n\n{rule.doc} {rule.hint}\n" in page
        assert f"{rule.severity}: {rule.name} at rank " in page


def test_names_of_rules_are_unique_and_documentation_is_a_sentence() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.doc.endswith(".") and rule.hint.endswith("."), rule.name
