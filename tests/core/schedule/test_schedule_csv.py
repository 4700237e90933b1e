"""Schedules as CSV: both dialects both ways, placements read back, and what a malformed file says."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardproof.core.base.errors import ScheduleError
from shardproof.core.schedule import CATALOG, build, lower
from shardproof.core.schedule.action import PER_MICROBATCH, Action, ActionArray, Kind, parse_cell
from shardproof.core.schedule.placement import Placement
from shardproof.core.schedule.schedule import Schedule

numbers = st.integers(0, 10**9 - 1)
actions = st.one_of(
    st.builds(Action, numbers, st.sampled_from(sorted(PER_MICROBATCH - {Kind.OVERLAP_F_B})), numbers),
    st.builds(Action, numbers, st.sampled_from([Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD, Kind.STEP])),
    st.builds(Action.overlap, numbers, numbers, numbers, numbers),
)


@st.composite
def builds(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(CATALOG)))
    vpp = CATALOG[name].nearest_vpp(draw(st.integers(2, 3)))
    sizes = [(pp, m) for pp in range(1, 7) for m in range(1, 10)]
    legal = [(pp, m) for pp, m in sizes if CATALOG[name].problem(pp=pp, vpp=vpp, num_microbatches=m) is None]
    pp, num_microbatches = draw(st.sampled_from(legal))
    return build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches)


def two_directions() -> Schedule:
    """Two stages on two ranks, both ranks holding both: microbatch 0 goes one way, microbatch 1 the other."""
    text = "0F0,1F1,1B1,0B0\n1F0,1B0,0F1,0B1\n"
    placement = Placement("replicated", 2, ((0, 1), (1, 0)), 2)
    return Schedule.from_rows(
        "csv", placement, [[Action.from_str(cell) for cell in line.split(",")] for line in text.split()]
    )


@given(actions)
def test_an_action_is_its_text(action: Action) -> None:
    assert Action.from_str(str(action)) == action
    assert list(ActionArray.from_actions([action])) == [action]


@given(builds())
def test_csv_round_trips_compute_only_and_lowered(built: Schedule) -> None:
    assert Schedule.from_csv(built.to_csv()) == built
    assert Schedule.from_csv(lower(built).to_csv()) == lower(built)


@given(builds())
def test_torch_dialect_drops_steps_and_lower_puts_them_back(built: Schedule) -> None:
    assume(built.placement.kind != "replicated")
    lowered = lower(built)
    text = lowered.to_csv(dialect="torch")
    assert "STEP" not in text
    if built.num_ranks > 1:
        assert lower(Schedule.from_csv(text)) == lowered


def test_torch_reads_every_cell_of_ours() -> None:
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for name, vpp in (("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2)):
        text = lower(build(name, pp=3, vpp=vpp, num_microbatches=4)).to_csv(dialect="torch")
        cells = [cell for line in text.splitlines() for cell in line.split(",")]
        assert [repr(torch_schedules._Action.from_str(cell)) for cell in cells] == cells
    pair = "(0F7;7B3)OVERLAP_F_B"
    assert repr(torch_schedules._Action.from_str(pair)) == pair == str(Action.from_str(pair))


@pytest.mark.parametrize(("pp", "num_stages", "kind"), [(3, 3, "loop"), (3, 6, "loop"), (3, 6, "vee"), (2, 4, "vee")])
def test_placement_is_read_from_where_forwards_run(pp: int, num_stages: int, kind: str) -> None:
    placement = Placement.vee(pp, 2) if kind == "vee" else Placement.loop(pp, num_stages, 2)
    rows = [[Action(stage, Kind.F, m) for stage in placement.stages_of(rank) for m in range(2)] for rank in range(pp)]
    read = Schedule.from_csv(Schedule.from_rows("mine", placement, rows).to_csv()).placement
    assert (read, read.kind) == (placement, kind)


def test_replicated_placement_is_read_back_and_refused_for_torch() -> None:
    schedule = two_directions()
    assert Schedule.from_csv(schedule.to_csv()) == schedule
    with pytest.raises(ScheduleError, match="replicas"):
        schedule.to_csv(dialect="torch")


def test_empty_cells_and_spaces_are_bubbles() -> None:
    assert Schedule.from_csv("0F0, ,0B0,,\r\n,1F0,1B0\r\n\r\n") == Schedule.from_csv("0F0,0B0\n1F0,1B0\n")


def test_all_malformed_cells_are_reported_with_line_and_cell() -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv("0F0,0X0,0B0\n1F,1F0,1STEP3\n", "my.csv")
    message = str(caught.value)
    assert "my.csv: line 1 (rank 0), cell 2: '0X0'" in message
    assert "line 2 (rank 1), cell 1: '1F'" in message
    assert "line 2 (rank 1), cell 3: '1STEP3'" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no action"),
        ("\n\n", "no action"),
        (",,,", "no action"),
        ("0F0,0B0,2F0,2B0", "stage 1 has no action"),
        ("0F0,0B0,0F999999999", "mistyped number"),
        ("0F0,0F9999999999", "is not an action"),
        ("0F\u0663,0B0", "is not an action"),
    ],
)
def test_a_file_that_cannot_be_a_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


@given(st.text(alphabet="0123FBIW_SENDRCV,;()\n STEP", max_size=60))
def test_any_text_is_a_schedule_or_a_schedule_error(text: str) -> None:
    try:
        schedule = Schedule.from_csv(text)
    except ScheduleError:
        return
    assert Schedule.from_csv(schedule.to_csv()).actions == schedule.actions


def test_unknown_dialect_is_refused() -> None:
    with pytest.raises(ScheduleError, match="unknown CSV dialect"):
        build("1F1B", pp=2, num_microbatches=2).to_csv(dialect="excel")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "cell", ["F0", "0", "0f0", "0F", "0F-1", "0REDUCE_GRAD1", "(0F0;1F0)OVERLAP_F_B", "(0F0)OVERLAP_F_B", "0SEND_X1"]
)
def test_cells_that_are_no_actions(cell: str) -> None:
    assert parse_cell(cell) is None
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.from_str(cell)
