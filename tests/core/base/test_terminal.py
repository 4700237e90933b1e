"""Text within the terminal's width: what is printed has no line that a terminal would break, and loses nothing."""

from __future__ import annotations

import fcntl
import importlib.util
import itertools
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from io import StringIO

import pytest

from helpers.paths import ROOT
from shardproof.backend.base.step_result import StepResult
from shardproof.backend.monitoring.lines import Lines
from shardproof.benchmarks.published.validation.table import Table, to_text
from shardproof.core.base.terminal import NARROWEST, command_text, fitted, ranking, table, width_of
from shardproof.core.commands.cli import main
from shardproof.core.commands.commands import QUESTIONS, command
from shardproof.core.plan.keys import KEYS
from shardproof.core.plan.stacks import STACKS

WIDTHS = (60, 80, 100, 132)
EIGHT_B = "--model llama3-8b --cluster dgx-h100 --devices 8"
COMMANDS = {
    "--help": 0,
    "nothing": 2,
    "presets": 0,
    "presets keys": 0,
    "presets profiles": 0,
    "presets dgx-h100": 0,
    "presets gpt4": 2,
    f"fit {EIGHT_B} --tp 4 --pp 2": 0,
    f"fit {EIGHT_B} --tp 4 --pp 2 --profile megatron --set layout.tpp=2 --set train.steps=-1": 2,
    f"simulate {EIGHT_B} --tp 4 --pp 2 --sensitivity": 0,
    "simulate examples/encoder_decoder.toml": 0,
    f"plan {EIGHT_B} --global-batch 16 --sequence 2048 --tp 2 --micro-batch 1": 0,
    f"plan {EIGHT_B} --global-batch 16 --sequence 2048 --tp 3": 2,
    "plan examples/encoder_decoder.toml": 2,
    "simulate --model llama3-70B": 2,
    "draw examples/llama70b_512.toml": 0,
    "draw examples/encoder_decoder.toml --no-memory": 0,
    "verify examples/tiny_tp2_pp2_dp2.toml": 0,
    "verify broken.csv": 1,
    "verify --list": 0,
    "verify examples/tiny_tp2_pp2_dp2.toml --transport gloo --only AB01": 2,
    "train examples/llama70b_512.toml": 2,
    "demo --qiuck": 2,
    "calibrate --quantile 7": 2,
}
"""Command -> its exit code."""


@pytest.fixture(scope="module")
def check_readme():
    spec = importlib.util.spec_from_file_location("check_readme", ROOT / "docs" / "check_readme.py")
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as end:  # argparse's own way to end
        return int(end.code or 0)


def too_long(text: str, width: int) -> list[str]:
    """Lines that a terminal would break, those apart whose first word is longer than that: paths and
    addresses stay whole."""
    return [line for line in text.splitlines() if len(line) > width and " " in line.strip()]


@pytest.mark.parametrize("words", COMMANDS)
def test_no_line_is_longer_than_the_terminal_and_nothing_is_lost(words, monkeypatch, capsys, tmp_path):
    (tmp_path / "broken.csv").write_text("0F0,0F1,1B0\n1F0,1B0\n" * 8)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    values = []
    for width in (None, *WIDTHS):
        if width is not None:
            monkeypatch.setenv("COLUMNS", str(width))
        assert run(shlex.split(words)) == COMMANDS[words]
        printed = capsys.readouterr()
        text = printed.out + printed.err
        assert text.strip()
        assert width is None or too_long(text, width) == []
        values.append(set(re.findall(r"\d[\w.]*\w|\d", re.sub(r"\bin\s+[\d.]+ m?s\b", "", text))))
    assert words.startswith("draw") or all(found == values[0] for found in values), (
        "a narrower terminal shows other values"
    )


@pytest.mark.parametrize("verb", sorted(QUESTIONS))
@pytest.mark.parametrize("width", WIDTHS)
def test_help_fits_and_its_example_can_be_copied(verb, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    assert run([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert too_long(text, width) == []
    assert shlex.split(text.partition("example:\n")[2].replace("\\\n", " ")) == shlex.split(command(verb).example)


@pytest.mark.parametrize("columns", (60, 132))
def test_a_terminal_is_asked_for_its_width(columns):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    call = [sys.executable, "-m", "shardproof", "presets", "profiles"]
    with subprocess.Popen(call, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        text = b""
        while True:
            try:
                text += (part := os.read(ours, 4096))
            except OSError:  # EIO: the other end is closed
                break
            if not part:
                break
    os.close(ours)
    lines = text.decode().splitlines()
    assert process.returncode == 0 and all(name in text.decode() for name in STACKS)
    assert columns - 24 < max(map(len, lines)) <= columns


def test_a_pipe_has_no_width_and_columns_counts_before_all(monkeypatch):
    assert width_of(StringIO()) is None
    for reported, width in (
        ("80", 80),
        ("7", NARROWEST),
        ("0", None),
        ("-3", None),
        ("wide", None),
        ("9" * 5000, None),
        ("", None),
    ):
        monkeypatch.setenv("COLUMNS", reported)
        assert width_of(StringIO()) == width, reported


def test_sentences_are_wrapped_below_their_indent_and_commands_and_long_words_stay_whole():
    assert fitted("  one two three four", 11) == "  one two\n    three\n    four"
    assert fitted("run `shardproof presets keys` now", 28) == "run\n  `shardproof presets keys`\n  now"
    assert fitted("see /a/path/longer/than/all/of/it there", 12) == "see\n  /a/path/longer/than/all/of/it\n  there"
    assert fitted("two  spaces\n\nstay", 80) == "two  spaces\n\nstay"
    assert command_text("shardproof fit --tp 4 --pp 2", 20) == "  shardproof fit \\\n      --tp 4 --pp \\\n      2"


PROSE = "a sentence of more than twenty-four letters"


def test_a_table_wraps_sentences_and_then_stacks_columns():
    rows = [("a", "1", PROSE), ("bb", "2", "short")]
    assert table(rows, None) == [f"  a   1  {PROSE}", "  bb  2  short"]
    assert table(rows, 40) == ["  a   1  a sentence of more than", "         twenty-four letters", "  bb  2  short"]
    assert table([("number", "12345678", "87654321")] * 2, 24) == ["  number  12345678", "      87654321"] * 2
    assert table([], 40) == []


def test_a_ranking_says_once_what_all_have_in_common_where_it_is_too_wide():
    header, rows = (
        ("", "step", "schedule", "micro"),
        [("1", "8.011 s", "InterleavedZeroBubble", "4"), ("2", "8.1 s", "1F1B", "4")],
    )
    assert ranking(header, rows, 44)[0].split() == ["step", "schedule", "micro"]
    narrower = ranking(header, rows, 40)
    assert narrower[0].split() == ["step", "schedule"] and narrower[-1] == "All of them: micro 4."
    assert max(map(len, ranking(header, rows, 34))) == 33, "narrower gaps"
    assert ranking(header, rows[:1], 40)[0].split() == ["step", "schedule", "micro"], (
        "one alternative has nothing in common with others"
    )


def test_tables_of_the_validation_fit():
    wide = Table("Name", "", tuple(f"column {i}" for i in range(20)), (tuple(str(i) * 9 for i in range(20)),))
    text = to_text(wide, 60)
    assert too_long(text, 60) == [] and all(str(i) * 9 in text for i in range(20))


def test_profile_names_are_listed_once(capsys):
    assert main(["presets", "keys"]) == 0
    keys = capsys.readouterr().out
    assert "a name of `shardproof presets profiles`" in keys and keys.count("megatron-deepspeed-2023") == 0
    assert len(keys.splitlines()) == len(KEYS)


def test_a_file_is_the_same_from_every_terminal(monkeypatch, tmp_path, capsys):
    texts = []
    for width in ("60", "132"):
        monkeypatch.setenv("COLUMNS", width)
        assert main(["verify", str(ROOT / "examples/tiny_tp2_pp2_dp2.toml"), "-o", str(tmp_path / "printed.txt")]) == 0
        texts.append((tmp_path / "printed.txt").read_text())
    assert texts[0] == texts[1] and max(map(len, texts[0].splitlines())) > 132
    assert capsys.readouterr().out


def test_a_line_of_training_fits(monkeypatch, capsys):
    step = StepResult(
        step=98, loss=3.25, num_tokens=10**9, elapsed_s=0.5, grad_norm=1.5, skipped=True, loss_scale=2.0**16
    )
    lines_of_run = Lines(100, 1)
    lines_of_run.add(step, {})
    (whole,) = capsys.readouterr().err.splitlines()
    monkeypatch.setenv("COLUMNS", "60")
    lines_of_run.add(step, {})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and too_long("\n".join(lines), 60) == [] and " ".join(lines).split() == whole.split()


def test_annotations_of_github_stay_on_one_line(monkeypatch, capsys, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[model]\npreset = "tiny-gpt"\n[layout]\ntpp = 2\n[batch]\nglobal = 4\nsequence = 32\n')
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["fit", str(path), "--format", "github"]) == 2
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1 and "did you mean 'tp'?" in printed.out and too_long(printed.err, 60) == []


COOKBOOK = sorted((ROOT / "docs" / "cookbook").glob("*.md"))


def test_readme_and_cookbook_show_what_an_80_column_terminal_shows(check_readme):
    assert set(COOKBOOK) <= set(check_readme.PAGES) and len(COOKBOOK) >= 6
    blocks = check_readme.blocks((ROOT / "README.md").read_text())
    assert len(blocks) >= 4 and any(block.is_cheap for block in blocks)
    for block in itertools.chain(*(check_readme.blocks(page.read_text()) for page in check_readme.PAGES)):
        assert too_long(f"$ {block.written}\n{block.shown}", 80) == [], block.command
        assert shlex.split(block.command)[0] == "shardproof"


@pytest.mark.parametrize("name", ["README.md", "docs/cookbook/megatron_script.md"])
def test_cheap_commands_of_the_first_pages_print_what_they_say(check_readme, name, tmp_path):
    assert check_readme.run_page(ROOT / name, tmp_path, everything=False) == []


@pytest.mark.full
@pytest.mark.parametrize("page", COOKBOOK, ids=lambda page: page.stem)
def test_pages_of_the_cookbook_print_and_make_what_they_say(check_readme, page, tmp_path):
    assert check_readme.run_page(page, tmp_path, everything=True) == []


def test_a_page_of_a_long_search_draws_its_own_plan(check_readme, tmp_path, capsys):
    assert all(f"]({page.stem}.svg)" in page.read_text() and page.with_suffix(".toml").exists() for page in COOKBOOK)
    assert check_readme.run_page(ROOT / "docs" / "cookbook" / "qwen3_235b_128.md", tmp_path, everything=False) == []
    assert re.findall("not run|as .* says", capsys.readouterr().out) == ["not run", "as qwen3_235b_128.md says"]


def test_a_page_whose_plan_is_not_what_its_commands_make_is_found(check_readme, tmp_path):
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    folder.mkdir()
    page.write_text("```console\n$ shardproof draw examples/tiny_tp2_pp2_dp2.toml -o step.svg\n```\n")
    page.with_suffix(".svg").write_text("<svg/>")
    assert check_readme.run_page(page, folder, everything=False) == [
        "page.svg is not what the commands write as step.svg"
    ]


def test_check_readme_compares_all_but_times_and_what_is_left_out(check_readme):
    (block,) = check_readme.blocks("```console\n$ shardproof a \\\n    --b\none\n...\nfour, in 1.9 s\n```\n")
    assert block.command == "shardproof a --b" and block.is_cheap and not block.is_whole
    assert block.matches("one\ntwo\nthree\nfour, in 20 ms\n")
    assert not block.matches("one\nfour, in 20 ms more\n") and not block.matches("two\nfour, in 1.9 s\n")
    (slow,) = check_readme.blocks("```console\n$ shardproof verify x --dynamic\n```\n")
    assert not slow.is_cheap
