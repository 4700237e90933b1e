"""Ids of the data that a model has not, and models whose tokens are not bytes, are refused
before any rank is started."""

from __future__ import annotations

import json

import numpy as np
import pytest

from helpers.plans import product_plan
from shardproof import Trainer
from shardproof.backend.data.text import STDLIB, documents_of
from shardproof.backend.data.tokenizer_files import tokenizer_files
from shardproof.backend.data.tokenizer_record import TokenizerRecord, record_path, tokenizer_digest
from shardproof.backend.data.vocabulary import other_tokens, unknown_ids
from shardproof.core.base.errors import PlanError
from shardproof.core.commands.cli import main
from shardproof.core.model.model_presets import MODEL_PRESETS, model_preset
from shardproof.core.plan.plan import Plan
from shardproof.verify.dynamic.proof import prove

SMALL = ["--model", "tiny-gpt", "--dtype", "fp32", "--global-batch", "2", "--sequence", "8", "--transport", "memory"]


def plan_of(data=STDLIB, *, model="tiny-gpt", vocab_size=None, padding_rows=0, **train) -> Plan:
    spec = model_preset(model)
    sizes = {"vocab_size": vocab_size or spec.vocab_size, "padding_rows": padding_rows}
    return product_plan(
        model=spec, **sizes, samples=2, sequence=8, dtype="fp32", mode="exact", data=str(data), steps=1, **train
    )


@pytest.fixture
def text(tmp_path):
    """A folder of two files, in which `z`, 122, is the largest byte."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("all the letters up to y " * 20)
    (folder / "b.txt").write_text("and a z in the second " * 20)
    return folder


# ids of the data


def test_the_largest_id_of_a_folder_is_reported_with_the_models_and_the_key(text):
    assert unknown_ids(plan_of(text, vocab_size=122)) == [
        f"train.data='{text}' has ids (bytes) up to 122, and model.vocab_size=122 of tiny-gpt has ids up to 121. "
        "Use model.vocab_size=123 or more."
    ]
    (padded,) = unknown_ids(plan_of(text, vocab_size=130, padding_rows=10))
    assert (
        "model.vocab_size=130 with model.padding_rows=10 of tiny-gpt has ids up to 119. Use model.vocab_size=133"
    ) in padded


def test_a_vocabulary_that_has_all_ids_of_its_data_is_not_refused_for_bytes_that_do_not_occur(text):
    assert unknown_ids(plan_of(text, vocab_size=123)) == []
    assert unknown_ids(plan_of(text / "a.txt", vocab_size=122)) == []
    assert prove(plan_of(text, vocab_size=123), transport="memory", steps=1).ok


def test_the_standard_librarys_text_is_looked_at_as_files_are():
    largest = max(max(document, default=0) for document in documents_of(STDLIB))
    assert unknown_ids(plan_of(vocab_size=largest + 1)) == []
    (problem,) = unknown_ids(plan_of(vocab_size=largest))
    assert f"has ids (bytes) up to {largest}, and model.vocab_size={largest}" in problem


def test_what_sequences_are_filled_up_with_is_an_id_of_the_model():
    assert unknown_ids(plan_of(padded=True, ignore_token=255)) == []
    assert unknown_ids(plan_of(ignore_token=256)) == [], "a target that never comes is no id of a batch"
    assert unknown_ids(plan_of(padded=True, ignore_token=256)) == [
        "train.padded=true fills sequences up with train.ignore_token=256, and model.vocab_size=256 of tiny-gpt has "
        "ids up to 255. "
        "Use train.ignore_token=255 or less, or model.vocab_size=257 or more."
    ]


@pytest.mark.parametrize("verb", [["train"], ["verify", "--dynamic"], ["train", "--dry-run"]], ids=" ".join)
def test_the_commands_end_with_2_before_ranks_start(verb, text, capsys):
    assert main([*verb, *SMALL, "--set", "model.vocab_size=100", "--set", f"train.data={text}"]) == 2
    captured = capsys.readouterr()
    assert "has ids (bytes) up to 122, and model.vocab_size=100" in captured.err and captured.out == ""
    assert "IndexError" not in captured.err and "one device" not in captured.err


def test_prove_and_trainer_refuse_it_too_and_a_twin_does_not_hide_it(text):
    for plan in (plan_of(text, vocab_size=100), plan_of(text, model="gpt2", vocab_size=100)):
        with pytest.raises(PlanError, match=r"ids \(bytes\) up to 122"):
            prove(plan, transport="memory")
        with pytest.raises(PlanError, match=r"ids \(bytes\) up to 122"):
            Trainer(plan)


# models whose tokens are not bytes


def test_presets_of_bytes_are_trained_on_bytes_and_no_others():
    of_bytes = {name for name in MODEL_PRESETS if not other_tokens(plan_of(model=name))}
    assert of_bytes == {name for name in MODEL_PRESETS if name.startswith("tiny-")}


@pytest.mark.parametrize(("vocab_size", "padding_rows"), [(256, 0), (259, 0), (384, 0), (512, 0), (50304, 50304 - 257)])
def test_bytes_and_some_marks_are_a_vocabulary_of_bytes_however_it_is_padded(vocab_size, padding_rows):
    assert other_tokens(plan_of(vocab_size=vocab_size, padding_rows=padding_rows)) == []


def test_a_model_of_other_tokens_is_refused_with_what_to_do_and_a_dry_run_says_so(capsys):
    options = ["train", "--model", "gpt2", *SMALL[2:]]
    assert main(options) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == (
        "shardproof train: model.vocab_size=50257 of gpt2 is no vocabulary of bytes, which has 256 to 512 ids, and "
        "train.data='python-stdlib' gives bytes, ids 0 to 255. Use model.vocab_size=256 "
        "(--set model.vocab_size=256), a model of bytes such as --model tiny-llama, or tokenize the text "
        "(`shardproof tokenize`).\n"
    )
    assert main([*options, "--dry-run", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["world_size"] == 1
    assert captured.err.startswith("without --dry-run this is refused: model.vocab_size=50257 of gpt2")
    assert main([*options, "--dry-run", "--set", "model.vocab_size=256"]) == 0
    assert capsys.readouterr().err == ""
    with pytest.raises(PlanError, match="no vocabulary of bytes"):
        Trainer(plan_of(model="gpt2"))


def test_weights_that_come_with_a_tokenizer_are_refused_and_those_without_are_trained(tmp_path, capsys):
    folder = tmp_path / "model"
    assert main(["train", *SMALL, "--set", "train.steps=1", "--save-huggingface", str(folder)]) == 0
    loading = ["train", *SMALL, "--set", "train.steps=1", "--set", f"train.load={folder}"]
    assert main(loading) == 0
    capsys.readouterr()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "merges.txt").write_text("")
    assert main(loading) == 2
    captured = capsys.readouterr()
    assert (
        f"train.load='{folder}' holds tokenizer.json, merges.txt: the ids of this model are tokens of that"
    ) in captured.err
    assert captured.out == ""


def record(path, digest, vocab_size):
    record_path(path).write_text(TokenizerRecord(digest, vocab_size).to_json())


def test_token_files_are_compared_with_the_tokenizer_of_the_model(tmp_path):
    folder, path = tmp_path / "model", tmp_path / "tokens.bin"
    folder.mkdir()
    np.arange(300, dtype="<u2").tofile(path)
    (folder / "vocab.json").write_text("{}")
    plan = plan_of(path, vocab_size=1000, load=str(folder))
    (problem,) = other_tokens(plan)
    assert "only a tokenizer.json can be compared" in problem
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"}, "truncation": null}')
    (problem,) = other_tokens(plan)
    assert f"nobody recorded which tokenizer made train.data='{path}'. Use `shardproof tokenize" in problem
    record(path, "bytes", 256)
    (problem,) = other_tokens(plan)
    assert f"train.data='{path}' has tokens of bytes, which is another." in problem
    record(path, tokenizer_digest(folder / "tokenizer.json"), 1000)
    assert other_tokens(plan) == []
    (folder / "tokenizer.json").write_text('{\n "truncation": {"max_length": 9},\n "model": {"type": "BPE"}\n}')
    assert other_tokens(plan) == [], "another way to write the same tokenizer"
    (folder / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}')
    assert "which is another" in other_tokens(plan)[0]


def test_without_a_tokenizer_in_the_model_the_number_of_ids_counts(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(300, dtype="<u2").tofile(path)
    assert other_tokens(plan_of(path, vocab_size=50257)) == [] and unknown_ids(plan_of(path, vocab_size=300)) == []
    assert unknown_ids(plan_of(path, vocab_size=299)) == [
        f"train.data='{path}' has ids up to 299, and model.vocab_size=299 of tiny-gpt has ids up to 298. "
        "Use model.vocab_size=300 or more."
    ]
    record(path, "ab" * 32, 1000)
    assert other_tokens(plan_of(path, vocab_size=1000)) == []
    (problem,) = other_tokens(plan_of(path, vocab_size=990))
    assert "digest abababababab..., which has 1000 ids, and model.vocab_size=990" in problem
    assert "Use model.vocab_size=1000" in problem
    (problem,) = other_tokens(plan_of(f"1 {path} 1 {STDLIB}", vocab_size=1000))
    assert "has tokens of bytes. Tokenize all data with one tokenizer" in problem
    (problem,) = other_tokens(plan_of(path, vocab_size=1000, validation_data=STDLIB))
    assert "train.validation_data='python-stdlib' has tokens of bytes" in problem


def test_weights_are_written_with_the_tokenizer_of_the_model_or_else_with_that_of_the_data(tmp_path):
    folder, path = tmp_path / "model", tmp_path / "tokens.bin"
    folder.mkdir()
    path.write_bytes(bytes(40))
    assert tokenizer_files(plan_of(path)) == tokenizer_files(plan_of(STDLIB)) == {}
    (copy := tmp_path / "tokens.tokenizer.json").write_text("{}")
    assert tokenizer_files(plan_of(f"1 {STDLIB} 2 {path}", load=str(folder))) == {"tokenizer.json": copy}
    for name in ("vocab.json", "special_tokens_map.json", "notes.md"):
        (folder / name).write_text("{}")
    found = tokenizer_files(plan_of(path, load=str(folder)))
    assert found == {name: folder / name for name in ("vocab.json", "special_tokens_map.json")}


def test_a_twin_of_a_plan_on_a_token_file_is_proved_on_bytes(tmp_path):
    path = tmp_path / "tokens.bin"
    np.full(300, 50_000, dtype="<u2").tofile(path)
    proof = prove(plan_of(path, model="gpt2"), transport="memory", steps=1)
    assert proof.ok and any(f"train.data {path} -> python-stdlib" in change for change in proof.changes)


def test_a_plan_of_other_tokens_is_still_proved():
    proof = prove(plan_of(model="gpt2"), transport="memory", steps=1)
    assert proof.ok and proof.changes
