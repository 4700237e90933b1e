"""Training that starts from a Hugging Face folder and ends in one, as users start it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from shardproof import Trainer
from shardproof.backend.cli import TRAIN
from shardproof.core.base.errors import PlanError
from shardproof.core.commands.cli import main
from shardproof.core.plan.plan import Plan

TEXT = """
[model]
preset = "tiny-llama"
[layout]
tp = {tp}
pp = {pp}
dp = {dp}
[batch]
global = 6
micro = 1
sequence = 16
[precision]
dtype = "{dtype}"
[numerics]
mode = "exact"
[train]
steps = 2
"""


def plan_of(tmp_path, *, tp=1, pp=1, dp=1, dtype="fp32", load=None) -> Plan:
    """`load` is a folder next to the plan file, whose paths are relative to it."""
    text = TEXT.format(tp=tp, pp=pp, dp=dp, dtype=dtype) + (f'load = "{load}"\n' if load else "")
    return Plan.from_toml(text, str(tmp_path / "plan.toml"))


def test_training_goes_on_from_the_files_in_another_layout_with_the_same_bits(tmp_path):
    first = Trainer(plan_of(tmp_path, tp=2, pp=2), transport="memory", save_huggingface=str(tmp_path / "first")).fit()
    again = plan_of(tmp_path, dp=3, load="first")
    assert again.train.load == str(tmp_path / "first") and Plan.from_toml(again.to_toml()) == again
    second = Trainer(again, transport="memory").fit()
    assert second.validation_losses[0] == first.validation_losses[-1]
    assert second.losses[0] != first.losses[0]


def test_processes_write_the_files_that_threads_write_and_bf16_weights_are_those_of_the_layers(tmp_path):
    plan = plan_of(tmp_path, tp=2, pp=2, dtype="bf16")
    for transport in ("gloo", "memory"):
        Trainer(plan, transport=transport, save_huggingface=str(tmp_path / transport)).fit()
    files = [(tmp_path / transport / "model.safetensors").read_bytes() for transport in ("gloo", "memory")]
    assert files[0] == files[1]
    assert {tensor.dtype for tensor in load_file(tmp_path / "gloo" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "gloo" / "config.json").read_text())["dtype"] == "bfloat16"
    # read again they are exact in fp32, so what is written without a step are the same files
    still = plan_of(tmp_path, dtype="bf16", load="gloo").to_toml().replace("steps = 2", "steps = 0")
    Trainer(Plan.from_toml(still), transport="memory", save_huggingface=str(tmp_path / "still")).fit()
    assert (tmp_path / "still" / "model.safetensors").read_bytes() == files[0]


def test_the_command_line_writes_the_folder_and_refuses_to_write_over_it(tmp_path, capsys):
    folder = tmp_path / "model"
    options = ["--model", "tiny-gpt", "--dtype", "fp32", "--global-batch", "2", "--sequence", "16", "--devices", "1"]
    command = [
        TRAIN.name,
        *options,
        "--transport",
        "memory",
        "--set",
        "train.steps=1",
        "--save-huggingface",
        str(folder),
    ]
    assert main(command) == 0
    assert f"written: {folder}" in capsys.readouterr().err
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert main(command) == 2
    assert "holds a model already" in capsys.readouterr().err
    assert main([*command[:-1], str(tmp_path / "new"), "--set", f"train.load={folder}", "--dry-run"]) == 0
    assert main([TRAIN.name, "--model", "tiny-llama", *options[2:], "--set", f"train.load={folder}", "--dry-run"]) == 2
    assert "is another model than the plan's" in capsys.readouterr().err


def test_a_folder_of_another_model_is_refused_before_ranks_are_started(tmp_path):
    Trainer(plan_of(tmp_path), transport="memory", save_huggingface=str(tmp_path / "llama")).fit()
    text = plan_of(tmp_path, load="llama").to_toml().replace('preset = "tiny-llama"', 'preset = "tiny-gpt"')
    with pytest.raises(PlanError, match="is another model than the plan's"):
        Trainer(Plan.from_toml(text))


class MlpOnly(torch.nn.Module):
    """A block without attention."""

    def __init__(self, context, layer):
        super().__init__()
        self.norm, self.mlp = context.norm(f"layers.{layer}.mlp.norm"), context.mlp(layer)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def test_a_model_of_own_blocks_without_all_parameters_is_not_saved_and_says_so_before_training(tmp_path):
    trainer = Trainer(
        plan_of(tmp_path, pp=2), model=MlpOnly, transport="memory", save_huggingface=str(tmp_path / "own")
    )
    with pytest.raises(PlanError, match=r"do not have layers\.0\.attention\.norm\.weight, .* and \d+ more"):
        trainer.fit()
    assert not (tmp_path / "own").exists()


def test_a_tensor_that_is_missing_is_reported_as_a_problem_of_the_plan(tmp_path):
    Trainer(plan_of(tmp_path), transport="memory", save_huggingface=str(tmp_path / "llama")).fit()
    file = tmp_path / "llama" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"model.norm.weight", b"model.morn.weight"))
    with pytest.raises(PlanError, match=r"has no model\.norm\.weight"):
        Trainer(plan_of(tmp_path, tp=2, load="llama"), transport="memory").fit()
