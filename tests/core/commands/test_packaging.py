"""What pyproject.toml says of the package is what lies in the folders; `.ci/wheel` tries the wheel itself."""

import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import shardproof

ROOT = Path(shardproof.__file__).parent
pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason=("an installed package has no pyproject.toml")
)


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_license_is_apache_2_in_full_and_no_classifier_says_it_again():
    text, said = (ROOT / "LICENSE").read_text(), project()["project"]
    assert (
        "Apache License\n                           Version 2.0, January 2004" in text
        and ("END OF TERMS AND CONDITIONS") in text
    )
    assert "Copyright 2026 the shardproof authors" in text and "[yyyy]" not in text
    assert said["license"] == "Apache-2.0" and said["license-files"] == ["LICENSE"]
    assert not [each for each in said["classifiers"] if each.startswith("License ::")]
    assert said["authors"] == [{"name": "the shardproof authors"}]
    assert {"Homepage", "Repository", "Documentation", "Issues"} <= set(said["urls"])


def test_the_version_is_written_once():
    assert "version" not in project()["project"]
    assert project()["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "shardproof.__version__"}
    assert metadata.version("shardproof") == shardproof.__version__


def printed(*command: str) -> str:
    return subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=True).stdout


def test_python_m_shardproof_is_the_command_line_and_calls_itself_shardproof():
    assert printed("shardproof", "--version") == f"shardproof {shardproof.__version__}\n"
    assert printed("shardproof", "--help").startswith("usage: shardproof VERB")
    assert printed("shardproof", "presets", "--help").startswith("usage: shardproof presets ")
    wide = {**os.environ, "COLUMNS": "200"}
    command = [sys.executable, "-m", "shardproof", "presets", "--no-such"]
    wrong = subprocess.run(command, capture_output=True, text=True, env=wide)
    assert wrong.returncode == 2 and wrong.stderr.splitlines()[-1].startswith("shardproof presets: ")
