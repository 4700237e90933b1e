"""Facts about Megatron-Core's bridges between grids and DAGs of modules (NVIDIA/Megatron-LM d98e8a64,
`pipeline_parallel/`), held to ours.

Where we differ on purpose the test says so and why.
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial

import pytest

from helpers.plans import product_plan
from shardproof import ModularPlan
from shardproof.core.model.model_presets import model_preset
from shardproof.core.program.bridge import Grid, Holding, messages, stage_grid

ORDER = "tp-cp-ep-pp-dp"
"""That of their grids in these tests: a data-parallel lane is a run of ranks."""


plan_of = partial(product_plan, model=model_preset("tiny-gpt"), samples=4, sequence=16, dtype="fp32", order=ORDER)


def lanes(grid: Grid, dp: int) -> list[list[int]]:
    size = len(grid.ranks) // dp
    return [list(grid.ranks[lane * size : (lane + 1) * size]) for lane in range(dp)]


@pytest.mark.parametrize(
    ("degrees", "as_source", "as_destination"),
    [
        ({"tp": 2, "pp": 2, "dp": 2}, [[2, 3], [6, 7]], [[0, 1], [4, 5]]),
        ({"tp": 4, "pp": 2, "dp": 1}, [[4, 5, 6, 7]], [[0, 1, 2, 3]]),
        ({"tp": 1, "pp": 2, "dp": 4}, [[1], [3], [5], [7]], [[0], [2], [4], [6]]),
    ],
)
def test_a_bridge_joins_the_last_stage_of_one_grid_to_the_first_of_another(degrees, as_source, as_destination):
    """test_bridge_communicator.py, bridge_boundary. Theirs send from one leader of a lane to another, which broadcasts.
    Ours differ on purpose: every rank gets each item it holds once, from the replica that has sent least, so no rank
    and no link carries a whole lane."""
    plan, dp = plan_of(**degrees), degrees["dp"]
    samples = [[(4 // dp * rank, 4 // dp * (rank + 1))] for rank in range(dp)]
    source = stage_grid(plan, samples=samples, pp_rank=degrees["pp"] - 1)
    destination = stage_grid(plan, samples=samples, first_rank=plan.layout.world_size)
    assert lanes(source, dp) == as_source
    assert [[rank - plan.layout.world_size for rank in lane] for lane in lanes(destination, dp)] == as_destination
    sent: Counter[int] = Counter()
    arrived: Counter[int] = Counter()
    for message in messages(source, destination):
        sent[message.source] += message.num_items
        arrived[message.destination] += message.num_items
    assert set(arrived.values()) == {destination.holdings[0].num_items} and len(arrived) == len(destination.ranks)
    assert set(sent.values()) == {source.holdings[0].num_items} and len(sent) == len(source.ranks)


def samples_grid(first_rank: int, counts: list[int]) -> Grid:
    ends = [sum(counts[:index]) for index in range(len(counts) + 1)]
    holdings = [Holding(((lo, hi),), ((0, 8),), ((0, 4),)) for lo, hi in itertools.pairwise(ends)]
    return Grid(tuple(range(first_rank, first_rank + len(counts))), tuple(holdings))


@pytest.mark.parametrize(
    ("source", "destination", "moved"),
    [
        ([1, 2, 3], [3, 3], {(0, 10): 1, (1, 10): 2, (2, 11): 3}),  # they refuse: 3 counts are no multiple of 2 peers
        ([6], [1, 3, 2], {(0, 10): 1, (0, 11): 3, (0, 12): 2}),
        ([3, 3], [2, 2, 2], {(0, 10): 2, (0, 11): 1, (1, 11): 1, (1, 12): 2}),
    ],
)
def test_samples_move_by_the_ranges_that_ranks_hold_whatever_their_numbers(source, destination, moved):
    """bridge_split_sizes: theirs cut a lane's samples over its peers by counts, of which there must be a
    multiple of the peers."""
    found = messages(samples_grid(0, source), samples_grid(10, destination))
    assert {(each.source, each.destination): each.num_items // 32 for each in found} == moved


def test_ranks_that_do_not_hold_the_same_samples_are_refused():
    """bridge_split_sizes: counts that do not add up to the rows are a ValueError there too."""
    with pytest.raises(ValueError, match="must hold the same samples"):
        messages(samples_grid(0, [2, 2]), samples_grid(10, [3, 3]))


MODULES = [
    ("image", "0", "tp = 1", "[]"),
    ("audio", "1", "tp = 1", "[]"),
    ("llm", "2-5", "tp = 2\npp = 2", '["image", "audio"]'),
]
MODULES += [("generator", "6", "tp = 1", '["llm"]')]


def test_stages_of_a_dag_count_along_its_longest_path():
    """test_multimodule_communicator.py: two encoders, an llm of two stages on ranks 2 to 5 and a generator are 4 stages
    one behind the other, and rank 2 is on the second."""
    model = '[modules.model]\npreset = "tiny-llama"\n'
    tables = [
        f'[[modules]]\nname = "{name}"\nranks = "{ranks}"\ninputs = {inputs}\n{model}[modules.layout]\n{layout}\n'
        for name, ranks, layout, inputs in MODULES
    ]
    head = '[cluster]\npreset = "this-host"\n[batch]\nglobal = 4\nsequence = 32\n[precision]\ndtype = "fp32"\n'
    plan = ModularPlan.from_toml(head + "".join(tables))
    depths: list[int] = []
    for sources in plan.sources:
        depths.append(1 + max((depths[source] for source in sources), default=0))
    assert max(depths) == 4 and depths[plan.part_of(2).first_stage] == 2
