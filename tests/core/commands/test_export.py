"""The verb `export`: every format as a user asks for it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from shardproof.core.commands.cli import main
from shardproof.core.imports.writers import FORMATS
from shardproof.core.plan.plan import Plan
from shardproof.core.schedule.schedule import Schedule

GIVEN = ["--model", "llama3-8b", "--cluster", "dgx-h100", "--devices", "16", "--tp", "2", "--pp", "2"]


@pytest.mark.parametrize("to", FORMATS)
def test_every_format_has_the_keys_of_the_interface(to, capsys):
    assert main(["export", *GIVEN, "--to", to, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {"to", "files", "lost"} and report["to"] == to
    assert all(each.keys() == {"path", "text"} and each["text"] for each in report["files"])
    assert all(each.keys() == {"key", "why"} and each["why"] for each in report["lost"])


def test_one_file_goes_to_a_file_and_several_to_a_folder(tmp_path: Path, capsys):
    assert main(["export", *GIVEN, "--to", "csv", "-o", str(tmp_path / "s.csv")]) == 0
    assert Schedule.from_csv((tmp_path / "s.csv").read_text()).num_ranks == 2
    assert main(["export", *GIVEN, "--to", "slurm", "-o", str(tmp_path / "job.sh")]) == 2
    assert "Give a folder, as in -o job/." in capsys.readouterr().err
    assert main(["export", *GIVEN, "--to", "slurm", "-o", str(tmp_path)]) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plan.toml", "s.csv", "train.sbatch"]
    assert Plan.from_toml((tmp_path / "plan.toml").read_text()).layout.degrees.startswith("tp2 pp2")


@pytest.mark.parametrize("to", ["torchrun", "slurm"])
def test_scripts_are_what_a_shell_takes(to, tmp_path, capsys):
    assert main(["export", *GIVEN, "--to", to, "-o", str(tmp_path)]) == 0
    (script,) = (each for each in tmp_path.iterdir() if each.name != "plan.toml")
    shell = shutil.which("sh")
    assert shell is not None
    subprocess.run([shell, "-n", str(script)], check=True)


def test_what_a_format_cannot_say_goes_to_standard_error(capsys):
    assert main(["export", *GIVEN, "--to", "torchtitan", "--set", "numerics.mode=exact"]) == 0
    said = capsys.readouterr()
    assert "[parallelism]" in said.out and "numerics.mode" in said.err
