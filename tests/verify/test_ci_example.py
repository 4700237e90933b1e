"""`examples/ci`: a project with folders called `backend` and `viz`, tested as its own workflow tests
it, right and broken."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardproof

EXAMPLE = Path(shardproof.__file__).parent / "examples" / "ci"
COMMANDS = re.findall(r"- run: (.*)", (EXAMPLE / ".github" / "workflows" / "proofs.yml").read_text())
PYTEST_OPTIONS = "-p no:cacheprovider -p no:hypothesispytest -p no:anyio -p no:timeout --assert=plain"
"""Without the plugins that this environment has and the workflow's has not, and without values in messages of `assert`,
for which pytest would compile all of this package anew."""
PROGRAMS = {"shardproof": (sys.executable, "-m", "shardproof"), "python": (sys.executable,)}


def run(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A line of the workflow in a folder, with the interpreter of this test run; nothing is written there."""
    program, *rest = shlex.split(command)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GITHUB_"))}
    environment = {**clean, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": PYTEST_OPTIONS, **variables}
    return subprocess.run(
        [*PROGRAMS[program], *rest],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy, to break."""
    return Path(shutil.copytree(EXAMPLE, tmp_path / "project"))


def test_the_workflow_is_three_lines_and_all_of_them_pass() -> None:
    install, *commands = COMMANDS
    assert install.startswith("pip install") and len(commands) == 2
    for command in commands:
        done = run(command, EXAMPLE, GITHUB_ACTIONS="true")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "::error" not in done.stdout
    assert "4 passed" in done.stdout


OTHER_SCHEDULE = """

def test_our_other_schedule():
    assert_schedule(ROOT / "other.csv")
"""


def test_a_broken_layer_and_broken_schedules_are_annotated_where_they_are(project: Path) -> None:
    """The layer takes a mean over the features of its own rank only; schedules leave a backward out. The
    tests run in a worker."""
    block, schedule, tests = (
        project / "backend" / "block.py",
        project / "schedule.csv",
        project / "tests" / "test_training.py",
    )
    block.write_text(
        block.read_text().replace("self.up(normed))", ("(up := self.up(normed)) - up.mean(-1, keepdim=True))"))
    )
    broken = schedule.read_text().replace("1B2,", "")
    (project / "other.csv").write_text(broken)
    tests.write_text(tests.read_text() + OTHER_SCHEDULE)
    failed = run(f"{COMMANDS[2]} -n 1", project, GITHUB_ACTIONS="true", GITHUB_WORKSPACE=str(project.parent))
    assert failed.returncode == 1 and "2 failed, 3 passed" in failed.stdout, failed.stdout + failed.stderr
    layer, other = sorted(
        (line for line in failed.stdout.splitlines() if line.startswith("::error")), key=lambda line: "other" in line
    )
    assert layer.startswith("::error file=project/plan.toml,line=10,title=shardproof%3A bits-differ::step 1, rank")
    assert "layers.0.output" in layer
    assert other.startswith("::error file=project/other.csv,line=2,title=shardproof%3A missing-backward::rank 1")

    schedule.write_text(broken)
    failed = run(COMMANDS[1], project, GITHUB_ACTIONS="true")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "::error file=schedule.csv,line=2,title=shardproof%3A missing-backward::rank 1" in failed.stdout


OWN_SUITE = """
import sys

import pytest

TOO_LARGE = "[model]\\npreset = 'gpt3-175b'\\n[cluster]\\nnum_devices = 8\\n[batch]\\nglobal = 8\\nsequence = 2048\\n"

def test_nothing_is_loaded():
    assert not {"numpy", "torch", "shardproof.verify"} & set(sys.modules)

def test_schedule(assert_schedule):
    assert_schedule("0F0,0B0\\n1F0,1B0\\n")

def test_plan(assert_fits):
    with pytest.raises(AssertionError, match="does not fit"):
        assert_fits(TOO_LARGE)
"""
WITHOUT_FIXTURES = """
from shardproof import assert_schedule

def test_wrong():
    assert_schedule("0F0\\n1F0\\n")
"""


def test_fixtures_need_no_import_and_without_the_plugin_the_functions_are_there(tmp_path: Path) -> None:
    suite = tmp_path / "test_own.py"
    suite.write_text(OWN_SUITE)
    done = run("python -m pytest -W error -q", tmp_path)
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    suite.write_text(WITHOUT_FIXTURES)
    done = run("python -m pytest -W error -q -p no:shardproof", tmp_path, GITHUB_ACTIONS="true")
    assert "missing-backward at rank 0" in done.stdout and "1 failed" in done.stdout and "::error" not in done.stdout
