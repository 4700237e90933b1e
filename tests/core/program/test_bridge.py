"""Bridges as integers: every destination gets each of its items once, from a rank that has it, whatever the
degrees on both sides."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import plan
from shardproof.core.model.model_presets import model_preset
from shardproof.core.program.bridge import Grid, Holding, messages, stage_grid

MODEL = replace(
    model_preset("tiny-llama"),
    hidden_size=24,
    ffn_hidden_size=48,
    num_heads=12,
    num_kv_heads=12,
    head_dim=2,
    vocab_size=288,
)
SEQUENCE, HIDDEN = 48, 24


plan_of = partial(plan, model=MODEL, samples=12, sequence=SEQUENCE, gradient_token_block=4, reduction_token_block=2)


def even_samples(num_samples: int, dp: int) -> list[list[tuple[int, int]]]:
    each = num_samples // dp
    return [[(rank * each, (rank + 1) * each)] for rank in range(dp)]


def grid_of(num_samples: int = 6, first_rank: int = 0, **degrees) -> Grid:
    return stage_grid(
        plan_of(**degrees), samples=even_samples(num_samples, degrees.get("dp", 1)), first_rank=first_rank
    )


def positions(spans) -> list[int]:
    return [item for lo, hi in spans for item in range(lo, hi)]


def values_of(holding: Holding, num_samples: int) -> np.ndarray:
    """The rank's tensor where every item of the whole has a number of its own."""
    whole = np.arange(num_samples * SEQUENCE * HIDDEN).reshape(num_samples, SEQUENCE, HIDDEN)
    return whole[np.ix_(*map(positions, holding.dims))]


def delivered(source: Grid, destination: Grid, num_samples: int) -> dict[int, np.ndarray]:
    """What the messages bring to every destination; asserts that nothing is brought twice."""
    results = {}
    for rank, holding in zip(destination.ranks, destination.holdings, strict=True):
        results[rank] = np.full(holding.shape, -1)
    for message in messages(source, destination):
        held = values_of(source.holding_of(message.source), num_samples)
        for piece in message.pieces:
            target = results[message.destination][tuple(slice(*span) for span in piece.destination)]
            assert (target == -1).all(), f"{message} brings items twice"
            target[...] = held[tuple(slice(*span) for span in piece.source)]
    return results


def holds(source: Grid, destination: Grid, num_samples: int) -> None:
    found = delivered(source, destination, num_samples)
    for rank, holding in zip(destination.ranks, destination.holdings, strict=True):
        assert np.array_equal(found[rank], values_of(holding, num_samples)), rank


CUTS = [
    ({"tp": 4}, {"tp": 2}),
    ({"tp": 2}, {"tp": 6}),
    ({"dp": 2}, {"dp": 3}),
    ({"dp": 6}, {"dp": 2}),
    ({"tp": 4, "sequence_parallel": True}, {"tp": 2, "sequence_parallel": True}),
    ({"tp": 3, "sequence_parallel": True}, {"tp": 2}),
    ({"cp": 2}, {"cp": 3}),
    ({"cp": 2, "tp": 3, "sequence_parallel": True}, {"dp": 3, "tp": 2}),
    ({"tp": 2, "dp": 3, "order": "dp-tp-pp"}, {"cp": 3, "dp": 2, "order": "cp-tp-dp-pp"}),
    ({"tp": 2, "cp": 2, "dp": 2, "sequence_parallel": True}, {}),
]


@pytest.mark.parametrize(("one", "other"), CUTS, ids=str)
@pytest.mark.parametrize("colocated", [False, True])
def test_every_item_arrives_once_and_at_its_place_there_and_back(one, other, colocated):
    source = grid_of(**one)
    destination = grid_of(first_rank=0 if colocated else len(source.ranks), **other)
    holds(source, destination, 6)
    holds(destination, source, 6)


@st.composite
def random_grids(draw) -> tuple[Grid, Grid]:
    """Two grids over the same box, each dimension cut at random places, the parts dealt to ranks at
    random, with replicas."""
    sizes = draw(st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(1, 4)))

    def dim(size: int) -> list[tuple[tuple[int, int], ...]]:
        inner = sorted(draw(st.sets(st.integers(1, size - 1)))) if size > 1 else []
        spans = list(itertools.pairwise([0, *inner, size]))
        owners = [draw(st.integers(0, 2)) for _ in spans]
        order = draw(st.permutations(range(len(spans))))
        return [tuple(spans[i] for i in order if owners[i] == owner) for owner in sorted(set(owners))]

    def grid(first_rank: int) -> Grid:
        holdings = [Holding(*each) for each in itertools.product(*map(dim, sizes))]
        holdings = [holding for holding in holdings for _ in range(draw(st.integers(1, 2)))]
        ranks = draw(st.permutations(range(first_rank, first_rank + len(holdings))))
        return Grid(tuple(ranks), tuple(holdings))

    return grid(0), grid(draw(st.sampled_from([0, 3, 200])))


@given(random_grids())
@settings(max_examples=60, deadline=None)
def test_random_cuts_of_all_dimensions_with_replicas(grids):
    holds(*grids, 5)


def test_tp4_to_tp2_sends_from_two_of_the_four_replicas():
    found = messages(grid_of(tp=4), grid_of(first_rank=4, tp=2))
    assert [(message.source, message.destination) for message in found] == [(0, 4), (1, 5)]
    assert {message.num_items for message in found} == {6 * SEQUENCE * HIDDEN}


def test_fan_out_from_replicas_is_spread_evenly():
    sent = Counter(message.source for message in messages(grid_of(tp=2), grid_of(first_rank=2, tp=6)))
    assert sent == {0: 3, 1: 3}


def test_dp2_to_dp3_cuts_the_middle_rank_out_of_both():
    found = messages(grid_of(dp=2), grid_of(first_rank=2, dp=3))
    assert [(m.source, m.destination, m.num_items // (SEQUENCE * HIDDEN)) for m in found] == [
        (0, 2, 2),
        (0, 3, 1),
        (1, 3, 1),
        (1, 4, 2),
    ]


def test_a_rank_of_both_grids_sends_itself_what_it_has():
    found = messages(grid_of(tp=4), grid_of(tp=2, dp=2))
    assert [(message.source, message.destination) for message in found] == [(rank, rank) for rank in range(4)]


def test_zig_zag_of_cp2_to_one_rank_is_three_ranges():
    """Rank 0 has chunks 0 and 3, rank 1 chunks 1 and 2, which touch."""
    found = messages(grid_of(cp=2), grid_of(first_rank=2))
    assert [len(message.pieces) for message in found] == [2, 1]


def test_several_rounds_of_samples_on_each_rank():
    """Four rounds of six samples, which two ranks take three at a time and three ranks two at a time: each
    round stays in the bridge."""
    one, other = plan_of(dp=2), plan_of(dp=3)
    source = stage_grid(one, samples=[[(6 * i + 3 * r, 6 * i + 3 * r + 3) for i in range(4)] for r in range(2)])
    destination = stage_grid(
        other, samples=[[(6 * i + 2 * r, 6 * i + 2 * r + 2) for i in range(4)] for r in range(3)], first_rank=2
    )
    holds(source, destination, 24)


def test_pipeline_ranks_of_a_layout_and_a_first_rank_name_global_ranks():
    assert stage_grid(plan_of(tp=2, pp=2), samples=[[(0, 6)]], pp_rank=1, first_rank=10).ranks == (12, 13)


# Facts about Megatron-Core's bridge_communicator.py (NVIDIA/Megatron-LM d98e8a64, tests/unit_tests/pipeline_parallel)


@pytest.mark.parametrize(
    ("degrees", "as_source", "as_destination"),
    [
        ({"tp": 2, "pp": 2, "dp": 2}, [[2, 3], [6, 7]], [[0, 1], [4, 5]]),
        ({"tp": 4, "pp": 2}, [[4, 5, 6, 7]], [[0, 1, 2, 3]]),
        ({"pp": 2, "dp": 4}, [[1], [3], [5], [7]], [[0], [2], [4], [6]]),
    ],
)
def test_the_lanes_of_a_grid_are_megatrons(degrees, as_source, as_destination):
    """A module sends from its last pipeline rank and receives on its first; a lane is what holds the same samples."""
    plan = plan_of(**degrees, order="tp-cp-pp-dp")
    lanes = [stage_grid(plan, samples=even_samples(12, plan.layout.dp), pp_rank=pp_rank).replicas for pp_rank in (1, 0)]
    assert [[list(ranks) for ranks in replicas.values()] for replicas in lanes] == [as_source, as_destination]


@pytest.mark.parametrize("rows", [[3, 3], [1, 3, 2], [1, 2, 3], [6, 0]])
def test_a_fan_out_may_be_as_uneven_as_it_likes(rows):
    """Theirs splits six rows to [3, 3] or [1, 3, 2] by counts of samples, and refuses counts that are no
    multiple of the peers."""
    ends = list(itertools.accumulate(rows, initial=0))
    whole = Holding(((0, 6),), ((0, 2),), ((0, 4),))
    parts = tuple(
        replace(whole, samples=tuple(span for span in [pair] if span[0] < span[1])) for pair in itertools.pairwise(ends)
    )
    found = messages(Grid((9,), (whole,)), Grid(tuple(range(len(rows))), parts))
    assert [(m.destination, m.num_items // 8) for m in found] == [
        (rank, count) for rank, count in enumerate(rows) if count
    ]


def test_a_fan_out_that_forgets_rows_is_refused():
    """Theirs too: counts that do not add up to the rows."""
    whole = Holding(((0, 6),), ((0, 2),), ((0, 4),))
    halves = replace(whole, samples=((0, 2),)), replace(whole, samples=((2, 4),))
    with pytest.raises(ValueError, match="source holds 48 items of hidden states and the destination 32"):
        messages(Grid((9,), (whole,)), Grid((0, 1), halves))


# What is refused


def test_grids_of_other_samples_are_refused():
    with pytest.raises(ValueError, match="source holds 6912 items of hidden states and the destination 4608"):
        messages(grid_of(6), grid_of(4, first_rank=1))
    shifted = stage_grid(plan_of(), samples=[[(1, 7)]], first_rank=1)
    with pytest.raises(ValueError, match=r"rank 1 needs samples 1\.\.6, .* have only 5760 of these 6912 items"):
        messages(grid_of(6), shifted)


def test_ranks_that_share_some_and_not_all_are_refused():
    holding = Holding(((0, 4),), ((0, 4),), ((0, 4),))
    with pytest.raises(ValueError, match="share some hidden states and not all"):
        Grid((0, 1), (holding, replace(holding, samples=((3, 6),))))


def test_malformed_grids_are_refused():
    holding = Holding(((0, 4),), ((0, 4),), ((0, 4),))
    with pytest.raises(ValueError, match="names rank 3 twice"):
        Grid((3, 3), (holding, holding))
    with pytest.raises(ValueError, match="2 ranks was given 1 holdings"):
        Grid((0, 1), (holding,))
    with pytest.raises(ValueError, match=r"rank 0 of a grid holds tokens 0\.\.3 and 2\.\.5"):
        Grid((0,), (replace(holding, tokens=((0, 4), (2, 6))),))
    with pytest.raises(ValueError, match="dp=2 ranks need one list of samples each, but 1 were given"):
        stage_grid(plan_of(dp=2), samples=[[(0, 6)]])
