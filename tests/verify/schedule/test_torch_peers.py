"""Every schedule class of the installed torch.distributed.pipelining, for a grid of sizes, loaded
from its CSV and judged.

Known truth (torch 2.11 and 2.13): the compute-only listing of `Schedule1F1B` never forwards microbatch 0 on the last
rank (and names a microbatch that does not exist); its execution does not use that listing. All others are right, with
torch's own messages too.
"""

from __future__ import annotations

import csv
import inspect
from pathlib import Path

import pytest

from shardproof.core.schedule.schedule import Schedule, read_csv
from shardproof.verify.schedule.check import check, examine
from shardproof.verify.schedule.rules import View
from shardproof.verify.schedule.rules.deadlock import send_meanings

pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")

CLASSES = sorted(
    name
    for name, each in vars(pipelining).items()
    if inspect.isclass(each)
    and issubclass(each, pipelining._PipelineSchedule)
    and not inspect.isabstract(each)
    and name.startswith("Schedule")
)
SINGLE = {"ScheduleGPipe", "Schedule1F1B"}
GRID = [(2, 4), (2, 6), (3, 6), (3, 9), (4, 8), (5, 10), (6, 12)]
VEES = {"ScheduleZBVZeroBubble", "ScheduleDualPipeV"}


def sizes(name: str) -> list[tuple[int, int, int]]:
    chunks = (1,) if name in SINGLE else (2,) if name in VEES else (2, 3)
    return [(pp, m, v) for pp, m in GRID for v in chunks]


def listing(folder: Path, name: str, size: tuple[int, int, int], *, with_comms: bool) -> Schedule:
    """The schedule as torch writes it (`_dump_csv` has this form), through a file."""
    pp, num_microbatches, vpp = size
    rows = visualizer.get_schedule_ops(getattr(pipelining, name), pp, num_microbatches, vpp, with_comms=with_comms)
    path = folder / f"{name}.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["" if action is None else str(action) for action in row] for row in rows])
    return read_csv(path)


def test_the_classes_of_torch_are_those_this_file_knows() -> None:
    assert set(CLASSES) >= {
        "Schedule1F1B",
        "ScheduleDualPipeV",
        "ScheduleGPipe",
        "ScheduleInterleaved1F1B",
        "ScheduleInterleavedZeroBubble",
        "ScheduleLoopedBFS",
        "ScheduleZBVZeroBubble",
    }


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "Schedule1F1B"])
def test_every_class_but_1f1b_lists_right_schedules(tmp_path: Path, name: str) -> None:
    for size in sizes(name):
        schedule = listing(tmp_path, name, size, with_comms=False)
        assert (schedule.num_ranks, schedule.num_microbatches, schedule.num_stages) == (
            size[0],
            size[1],
            size[0] * size[2],
        )
        assert check(schedule) == [], size


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in SINGLE])
def test_messages_that_torch_adds_are_matched_in_one_order_and_run_with_every_meaning_of_a_send(
    tmp_path: Path, name: str
) -> None:
    for size in sizes(name):
        schedule = listing(tmp_path, name, size, with_comms=True)
        examination = examine(schedule)
        assert [str(finding) for finding in examination.findings] == [], size
        assert all(send_meanings(View(examination.schedule)).values())


@pytest.mark.parametrize("size", sizes("Schedule1F1B"))
def test_1f1b_never_forwards_microbatch_0_on_its_last_rank(tmp_path: Path, size: tuple[int, int, int]) -> None:
    schedule = listing(tmp_path, "Schedule1F1B", size, with_comms=False)
    pp, num_microbatches, _ = size
    tokens = {str(action) for action in schedule.row(pp - 1)}
    if f"{pp - 1}F0" in tokens:
        pytest.skip("this torch writes the order right")
    findings = check(schedule)
    last = [
        finding for finding in findings if finding.what == (f"stage {pp - 1} never runs the forward of microbatch 0.")
    ]
    assert [(finding.rule, finding.where) for finding in last] == [("missing-forward", f"rank {pp - 1}")]
    # The other ranks are right: microbatch m, which only the last rank names, is all that is missing there.
    others = [finding for finding in findings if finding not in last]
    assert all(
        f"microbatch {num_microbatches}." in finding.what or f"rank {pp - 1}" in finding.where for finding in others
    )
