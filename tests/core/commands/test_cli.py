"""The command line: exit codes, messages and where they go."""

import json
import os
import subprocess
import sys

import pytest

from helpers.paths import ROOT
from shardproof import __version__
from shardproof.core.base.errors import (
    TRACEBACK_VARIABLE,
    DivergedError,
    RankDefect,
    RankFailure,
    UnknownNameError,
)
from shardproof.core.commands.cli import exit_code, main
from shardproof.core.commands.commands import QUESTIONS, Command, command, service
from shardproof.core.machine.cluster_presets import CLUSTER_PRESETS
from shardproof.core.model.model_presets import MODEL_PRESETS
from shardproof.core.plan.keys import KEYS
from shardproof.core.schedule import CATALOG


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"shardproof {__version__}\n"


def test_help_lists_every_verb_and_exits_0_but_nothing_at_all_is_wrong_usage(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in QUESTIONS)
    assert main([]) == 2


def test_an_unknown_verb_exits_2_and_offers_the_closest(capsys):
    assert main(["simulat"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "unknown verb 'simulat'; did you mean 'simulate'?" in captured.err


def test_an_unknown_option_exits_2(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["presets", "--jsno"])
    assert caught.value.code == 2
    assert "--jsno" in capsys.readouterr().err


def test_wrong_usage_is_reported_in_a_sentence_with_the_closest_option(capsys):
    for arguments, words in (
        (
            ["plan", "--jsno"],
            ("shardproof plan: unrecognized arguments: --jsno; did you mean '--json'? See `shardproof plan --help`.\n"),
        ),
        (
            ["fit", "--tp", "x"],
            ("shardproof fit: argument --tp: 'x' is not a whole number of some digits. See `shardproof fit --help`.\n"),
        ),
        (["fit", "a.toml", "b.toml"], "shardproof fit: unrecognized arguments: b.toml. See `shardproof fit --help`.\n"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert (caught.value.code, capsys.readouterr().err) == (2, words)


@pytest.mark.parametrize("verb", ["simulate", "fit", "draw", "presets"])
def test_the_example_of_a_verb_runs_in_an_empty_folder(verb, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    name, *arguments = command(verb).example.split()
    assert (name, main(arguments)) == ("shardproof", 0)


def test_an_unknown_model_is_answered_by_the_closest_and_by_where_all_are_listed(capsys):
    assert main(["fit", "--model", "llama3-70B"]) == 2
    reported = f"did you mean 'llama3-70b'? `shardproof presets models` lists the {len(MODEL_PRESETS)} known ones.\n"
    assert capsys.readouterr().err.endswith(reported)
    assert main(["presets", "models"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(MODEL_PRESETS)


def test_a_search_says_that_it_takes_no_modules(capsys):
    assert main(["plan", str(ROOT / "examples/encoder_decoder.toml")]) == 2
    reported = capsys.readouterr().err
    assert (
        "here [[modules]] have no meaning. They are taken by fit, simulate, verify, draw and train."
    ) in reported and reported.count("modules") == 1


def test_help_of_a_verb_has_an_example(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["presets", "--help"])
    assert caught.value.code == 0
    assert "example:\n  shardproof presets dgx-h100" in capsys.readouterr().out


def test_presets_lists_models_clusters_and_schedules(capsys):
    assert main(["presets"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*MODEL_PRESETS, *CLUSTER_PRESETS, *CATALOG))


def test_presets_as_json_is_one_object(capsys):
    assert main(["presets", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"models", "clusters", "schedules", "profiles", "keys"}
    assert (report["keys"]["layout.zero"]["legal"], report["keys"]["layout.zero"]["default"]) == (
        ("int, at least 0, at most 3"),
        0,
    )
    assert report["models"]["gpt2"]["num_parameters"] == 124_439_808
    assert report["clusters"]["dgx-h100"]["peak_flops_per_s"]["bf16"] == 989.4e12


def test_one_preset_is_shown_with_its_sources(capsys):
    assert main(["presets", "dgx-h100"]) == 0
    assert "NVIDIA H100 Tensor Core GPU datasheet" in capsys.readouterr().out


def test_all_keys_of_a_plan_file_are_listed(capsys):
    assert main(["presets", "keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [key.dotted for key in KEYS]
    assert any(
        "precision.dtype" in line and "fp32 | bf16 | fp16 | fp8" in line and "default bf16" in line for line in lines
    )


def test_an_unknown_preset_exits_2_and_offers_the_closest(capsys):
    assert main(["presets", "dgx-h10"]) == 2
    assert "did you mean 'dgx-h100'?" in capsys.readouterr().err


def test_a_plan_with_an_unknown_key_exits_2_with_its_line_and_prints_nothing_else(tmp_path, capsys):
    path = tmp_path / "plan.toml"
    path.write_text('[model]\npreset = "tiny-gpt"\n[layout]\ntpp = 2\n[batch]\nglobal = 4\nsequence = 32\n')
    assert main(["simulate", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{path}:4: unknown key 'tpp' in [layout]; did you mean 'tp'?" in captured.err


def test_a_missing_plan_exits_2_and_names_it(capsys):
    assert main(["simulate", "nowhere.toml"]) == 2
    assert "nowhere.toml: No such file or directory." in capsys.readouterr().err


def _code(arguments):
    """The exit code, which the parser of options raises."""
    try:
        return main(arguments)
    except SystemExit as leave:
        return leave.code


TINY = ["--model", "tiny-llama", "--sequence", "64", "--global-batch", "8", "--devices", "4", "--cluster", "dgx-h100"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", *TINY, "-o", "nowhere/x.json"], "nowhere/x.json: there is no folder nowhere. Make it"),
        (["simulate", *TINY, "-o", ""], "argument -o/--output: it is empty."),
        (["simulate", *TINY, "--links", "nowhere/x.graphml"], "there is no folder nowhere"),
        (["simulate", *TINY, "--samples", "-3"], "--samples: samples = -3 must be at least 0"),
        (["simulate", *TINY, "--from", "megatron"], "--from says how PLAN is read, and there is no PLAN"),
        (["simulate", *TINY, "--variable", "TP=2"], "--variable says how PLAN is read, and there is no PLAN"),
        (["simulate", "-"], "-: standard input is not read. Give the name of a file."),
        (["simulate", ""], "argument PLAN: it is empty. In a script, look whether its variable is set."),
        (["plan", *TINY, "-o", "nowhere/x.toml"], "there is no folder nowhere"),
        (["plan", *TINY, "-o", "x.csv"], "writes .json, .txt, .toml, .svg or .png, not .csv"),
        (["plan", *TINY, "--fix", "tp"], "--fix 'tp': write KEY=VALUE, such as --fix tp=8."),
        (["plan", *TINY, "--fix", "tpp=2"], "--fix tpp: unknown key 'tpp' in [layout]; did you mean 'tp'?"),
        (["check", *TINY, "--picture", "nowhere/x.svg"], "there is no folder nowhere"),
        (["export", *TINY, "--to", "csv", "-o", ""], "argument -o/--output: it is empty."),
        (["export", *TINY, "--to", "slurm", "-o", "nowhere/job/"], "there is no folder nowhere"),
        (["verify", *TINY, "--dynamic", "-o", "nowhere/x.json"], "there is no folder nowhere"),
        (["verify", *TINY, "--steps", "5"], "--steps is an option of the dynamic proof. Add --dynamic."),
        (["verify", *TINY, "--transport", "shm"], "--transport is an option of the dynamic proof. Add --dynamic."),
        (["doctor", "-o", "nowhere/x.json"], "there is no folder nowhere"),
        (["demo", "-o", ""], "argument -o/--output: it is empty."),
        (["tokenize", "a.txt", "--tokenizer", "bytes", "-o", "-"], "-o -: tokens are three files"),
        (["simulate", *TINY, "--links", ""], "argument --links: it is empty."),
        (["tokenize", "a.txt", "", "--tokenizer", "bytes", "-o", "x"], "argument FILES: it is empty."),
        (["train", *TINY, "--save-huggingface", ""], "argument --save-huggingface: it is empty."),
        (["verify", ""], "argument PLAN: it is empty. In a script, look whether its variable is set."),
    ],
)
def test_what_cannot_be_done_is_said_before_any_work_and_nothing_is_written(
    arguments, words, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    assert _code(arguments) == 2
    captured = capsys.readouterr()
    assert words in " ".join(captured.err.split()) and captured.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("closed", ["1>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_are_as_if_nobody_read_them_and_stay_out_of_files(closed, tmp_path):
    command = f"{sys.executable} -m shardproof presets gpt2 -o out.json {closed}"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, check=False).returncode == 0
    assert json.loads((tmp_path / "out.json").read_text())


def test_an_exported_file_goes_to_standard_output_by_a_dash(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["export", *TINY, "--to", "csv", "-o", "-"]) == 0
    assert capsys.readouterr().out.startswith("0F0,")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_exported_to_is_made_where_its_name_says_so(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["export", *TINY, "--to", "slurm", "-o", "job/"]) == 0
    assert {path.name for path in (tmp_path / "job").iterdir()} == {"train.sbatch", "plan.toml"}


def test_an_unknown_service_is_named():
    with pytest.raises(UnknownNameError, match="did you mean 'simulate'"):
        service("simulat")


def failing_command(monkeypatch, error) -> None:
    """Puts a verb in place of `presets` that raises."""

    def run(args):
        raise error

    monkeypatch.setattr(
        "shardproof.core.commands.cli.command", lambda name: Command(name, "", lambda parser: None, run)
    )


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyError(0), 3, "KeyError: 0, in run (test_cli.py:"),
        (AssertionError(), 3, "AssertionError without a message, in run (test_cli.py:"),
        (
            RankDefect("rank 1 failed: KeyError: 0", 1),
            3,
            ("rank 1 failed: KeyError: 0. This is a defect of shardproof: please report"),
        ),
        (RankFailure("rank 1 was killed by SIGKILL", 1), 2, "rank 1 was killed by SIGKILL\n"),
        (OSError(28, "No space left on device"), 2, "No space left on device.\n"),
        (MemoryError("8 GiB"), 2, "this machine has not enough memory for that: 8 GiB.\n"),
        (DivergedError("the loss is nan."), 2, "the loss is nan.\n"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else "",
)
def test_a_defect_of_ours_exits_3_and_what_users_and_machines_cause_2_with_one_message(
    monkeypatch, capsys, error, code, words
):
    failing_command(monkeypatch, error)
    assert main(["presets"]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"shardproof presets: {words}")
    assert "Traceback" not in captured.err and captured.err.count("\n") == 1
    assert ("SHARDPROOF_TRACEBACK=1 prints it" in captured.err) == (code == 3)


def test_the_traceback_of_a_defect_is_printed_where_it_is_asked_for(monkeypatch, capsys):
    failing_command(monkeypatch, KeyError(0))
    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    assert main(["presets"]) == 3
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("Traceback (most recent call last):")
    assert captured.err.splitlines()[-1].startswith("shardproof presets: KeyError: 0, in run (")


def test_other_doors_have_the_same_exit_codes(capsys):
    assert exit_code("python -m somewhere", lambda: 1) == 1
    assert exit_code("python -m somewhere", lambda: {}[0]) == 3
    assert capsys.readouterr().err.startswith("python -m somewhere: KeyError: 0, in <lambda> (test_cli.py:")


def test_help_and_presets_import_neither_torch_nor_networkx_nor_matplotlib():
    program = (
        "import sys; from shardproof.core.commands.cli import main; main(['--help']); main(['presets']);"
        "sys.exit(' '.join({'torch', 'networkx', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["presets"]])
def test_a_reader_that_leaves_early_ends_the_command_quietly(arguments):
    command = [sys.executable, "-m", "shardproof", *arguments]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
