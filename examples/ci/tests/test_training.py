"""What CI holds our training to."""

from pathlib import Path

from backend.block import ParallelBlock
from viz.rows import rows

from shardproof import Schedule, assert_bitwise, assert_fits, assert_schedule

ROOT = Path(__file__).parent.parent


def test_our_layer_cut_six_ways_computes_what_one_device_computes():
    assert_bitwise(ROOT / "plan.toml", block=ParallelBlock, transport="memory", steps=2)


def test_our_schedule_runs_everything_once_and_cannot_hang():
    assert_schedule(ROOT / "schedule.csv")


def test_our_plan_fits():
    assert_fits(ROOT / "plan.toml")


def test_the_log_shows_the_schedule():
    schedule = Schedule.from_csv((ROOT / "schedule.csv").read_text())
    assert rows(schedule).splitlines()[1] == "rank 1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
