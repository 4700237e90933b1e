"""Numbers far beyond any run are refused where they are read, with the bound, whatever the key."""

from __future__ import annotations

import time

import pytest

from shardproof.core.base.bounds import DEVICES, beyond, shown
from shardproof.core.base.errors import ModelError, PlanError
from shardproof.core.commands.cli import main
from shardproof.core.layout.stages import num_mtp_written
from shardproof.core.model.huggingface import model_from_config
from shardproof.core.plan.keys import KEYS, Key
from shardproof.core.plan.plan import build_plan
from shardproof.core.plan.sections import Batch
from shardproof.core.plan.toml import Given

WHOLE = (10**5000, 10**30, 2**63, 2**40, 2**31, -1, -(10**30))
REAL = (1e308, -1e308, float("nan"), float("inf"), 5e-324)
TINY = {
    "model": {"preset": "tiny-llama"},
    "layout": {"tp": 2, "pp": 2, "dp": 1},
    "batch": {"global": 4, "sequence": 64},
    "precision": {"dtype": "fp32"},
}
SMALL = ["--model", "tiny-llama", "--devices", "1", "--sequence", "64"]


def absurd(key: Key) -> list[object]:
    """Absurd values of the key's type, and of others."""
    numbers: list[object] = [*WHOLE, *REAL]
    wrapped = {
        "two floats": lambda n: [n, n],
        "list of ints": lambda n: [n],
        "table of rates": lambda n: {"bf16": n, "device-0": n},
    }
    return [wrapped.get(key.type, lambda n: n)(number) for number in numbers] + [
        "x" * 100_000,
        "a\0b",
        "device-" + "9" * 5000,
    ]


@pytest.mark.parametrize("section", sorted({key.section for key in KEYS}))
def test_absurd_values_of_every_key_make_a_plan_or_a_short_refusal(section: str) -> None:
    started = time.process_time()
    for key in (each for each in KEYS if each.section == section):
        for value in absurd(key):
            values = {name: {each: Given(one, "given") for each, one in table.items()} for name, table in TINY.items()}
            values.setdefault(section, {})[key.name] = Given(value, "given")
            try:
                build_plan(values, "plan.toml")
            except PlanError as error:
                assert 0 < len(str(error)) < 6000, key.dotted
    assert time.process_time() - started < 60


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("model.num_layers=1" + "0" * 30, "must be at most 10,000: the deepest transformer published"),
        ("cluster.num_devices=1000000000", "must be at most 1,048,576"),
        ("model.vocab_size=1000000000000000", "must be at most 1,073,741,824"),
        ("batch.sequence=1000000000000", "must be at most 1,073,741,824"),
        ("layout.tp=9" + "0" * 5000, "a number of more than 4,300 digits"),
        ("layout.vpp=1000000", "vpp"),
        ("batch.global=1000000000", "actions, more than the 1,000,000"),
        ("layout.stages=t*1000000000|", "stages="),
        ("train.learning_rate=1e308", "must be at most"),
        ("train.data=" + "x" * 5000, "must have at most 4,096"),
    ],
)
def test_verbs_say_the_bound_and_end_with_2(assignment: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (["fit"], ["simulate"], ["verify"], ["draw"], ["train", "--dry-run"]):
        assert main([*verb, *SMALL, "--set", assignment]) == 2
        reported = capsys.readouterr().err
        assert words in reported and len(reported) < 1000


def test_repeats_of_stages_are_counted_before_they_are_written_out() -> None:
    with pytest.raises(PlanError, match="more than 100,000 characters"):
        num_mtp_written("(t*99999|)*999999")


def test_nouns_made_in_python_and_by_a_config_have_the_same_bounds() -> None:
    with pytest.raises(PlanError, match=r"global_size=a whole number of 31 digits must be at most"):
        Batch(global_size=10**30, micro_size=1, sequence=64)
    config = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 10**6,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    with pytest.raises(ModelError, match="num_layers=1000000 must be at most 10,000"):
        model_from_config(config, name="huge")


def test_values_are_repeated_shortly() -> None:
    assert shown(10**5000) == "a whole number of 5001 digits" and len(shown("x" * 10**6)) < 200
    assert beyond("tp", 2**20, DEVICES) == "" and beyond("tp", 2**20 + 1, DEVICES)
