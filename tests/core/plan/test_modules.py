"""[[modules]]: several models on rank ranges of their own, read, refused, put into one pipeline, and
cut into microbatches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.paths import EXAMPLES
from shardproof import ModularPlan, Plan
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.keys import MODULE_KEYS
from shardproof.core.plan.module import ModuleLayout
from shardproof.core.plan.rules import RULES
from shardproof.core.plan.schedule_of import modular_schedule, part_schedule
from shardproof.core.program.bridge import bridge_messages, stage_grid
from shardproof.core.schedule import build, lower
from shardproof.core.schedule.action import Kind
from shardproof.core.schedule.joined import joined_schedule
from shardproof.core.schedule.placement import Placement
from shardproof.verify.run.proof_run import one_device

EXAMPLE = (EXAMPLES / "encoder_decoder.toml").read_text()

JOINING = """\
[batch]
global = 6
sequence = 32
[precision]
dtype = "fp32"
[[modules]]
name = "left"
ranks = "0-1"
[modules.model]
preset = "tiny-llama"
[modules.layout]
tp = 2
[[modules]]
name = "right"
ranks = "2-4"
inputs = []
[modules.model]
preset = "tiny-llama"
[modules.layout]
pp = 3
stages = "Et|tt|tL"
[[modules]]
name = "last"
ranks = "5-7"
inputs = ["right", "left"]
[modules.model]
preset = "tiny-moe"
[modules.layout]
tp = 3
"""


def problems_of(text: str) -> tuple[str, ...]:
    with pytest.raises(PlanError) as caught:
        Plan.from_toml(text)
    return caught.value.problems


@pytest.mark.parametrize("text", [EXAMPLE, JOINING])
def test_a_plan_of_modules_comes_back_from_its_own_text(text: str) -> None:
    plan = ModularPlan.from_toml(text)
    assert ModularPlan.from_toml(plan.to_toml()) == plan
    assert Plan.from_toml(text) == plan


def test_a_text_without_modules_gives_no_plan_of_modules() -> None:
    text = '[model]\npreset = "llama3-8b"\n[batch]\nglobal = 1\nsequence = 32\n'
    assert isinstance(Plan.from_toml(text), Plan)
    with pytest.raises(PlanError, match=r"there is no \[\[modules\]\] in it"):
        ModularPlan.from_toml(text)


def test_every_module_is_a_plan_with_its_own_ranks_stages_and_names() -> None:
    plan = ModularPlan.from_toml(JOINING)
    assert plan.world_size == 8 and plan.cluster.num_devices == 8
    assert [(part.name, part.first_rank, part.first_stage) for part in plan.parts] == [
        ("left", 0, 0),
        ("right", 2, 1),
        ("last", 5, 4),
    ]
    assert [(stage.embedding, stage.head) for part in plan.parts for stage in part.stages] == [
        (True, False),
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]
    assert plan.sources == ((), (), (1,), (2,), (3, 0))  # as the inputs are written: right before left
    assert plan.degrees == "left tp2 + right pp3 -> last tp3"
    names = [name for part in plan.parts for name in part.named_shapes]
    assert "left.embedding.tokens.weight" in names and "last.head.output.weight" in names
    assert not any(name.startswith(("last.embedding", "left.head")) for name in names) and len(set(names)) == len(names)
    assert plan.part_of(4).name == "right" and plan.part_of(4).layout.coordinates(4)["pp"] == 2


def test_a_module_s_layout_is_the_plain_one_moved_to_its_ranks() -> None:
    plain, moved = Layout(tp=2, cp=2, dp=3, pp=2, ep=2), ModuleLayout(tp=2, cp=2, dp=3, pp=2, ep=2, first_rank=7)
    for axes in ("tp", "dp-cp", "pp"):
        assert np.array_equal(np.array(moved.groups(axes)), np.array(plain.groups(axes)) + 7)
    assert np.array_equal(np.array(moved.expert_groups("ep")), np.array(plain.expert_groups("ep")) + 7)
    for rank in range(plain.world_size):
        assert (
            moved.coordinates(rank + 7) == plain.coordinates(rank)
            and moved.global_rank(**plain.coordinates(rank)) == rank + 7
        )
        assert moved.group_of(rank + 7, "tp-pp") == [member + 7 for member in plain.group_of(rank, "tp-pp")]
        assert moved.expert_group_of(rank + 7, "dp") == [member + 7 for member in plain.expert_group_of(rank, "dp")]


BROKEN = {
    "modules-have-names": ('name = "right"', 'name = "left"', "is that of 2 modules"),
    "modules-cover-ranks": ('ranks = "2-4"', 'ranks = "3-5"', 'Use ranks = "2-4".'),
    "modules-form-a-tree": (
        'inputs = ["right", "left"]',
        'inputs = ["right"]',
        ('Write "left" into the inputs of one later module'),
    ),
    "modules-fit-together": ('preset = "tiny-moe"', 'preset = "tiny-gpt-6h"', "hidden_size=96 of module"),
    "modules-have-a-schedule": (
        "[precision]",
        '[schedule]\nname = "ZBH1"\n[precision]',
        ("Use schedule.name = 1F1B or GPipe"),
    ),
    "groups-are-of-one-model": (
        "[precision]",
        '[[optimizer.groups]]\nmatch = ".*"\n[precision]',
        "groups choose parameters of one model by their names, and here are several",
    ),
    "modules-recompute-equally": (
        "[precision]",
        '[recompute]\nmode = "full"\nlayers = [0]\n[precision]',
        "layers by numbers, which every module counts from 0",
    ),
}


@pytest.mark.parametrize("rule", [rule for rule in RULES if "modules" in rule.sections], ids=lambda rule: rule.name)
def test_each_rule_catches_its_minimal_failing_plan(rule) -> None:
    before, after, sentence = BROKEN[rule.name]
    text = JOINING.replace(before, after)
    assert text != JOINING
    (problem,) = [problem for problem in problems_of(text) if sentence in problem]
    assert problem.startswith("plan.toml:")
    nouns = ModularPlan.from_toml(JOINING).sections
    assert not list(rule.check(*(nouns[section] for section in rule.sections)))


@pytest.mark.parametrize(
    ("before", "after", "line", "problem"),
    [
        ('name = "right"', 'nam = "right"', 14, "module 2: unknown key 'nam' in [[modules]]; did you mean 'name'?"),
        ('ranks = "2-4"', 'ranks = "4-2"', 15, 'module "right": ranks = "4-2" is no range of ranks.'),
        ('ranks = "2-4"', "ranks = 2", 15, 'module "right": ranks = 2 must be a text in quotes'),
        ("tp = 3", "tp = 3\nzeroo = 1", 30, "module \"last\": unknown key 'zeroo' in [layout]; did you mean 'zero'?"),
        ("tp = 3", "tp = 9\ndp = 1", 29, 'module "last": tp=9 leaves some ranks without any'),
        ("[batch]", "[layout]\ntp = 2\n[batch]", 2, "[layout] stands next to [[modules]], of which each has its own."),
        ('"right", "left"', '"right", "lft"', 25, 'inputs of module "last" name "lft", which is no earlier module.'),
        ('preset = "tiny-moe"', "num_layers = 2", 27, 'module "last": [model] lacks hidden_size'),
        (
            'preset = "tiny-moe"',
            'preset = "tiny-gpt"',
            23,
            ('tied_embeddings=true of module "last" needs embedding and head in one model'),
        ),
        ("sequence = 32", "sequence = -1", 3, "sequence = -1 must be at least 1"),
    ],
)
def test_what_is_wrong_with_a_module_is_reported_with_its_line_and_name(
    before: str, after: str, line: int, problem: str
) -> None:
    text = JOINING.replace(before, after)
    assert text != JOINING
    found = problems_of(text)
    assert any(each.startswith(f"plan.toml:{line}: ") and problem in each for each in found), found


def test_what_is_missing_is_reported_once() -> None:
    assert problems_of(JOINING.replace('name = "left"\n', "")) == (
        ('plan.toml: module 1: it lacks name. Give it, as in name = "encoder".'),
    )
    assert problems_of(JOINING.replace("global = 6\n", "")) == ("plan.toml:2: [batch] lacks global.",)


def test_modules_that_cut_the_batch_differently_run_all_forwards_first() -> None:
    text = JOINING.replace("tp = 3", "dp = 3")
    (problem,) = problems_of(text)
    assert "the modules cut the batch over dp=1 and dp=3 ranks" in problem and 'Use schedule.name = "GPipe"' in problem
    ModularPlan.from_toml(text.replace("[precision]", '[schedule]\nname = "GPipe"\n[precision]'))


def test_verbs_about_one_model_refuse_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from shardproof.core.commands.cli import main

    (tmp_path / "plan.toml").write_text(JOINING)
    assert main(["plan", str(tmp_path / "plan.toml")]) == 2
    refused = "[[modules]] have no meaning. They are taken by fit, simulate, verify, draw and train"
    assert refused in capsys.readouterr().err


def test_the_reference_has_every_module_whole_on_a_rank() -> None:
    reference = one_device(ModularPlan.from_toml(JOINING))
    assert [part.layout.world_size for part in reference.parts] == [1, 1, 1] and reference.sources == ((), (), (1, 0))
    assert [part.first_rank for part in reference.parts] == [0, 1, 2]


def test_the_keys_of_a_module_are_its_fields() -> None:
    assert [key.name for key in MODULE_KEYS] == ["name", "ranks", "inputs"]
    assert not [key for key in MODULE_KEYS if key.default is not None]


# One schedule


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("pp", "num_microbatches"), [(1, 3), (3, 5), (5, 3)])
def test_on_a_line_the_schedule_is_that_of_the_catalog(name: str, pp: int, num_microbatches: int) -> None:
    placement = Placement.loop(pp, pp, num_microbatches)
    assert joined_schedule(name, placement) == lower(build(name, pp=pp, num_microbatches=num_microbatches))


def test_warm_up_is_the_depth_below_the_last_stage() -> None:
    schedule = modular_schedule(ModularPlan.from_toml(JOINING), 6)
    kinds = [[action.kind for action in row if action.kind in (Kind.F, Kind.B)] for row in schedule.rows()]
    assert [row.index(Kind.B) for row in kinds] == [2, 4, 3, 2, 1]  # the depth, and the forward of the first pair
    for stage, row in enumerate(kinds):
        assert Counter(row) == {Kind.F: 6, Kind.B: 6}, stage


def test_the_rows_of_a_module_are_those_of_the_whole() -> None:
    plan = ModularPlan.from_toml(JOINING)
    whole, right = modular_schedule(plan, 6), plan.part_named("right")
    own = part_schedule(plan, right, 6)
    for stage in range(3):
        assert [str(replace(action, stage=stage + 1)) for action in own.row(stage)] == [
            str(action) for action in whole.row(stage + 1)
        ]
    assert own.placement.sources_of(0) == () and own.placement.sources_of(1) == (0,) and not own.placement.has_loss(2)
    last = part_schedule(plan, plan.part_named("last"), 6).placement
    assert last.sources_of(0) == (-1,) and last.called_there(-1) == 2 and last.has_loss(0)


# Messages between modules that cut the batch differently


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 2), st.integers(5, 11))
def test_messages_bring_every_sample_once_from_the_microbatch_that_has_it(
    here: int, there: int, micro: int, num_microbatches: int
) -> None:
    text = EXAMPLE.replace("global = 6", f"global = {num_microbatches * micro}").replace(
        "micro = 1", f"micro = {micro}"
    )
    text = text.replace('"1F1B"', '"GPipe"').replace("tp = 4", f"dp = {here}").replace("tp = 2", f"dp = {there}")
    text = text.replace('"0-3"', f'"0-{here - 1}"').replace('"4-5"', f'"{here}-{here + there - 1}"')
    source, target = ModularPlan.from_toml(text).parts
    grids = [
        stage_grid(part, samples=[(part.samples_of(dp),) for dp in range(part.layout.dp)]) for part in (source, target)
    ]
    arrived: Counter[tuple[int, int]] = Counter()
    samples = []
    for bridged in bridge_messages(*grids, micro):
        ranks = bridged.message.source, bridged.message.destination
        firsts = [
            part.samples_of(part.layout.coordinates(rank)["dp"])[0]
            for part, rank in zip((source, target), ranks, strict=True)
        ]
        numbers = bridged.source_microbatch, bridged.destination_microbatch
        for piece in bridged.message.pieces:
            (lo, hi), (to_lo, to_hi) = piece.source[0], piece.destination[0]
            assert 0 <= lo < hi <= micro and hi - lo == to_hi - to_lo
            taken, put = (first + number * micro for first, number in zip(firsts, numbers, strict=True))
            assert taken + lo == put + to_lo
            arrived.update((ranks[1], sample) for sample in range(put + to_lo, put + to_hi))
        samples.append(bridged.sample)
    wanted = {(target.first_rank + dp, sample) for dp in range(there) for sample in range(*target.samples_of(dp))}
    assert arrived == Counter(wanted) and samples == sorted(samples)
