"""A plan that starts from a Hugging Face folder is proved like any other: every rank reads its
slices of the same weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers.gates import sampled
from shardproof import Trainer
from shardproof.core.base.errors import PlanError
from shardproof.core.plan.plan import Plan
from shardproof.verify.dynamic.proof import prove

TEXT = """
[model]
preset = "tiny-llama"
[layout]
{layout}
[batch]
global = 6
micro = 1
sequence = 16
[precision]
dtype = "fp32"
[numerics]
mode = "exact"
[train]
steps = 2
{train}
"""


def plan_of(folder: Path, layout: str = "", train: str = "") -> Plan:
    return Plan.from_toml(TEXT.format(layout=layout, train=train), str(folder / "plan.toml"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    Trainer(plan_of(folder), transport="memory", save_huggingface=str(folder / "trained")).fit()
    return folder


@sampled("layout", ["tp = 2\npp = 2", "tp = 2\ndp = 3\nsequence_parallel = true"], on_push=1)
def test_loaded_weights_train_to_the_same_bits_in_every_layout(model, layout):
    loaded = prove(plan_of(model, layout, 'load = "trained"'), transport="memory", steps=2)
    drawn = prove(plan_of(model, layout), transport="memory", steps=2)
    assert loaded.ok and loaded.report["bits_different"] == 0
    assert loaded.report["losses"] != drawn.report["losses"]


def test_a_folder_without_a_tensor_is_a_problem_of_the_plan(model, tmp_path):
    shutil.copytree(model / "trained", tmp_path / "broken")
    file = tmp_path / "broken" / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"model.norm.weight", b"model.morn.weight"))
    with pytest.raises(PlanError, match=r"has no model\.norm\.weight"):
        prove(plan_of(tmp_path, "tp = 2", 'load = "broken"'), transport="memory", steps=2)
