"""Real runs of torch over gloo: what their traces say against what their own clocks say, with names and without."""

import pytest

from helpers.torch_runs import FSDP, PIPELINE, run
from shardproof import build, draw, lower
from shardproof.core.traces.load import load, read_recording


@pytest.mark.full
@pytest.mark.parametrize(("kind", "world"), [("1F1B", 2), ("GPipe", 4), ("Interleaved1F1B", 2)])
def test_a_run_of_torch_s_pipelining_has_the_bubble_that_its_own_clock_says(tmp_path, kind, world):
    bare, own = run(tmp_path, kind, world, PIPELINE)
    schedule = lower(build(kind, pp=world, vpp=2 if kind == "Interleaved1F1B" else 1, num_microbatches=4))
    timeline = read_recording(bare, lambda rank: list(schedule.row(rank))).timeline
    computed = [str(span.action) for span in timeline.spans if span.lane == "compute"]
    assert sorted(computed) == sorted(str(a) for row in schedule.rows() for a in row if a.kind.name in ("F", "B"))
    for rank, bubble in enumerate(own):
        assert timeline.bubble_fraction(rank) == pytest.approx(bubble, abs=0.02)
    if kind == "Interleaved1F1B":  # which torch annotates
        named = load(tmp_path / "traces")
        for rank, bubble in enumerate(own):
            assert named.bubble_fraction(rank) == pytest.approx(bubble, abs=0.02)
    assert draw(timeline, tmp_path / "run.html")


@pytest.mark.full
def test_a_run_of_fsdp2_has_the_bubble_that_its_own_clock_says_and_collectives(tmp_path):
    bare, own = run(tmp_path, "FSDP2", 2, FSDP)
    recording = read_recording(bare)
    for rank, bubble in enumerate(own):
        spans = [str(span.action) for span in recording.timeline.spans if span.global_rank == rank]
        assert spans == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2", "0STEP"]
        assert recording.timeline.bubble_fraction(rank) == pytest.approx(bubble, abs=0.02)
        found = recording.communication[rank]
        assert 0 < found.exposed_s <= found.seconds < recording.timeline.makespan_s
