"""Where steps have other batches, what is predicted is a step of the last, and every verb says so."""

from __future__ import annotations

import json

import pytest

from shardproof.core.commands.cli import main
from shardproof.core.plan.plan import Plan
from shardproof.simulator import simulate

TEXT = """\
[model]
preset = "tiny-llama"
[cluster]
preset = "dgx-h100"
num_devices = 4
[layout]
pp = 2
dp = 2
[batch]
global = 32
sequence = 64
"""
RAMP = "rampup = [8, 8, 1000]\n"


@pytest.mark.parametrize("verb", ["simulate", "plan", "train --dry-run", "fit"])
def test_the_text_of_a_verb_says_of_which_batch_it_is(verb, tmp_path, capsys):
    said = []
    for text in (TEXT, TEXT + RAMP):
        (tmp_path / "plan.toml").write_text(text)
        verb_name, *options = verb.split()
        assert main([verb_name, str(tmp_path / "plan.toml"), *options]) in (0, 1)
        said.append("(the last of the batches)" in capsys.readouterr().out)
    assert said == [False, True]


def test_the_prediction_is_that_of_the_last_batch():
    steady, ramped = Plan.from_toml(TEXT), Plan.from_toml(TEXT + RAMP)
    assert simulate(ramped).report["step_time_s"] == simulate(steady).report["step_time_s"]


def test_a_search_leaves_out_layouts_that_the_first_batch_does_not_suit(tmp_path, capsys):
    free = TEXT.replace("[layout]\npp = 2\ndp = 2\n", "")
    largest = []
    for text in (free, free + "rampup = [2, 2, 1000]\n"):
        (tmp_path / "plan.toml").write_text(text)
        assert main(["plan", str(tmp_path / "plan.toml"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["candidates"]
        largest.append(max(each["layout"]["dp"] * each["batch"]["micro"] for each in found))
    assert largest[1] <= 2 < largest[0]
