"""Stage assignment: even cuts, Megatron's layout strings, and what is wrong with bad ones."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.paths import DATA
from shardproof.core.base.errors import LayoutError
from shardproof.core.layout.layout import Layout
from shardproof.core.layout.stages import assign_layers, num_mtp_written, to_string

FACTS = json.loads((DATA / "layout_facts.json").read_text())["facts"]


def test_megatron_16_layers_over_pp4_vpp2_interleave():
    (fact,) = [fact for fact in FACTS if fact["area"] == "stage_layout"]
    stages = assign_layers(fact["input"]["layers"], Layout(pp=fact["input"]["pp"], vpp=fact["input"]["vpp"]))
    by_rank = {
        str(rank): [[layer + 1 for layer in stages[stage].layers] for stage in (rank, rank + 4)] for rank in range(4)
    }
    assert by_rank == fact["expected"]


@given(st.integers(1, 8), st.integers(1, 3), st.integers(1, 4))
def test_an_even_cut_holds_every_layer_once_in_order(pp, vpp, per_stage):
    vpp = vpp if pp > 1 else 1
    stages = assign_layers(pp * vpp * per_stage, Layout(pp=pp, vpp=vpp))
    assert [layer for stage in stages for layer in stage.layers] == list(range(pp * vpp * per_stage))
    assert [stage.embedding for stage in stages] == [True] + [False] * (pp * vpp - 1)
    assert [stage.head for stage in stages] == [False] * (pp * vpp - 1) + [True]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8).filter(sum))
def test_a_layout_string_round_trips(counts):
    cells = ["t" * count for count in counts]
    text = "E" + "|".join(cells) + "L"
    stages = assign_layers(sum(counts), Layout(pp=len(counts), stages=text))
    assert [len(stage.layers) for stage in stages] == counts
    assert to_string(stages) == text


def test_the_published_string_of_96_layers_over_8_ranks_expands():
    stages = assign_layers(96, Layout(pp=8, stages="Et*11|(t*12|)*6t*13L"))
    assert [len(stage.layers) for stage in stages] == [11, 12, 12, 12, 12, 12, 12, 13]


def test_an_embedding_may_have_a_stage_of_its_own():
    stages = assign_layers(4, Layout(pp=3, stages="E|t*4|L"))
    assert [len(stage.layers) for stage in stages] == [0, 4, 0]


def test_modules_of_multi_token_prediction_may_be_written_next_to_the_loss():
    written = assign_layers(61, Layout(pp=16, stages="Et*3|(t*4|)*14t*2m*2L"))
    assert written == assign_layers(61, Layout(pp=16, stages="Et*3|(t*4|)*14t*2L"))
    assert (num_mtp_written("E(t|)*3,tm*2L"), num_mtp_written("EtL")) == (2, 0)


def test_layers_that_do_not_divide_name_the_divisors_and_an_uneven_form():
    with pytest.raises(LayoutError, match=r"pp\*vpp=5 does not divide num_layers=12.*\[1, 2, 3, 4, 6, 12\]"):
        assign_layers(12, Layout(pp=5))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ett|ttL", "holds 4 layers, but the model has 6"),
        ("Ettt|ttt|L", "describes 3 stages, but pp\\*vpp=2"),
        ("ttt|tttL", "must hold E"),
        ("Ettt|ttt", "must hold E"),
        ("tE|tttttL", "must hold E"),
        ("|EttttttL", "first stage must hold E"),
        ("EttttttL|", "last stage L"),
        ("Ettt|xttL", "has 'x'"),
        ("Ettt|tttLm", "if anywhere, before L"),
        ("Etttttt|m|L", "m \\(multi-token prediction\\) on a stage of its own. Write it next to L"),
        ("E(t*3|t*3L", r"has '\('"),
        ("Et*999999|L", "expands to more than"),
        ("Et*9999999|L", r"has '\*9'"),
        ("E((t*999)*999)*999|L", "expands to more than"),
    ],
)
def test_a_bad_layout_string_says_what_is_wrong(text, expected):
    with pytest.raises(LayoutError, match=expected):
        assign_layers(6, Layout(pp=2, stages=text))
