"""The score of `verify --mutations`: a table for people and its JSON form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...core.base.findings import Finding
from .not_here import NOT_HERE
from .run import Score, Verdict


def report_of(score: Score) -> dict[str, object]:
    """The JSON keys of `verify --mutations --json`: counts, `practice` (how many the usual practice notices),
    `bugs` (entries of the catalog) and `more_bugs` (how many of the same kinds), one row per mutant, and
    `not_here` with reasons."""
    verdicts = score.verdicts
    return {
        "ok": score.ok,
        "injected": len(verdicts),
        "caught": sum(each.caught for each in verdicts),
        "located": sum(each.located for each in verdicts),
        "false_alarms": len(score.false_alarms),
        "missed": sum(not each.caught for each in verdicts),
        "practice": {
            "loss_of_step_1": sum(each.practice.loss for each in verdicts),
            "allclose_of_step_1": sum(each.practice.allclose for each in verdicts),
        },
        "bugs": sorted({each.mutant.bug for each in verdicts if each.mutant.is_listed}),
        "more_bugs": len({each.mutant.bug for each in verdicts if not each.mutant.is_listed}),
        "clean_runs": score.num_clean,
        "mutants": [_row(each) for each in verdicts],
        "findings": [finding.to_dict() for finding in _findings(score)],
        "not_here": dict(NOT_HERE),
    }


def _row(verdict: Verdict) -> dict[str, object]:
    mutant, first = verdict.mutant, verdict.first
    return {
        "id": mutant.id,
        "title": mutant.title,
        "source": mutant.source,
        "caught": verdict.caught,
        "located": verdict.located,
        "right_place": verdict.is_placed,
        "right_class": verdict.is_classed,
        "first_divergence": first,
        "finding": verdict.words,
        "failed": verdict.failed,
        "practice": {"loss_of_step_1": verdict.practice.loss, "allclose_of_step_1": verdict.practice.allclose},
    }


def _findings(score: Score) -> Iterator[Finding]:
    """What is wrong with the verifier: alarms without a fault, and faults without an alarm."""
    for alarm in score.false_alarms:
        yield Finding(
            "false-alarm",
            "error",
            f"the unbroken plan of {alarm[0]}",
            alarm[1],
            ("Prove this plan with verify --dynamic."),
        )
    for each in score.verdicts:
        if not each.caught:
            mutant, hint = (
                each.mutant,
                ("Run it alone (--only), and see where the error comes from.") if each.failed else "",
            )
            rule = "verifier-failed" if each.failed else "mutant-missed"
            yield Finding(rule, "error", mutant.id, f"{mutant.title}, as in {mutant.source}: {each.words}.", hint)


def text_of(report: Mapping[str, Any]) -> str:
    """The table of all mutants, and the counts under it."""
    rows: list[tuple[str, ...]] = [("bug", "loss", "allclose", "here", "class", "first difference", "what it is")]
    rows += [_columns(row) for row in report["mutants"]]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[6]]).rstrip()
        for row in rows
    ]
    injected, practice = report["injected"], report["practice"]
    lines += [
        "",
        f"{injected} mutants of {len(report['bugs'])} bugs of the catalog and {report['more_bugs']} of the same "
        f"kinds: {report['caught']} "
        f"caught, {report['located']} located at the right action and tensor and named with the right class; "
        f"{report['false_alarms']} "
        f"false alarms in {report['clean_runs']} runs of the plans as they are.",
        f"The same mutants by the usual practice: {practice['loss_of_step_1']} seen in the loss of step 1 (relative "
        "1e-3), "
        f"{practice['allclose_of_step_1']} by allclose at 1e-2 of losses, gradients and weights of step 1 on all "
        "ranks.",
        f"{len(report['not_here'])} more bugs of the catalog have no mechanism here (--json says why).",
    ]
    return "\n".join([*lines, *(str(Finding(**each)) for each in report["findings"])])


def _columns(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Bug, seen by loss, seen by allclose, what is seen here, class, first difference, title."""
    first, habit = row["first_divergence"], row["practice"]
    here = "located" if row["located"] else "caught" if row["caught"] else "FAILED" if row["failed"] else "MISSED"
    kind, place = ("stops", "") if row["caught"] else ("", "")
    if first is not None:
        kind, place = first["class"], f"{first['action']} {first['phase']} {first['tensor']}"
    seen = ["seen" if habit[name] else "-" for name in ("loss_of_step_1", "allclose_of_step_1")]
    return row["id"], *seen, here, kind, place, row["title"]
