"""Every finding about a schedule that a test here makes says in its fields what it says in its words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardproof.core.base.findings import Finding
from shardproof.core.schedule.action import Action
from shardproof.core.schedule.schedule import Schedule
from shardproof.verify.schedule.check import Examination


def places_of(finding: Finding, schedule: Schedule) -> list[str]:
    """`where` as it follows from the fields: the action may be more than once in its row."""
    if finding.rank is None:
        return ["other places"]
    if finding.action is None:
        return [f"rank {finding.rank}"]
    tokens = map(str, schedule.row(finding.rank))
    steps = (step for step, token in enumerate(tokens) if token == finding.action)
    return [f"rank {finding.rank}, step {step}, {finding.action}" for step in steps]


@pytest.fixture(autouse=True, scope="package")
def fields_say_what_words_say() -> Iterator[None]:
    plain = Examination.__dict__["findings"].fget

    def findings(examination: Examination) -> list[Finding]:
        found: list[Finding] = plain(examination)
        for finding in found:
            assert finding.where in places_of(finding, examination.schedule), finding
            if finding.action is not None:
                assert finding.microbatch == Action.from_str(finding.action).microbatch
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Examination, "findings", property(findings))
        yield
