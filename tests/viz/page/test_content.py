"""What a page file holds, read back as the page's script reads it."""

import re

import pytest

from helpers.pages import unpacked
from shardproof import build, draw, lower, run_schedule
from shardproof.core.base.errors import TimelineError
from shardproof.core.base.findings import Finding
from shardproof.core.schedule.waits import waits_of
from shardproof.viz.page.content import Extra
from shardproof.viz.page.html import to_html


def timelines_of(document):
    """The header, and by timeline its columns."""
    header, columns = unpacked(document)
    return header, [{name: columns[at] for name, at in entry["columns"].items()} for entry in header["timelines"]]


@pytest.fixture(scope="module")
def dualpipe():
    return run_schedule(lower(build("DualPipe", pp=4, num_microbatches=8)), send_s=0.25)


def test_a_page_holds_every_span_with_what_it_waited_for(dualpipe):
    header, (columns,) = timelines_of(to_html([dualpipe], time_unit="unit"))
    spans, known = dualpipe.spans, waits_of(dualpipe)
    (entry,) = header["timelines"]

    def named(i):
        span = spans[i]
        return span.global_rank, span.lane, str(span.action), span.start_s, span.end_s

    def read(i):
        kind, stage, microbatch = (columns[name][i] for name in ("kind", "stage", "microbatch"))
        token = f"{stage}{header['kinds'][kind]}{'' if microbatch < 0 else microbatch}"
        if header["kinds"][kind] == "OVERLAP_F_B":
            token = f"({stage}F{microbatch};{columns['pair_stage'][i]}B{columns['pair_microbatch'][i]})OVERLAP_F_B"
        rank, lane = entry["ranks"][columns["rank"][i]], entry["lanes"][columns["lane"][i]]["name"]
        return rank, lane, token, columns["start"][i], columns["end"][i]

    assert entry["num_spans"] == len(spans)
    theirs = {read(i): i for i in range(len(spans))}
    assert set(theirs) == {named(i) for i in range(len(spans))}
    for i in range(len(spans)):
        at = theirs[named(i)]
        waited = columns["wait_sources"][columns["wait_offsets"][at] : columns["wait_offsets"][at + 1]]
        assert sorted(map(read, waited)) == sorted(map(named, known.of(i)))


def test_gaps_and_spans_of_a_compute_lane_fill_the_step(dualpipe):
    header, (columns,) = timelines_of(to_html([dualpipe]))
    for rank in range(4):
        own = (columns["rank"] == rank) & (columns["lane"] == 0)
        busy = (columns["end"] - columns["start"])[own].sum()
        idle = (columns["gap_end"] - columns["gap_start"])[columns["gap_rank"] == rank].sum()
        assert busy + idle == pytest.approx(header["timelines"][0]["makespan_s"])


def test_the_same_timeline_gives_the_same_bytes_and_nothing_is_loaded_from_elsewhere(dualpipe, tmp_path):
    document = to_html([dualpipe], time_unit="unit")
    draw(dualpipe, tmp_path / "step.html", time_unit="unit")
    assert (tmp_path / "step.html").read_text() == document
    assert not re.findall(r"(?:src|href)\s*=|https?://|url\(|@import|\bfetch\b|XMLHttpRequest", document)
    assert "default-src 'none'" in document


def test_a_finding_lies_at_its_action(full):
    finding = Finding("some-rule", "error", "rank 1, 1F1", "what", "hint", rank=1, action="1F1")
    nowhere = Finding("other-rule", "warning", "rank 9", "what", rank=9, action="1F1")
    header, (columns,) = timelines_of(to_html([full], [Extra(2**33, (finding, nowhere))]))
    entry = header["timelines"][0]
    at = entry["findings"][0]["span"]
    assert (columns["rank"][at], columns["stage"][at], columns["microbatch"][at], columns["kind"][at]) == (1, 1, 1, 0)
    assert entry["findings"][1]["span"] == -1 and entry["capacity_bytes"] == 2**33


def test_a_timeline_of_nothing_is_refused(make_timeline):
    with pytest.raises(TimelineError, match="cannot be drawn"):
        to_html([make_timeline([])])
