"""Names from outside in what is printed: no line of their own, no control of the terminal, no command of GitHub's."""

from __future__ import annotations

import io

import pytest

from shardproof.core.base.findings import ProofFailed
from shardproof.core.base.names import LONGEST_LINE, is_plain, one_line, printable, shortened
from shardproof.core.base.terminal import say
from shardproof.core.commands.cli import main


@pytest.mark.parametrize("letter", ["\n", "\r", "\0", "\x1b", "\x7f", "\x85", "\u2028", "\u202e", "\ud800"])
def test_what_is_not_seen_becomes_an_escape(letter: str) -> None:
    assert (
        not is_plain(f"a{letter}b") and is_plain(one_line(f"a{letter}b")) and one_line(f"a{letter}b").startswith("a\\")
    )
    assert printable(f"a{letter}b") == ("a\nb" if letter == "\n" else one_line(f"a{letter}b"))


@pytest.mark.parametrize("name", ["llama3-8b", "Modèle 模型 🙂", "a\tb", "C:\\x", "100%"])
def test_usual_names_stay_as_they_are(name: str) -> None:
    assert is_plain(name) and one_line(name) == printable(name) == shortened(name) == name


LINES = [
    "::error::x",
    "  ::add-mask::x",
    "\t::stop-commands::x",
    ("\u00a0::set-env name=A::b"),
    "::::",
    "a ##[error]x",
    "##[##[",
]


@pytest.mark.parametrize("line", LINES)
def test_no_line_is_a_command(line: str) -> None:
    said = printable(f"first\n{line}\nlast")
    assert said.count("\n") == 2 and "##[" not in said
    assert not any(each.lstrip().startswith("::") for each in said.split("\n"))


def test_say_prints_no_command_and_no_control() -> None:
    stream = io.StringIO()
    say("model\n::error::x \x1b[2J##[error]y", stream)
    assert stream.getvalue() == "model\n\\::error::x \\x1b[2J#\\#[error]y\n"


def test_the_text_of_a_failed_proof_is_printable() -> None:
    assert str(ProofFailed("model\n::error::x ##[error]y", ())) == "model\n\\::error::x #\\#[error]y"


def test_long_lines_are_cut_in_the_middle_alone() -> None:
    text = f"short\n{'a' * 700}{'b' * 5000}{'c' * 400}\nshort"
    first, long, last = shortened(text).split("\n")
    assert (first, last) == ("short", "short") and len(long) < LONGEST_LINE
    assert long.startswith("a" * 600 + " ... 5200 characters ... ") and long.endswith("c" * 300)
    assert shortened("a" * LONGEST_LINE) == "a" * LONGEST_LINE


def test_a_message_of_many_lines_ends_with_how_many_follow() -> None:
    reported = shortened("\n".join(f"problem {i}" for i in range(5000))).split("\n")
    assert reported == [*(f"problem {i}" for i in range(110)), "... and 4,890 more lines."]


def test_a_plan_called_like_a_command_prints_none(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "::error::x.toml").write_text('[model]\npreset = "tiny-gpt"\n\n[layout]\ntp = "##[error]y"\nqq = 1\n')
    assert main(["fit", "--format", "github", "::error::x.toml"]) == 2
    output, error = capsys.readouterr()
    assert error.count("\n") >= 2 and "\n\\::error::x.toml:6" in error and "##[" not in error and "\n::" not in error
    assert all(line.startswith("::error ") and "title=shardproof fit::" in line for line in output.splitlines())


def test_a_model_called_like_a_command_prints_none(tmp_path, capsys) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[model]\npreset = "gpt3-175b"\nname = "##[error]x"\n')
    options = ("--cluster", "dgx-a100-80g", "--devices", "8", "--set", "batch.global=8", "--set", "batch.sequence=2048")
    assert main(["fit", "--format", "github", str(plan), *options]) == 1
    output, error = capsys.readouterr()
    reported = [line for line in (output + error).splitlines() if "##[" in line]
    assert all(line.startswith("::") for line in reported)
