"""Damaged files of every kind, and damaged `--set`: each ends with exit code 0, 1 or 2 and short sentences.

At length, in processes with limits on time and memory: `python benchmarks/fuzz.py`. What failed
once is in `tests/data/fuzz`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from random import Random

import pytest

import shardproof
from helpers.paths import DATA

BENCHMARKS = Path(shardproof.__file__).parent / "benchmarks"
CORPUS = sorted((DATA / "fuzz").glob("*.json"))
NUM_INPUTS = 200


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


inputs = load("fuzz_inputs")
fuzz = load("fuzz")


@pytest.fixture(scope="module")
def sound():
    return fuzz.make_sound()


@pytest.mark.parametrize("kind", inputs.KINDS)
def test_damaged_input_ends_with_a_short_message_and_no_traceback(kind, sound, tmp_path):
    for number in range(NUM_INPUTS // len(inputs.KINDS)):
        given = inputs.make_input(20261123, number, sound, kind)
        folder = tmp_path / str(number)
        folder.mkdir()
        outcome = fuzz.run_here(given, folder)
        assert outcome.code in (0, 1, 2) and not list(outcome.complaints(given)), (number, outcome.error[-2000:])


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.stem)
def test_what_failed_once_ends_with_exit_code_2_and_one_sentence(file, tmp_path):
    given = inputs.Input.from_json(file.read_text(encoding="utf-8"))
    outcome = fuzz.run_here(given, tmp_path)
    assert outcome.code == 2 and not list(outcome.complaints(given)), (outcome.code, outcome.error)
    sentences = outcome.error.splitlines()  # what a cell of a schedule is has a line of its own
    assert len(sentences) <= 1 + ("Write <stage>" in outcome.error) and len(outcome.error) <= fuzz.LONGEST_LINE + 50, (
        outcome.error
    )


LARGE = {
    "nested JSON": ("simulate --model config.json", {"config.json": b'{"a":' * 100_000}),
    "nested TOML": ("fit plan.toml", {"plan.toml": b"[model]\nname = " + b"[" * 100_000}),
    "nested tables": (
        "verify s.csv --facts f.toml",
        {"s.csv": inputs.CSV, "f.toml": b"[buffers]\noutputs = " + b"{a=" * 2000},
    ),
    "long integer": ("fit --model tiny-gpt --set layout.tp=" + "9" * 5000, {}),
    "bomb": ("draw t.timeline.json.gz", {"t.timeline.json.gz": inputs.bomb(gibibytes=1)}),
    "unknown keys": (
        "fit plan.toml",
        {"plan.toml": b"[layout]\n" + b"".join(b"key_%d = 1\n" % i for i in range(100_000))},
    ),
    "sections": ("fit plan.toml", {"plan.toml": b"".join(b"[sec_%d]\n" % i for i in range(50_000))}),
    "modules": ("verify plan.toml", {"plan.toml": b"".join(b'[[modules]]\nname = "%d"\n' % i for i in range(50_000))}),
    "pipe": ("fit plan.toml", {"plan.toml": "fifo"}),
    "device": ("draw s.csv", {"s.csv": "device"}),
    "loop": ("simulate --model config.json", {"config.json": "loop"}),
    "folder": ("draw t.timeline.json", {"t.timeline.json": "folder"}),
    "a rank too many": (
        "verify a --against a",
        {"a/rank-0.jsonl": (b'{"format": 3, "rank": 0, "world_size": 1000000000}\n')},
    ),
}


# a gigabyte is unpacked in tens of seconds
@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.full] * (each == "bomb")) for each in LARGE])
def test_files_without_end_are_refused_in_one_sentence(name, tmp_path):
    words, files = LARGE[name]
    given = inputs.Input(name, tuple(words.split()), files)
    outcome = fuzz.run_here(given, tmp_path)
    assert outcome.code == 2 and not list(outcome.complaints(given)), (outcome.code, outcome.error)
    assert len(outcome.error.splitlines()) == 1, outcome.error


def test_the_same_numbers_make_the_same_input(sound):
    for kind in inputs.KINDS:
        first, second = (inputs.make_input(7, 3, sound, kind) for _ in range(2))
        assert first == second and inputs.Input.from_json(first.to_json()) == first
    assert len({inputs.make_input(0, number, sound).to_json() for number in range(55)}) > 50


def test_damage_changes_most_trees_and_leaves_the_original_alone():
    tree = json.loads(json.dumps(inputs.WIDE))
    changed = [inputs.damaged_tree(Random(number), tree) for number in range(50)]
    assert tree == json.loads(json.dumps(inputs.WIDE)) and sum(each != tree for each in changed) > 40


def outcome_of(code: int = 2, error: str = "", output: str = "", seconds: float = 0.0, num_bytes: int = 0):
    return fuzz.Outcome(code, output, error, seconds, num_bytes)


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (
            outcome_of(3, "shardproof fit: KeyError: 'a', in read (tree.py:42: b[a])."),
            ("exit code 3: KeyError in read (tree.py:42)"),
        ),
        (outcome_of(70, "Traceback (most recent call last):\nKeyError: 5"), "uncaught: KeyError: N at no place"),
        (outcome_of(-11), "signal 11"),
        (outcome_of(-9), "more than 10 s"),
        (outcome_of(0, num_bytes=3 * 10**9), "more than 2 GB"),
        (outcome_of(2), "exit code 2 without a word"),
        (outcome_of(0, "/a/b.py:7: RuntimeWarning: overflow"), "RuntimeWarning at b.py:7"),
        (outcome_of(2, "x" * 2000), "message of 1 lines, up to 2000 characters: " + "x" * 60),
        (outcome_of(1, output="fine\n  ::add-mask::x"), "workflow command: ::add-mask::x"),
        (outcome_of(1, "model ##[error]x"), "workflow command: model ##[error]x"),
        (outcome_of(2, "a \x1b[2J"), "control characters printed: a \\xNb[NJ"),
    ],
)
def test_what_should_not_happen_is_reported(outcome, said):
    given = inputs.Input("plan", ("fit", "plan.toml", *inputs.GITHUB), {})
    assert [each.replace("  ", "") for each in outcome.complaints(given)] == [said]


def test_annotations_of_ours_are_no_complaint():
    given = inputs.Input("plan", ("fit", "plan.toml", *inputs.GITHUB), {})
    ours = "::error file=a.toml,line=3,title=shardproof fit::text ##[error]"
    assert list(outcome_of(1, output=ours).complaints(given)) == []
