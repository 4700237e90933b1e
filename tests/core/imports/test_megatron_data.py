"""Megatron's arguments for data as keys of a plan, and back."""

from __future__ import annotations

import pytest

from shardproof.core.base.errors import PlanError
from shardproof.core.imports.account import Request
from shardproof.core.imports.megatron_meaning import imported_from
from shardproof.core.imports.megatron_write import write
from shardproof.core.plan.plan import build_plan

COMMAND = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 "
    "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --bf16 "
    "--vocab-size 512 --tokenizer-type NullTokenizer "
)


def read(arguments: str):
    return imported_from(Request(COMMAND + arguments, "pretrain.sh"))


def flags(imported) -> dict[str, tuple[str, str | None]]:
    return {each.flag: (each.status, each.key) for each in imported.settings}


@pytest.mark.parametrize(
    ("arguments", "data", "split", "held_out"),
    [
        ("--data-path /data/news_text_document", "/data/news_text_document", "969,30,1", None),
        ("--data-path 0.3 /data/news 0.7 '/data/old books' --split '949, 50, 1'",
         "0.3 /data/news 0.7 '/data/old books'", "949,50,1", None),
        ("--data-path a --split 98/2/0", "a", "98,2,0", None),
        ("--train-data-path 1 a 2 b --valid-data-path c --test-data-path d", "1 a 2 b", None, "c"),
        ("--data-path s3://bucket/news", "s3://bucket/news", "969,30,1", None),
        ("", "python-stdlib", None, None),
        ("--data-path $DATA --split 98,2,0", "python-stdlib", None, None),
        ("--data-path a b c", "python-stdlib", None, None),
    ],
)  # fmt: skip
def test_data_are_keys_of_the_plan_and_come_back(arguments, data, split, held_out):
    plan = build_plan(read(arguments).values, "pretrain.sh")
    assert (plan.train.data, plan.train.split, plan.train.validation_data) == (data, split, held_out)
    exported = write(plan)
    assert not [key for key, _ in exported.lost if key.startswith("train.")]
    ((_, script),) = exported.files
    again = build_plan(imported_from(Request(script, "pretrain.sh")).values, "pretrain.sh")
    assert (again.train.data, again.train.split, again.train.validation_data) == (data, split, held_out)


@pytest.mark.parametrize(
    ("arguments", "flag", "status", "key"),
    [
        ("--data-path a --split 9,1", "--data-path", "mapped", "train.data"),
        ("--data-path a --split 9,1", "--split", "mapped", "train.split"),
        ("--train-data-path a --valid-data-path b", "--valid-data-path", "mapped", "train.validation_data"),
        ("--train-data-path a --test-data-path b", "--test-data-path", "no-effect", None),
        ("--data-path $DATA", "--data-path", "no-effect", None),
        ("--data-path a b c", "--data-path", "not-modelled", None),
        ("--data-args-path data.txt", "--data-args-path", "no-effect", None),
        ("--per-split-data-args-path data.json", "--per-split-data-args-path", "no-effect", None),
        ("--split 9,1", "--split", "no-effect", None),
        ("--data-path a --split 9,x", "--split", "refused", "train.split"),
    ],
)
def test_every_argument_of_data_is_accounted_for(arguments, flag, status, key):
    assert flags(read(arguments))[flag] == (status, key)


@pytest.mark.parametrize(
    ("flag", "text", "data", "split", "held_out", "status"),
    [
        ("--data-args-path", "0.3 /news\n0.7 /books\n", "0.3 /news 0.7 /books", "969,30,1", None, "mapped"),
        ("--data-args-path", "/data/news\n", "/data/news", "969,30,1", None, "mapped"),
        ("--data-args-path", "a b c", "python-stdlib", None, None, "not-modelled"),
        ("--data-args-path", " \n", "python-stdlib", None, None, "refused"),
        ("--per-split-data-args-path", '{"train": ["0.3", "a", 0.7, "b"], "valid": ["c"], "test": null}',
         "0.3 a 0.7 b", None, "c", "mapped"),
        ("--per-split-data-args-path", '{"train": 3}', "python-stdlib", None, None, "refused"),
        ("--per-split-data-args-path", '{"train": "a"}', "python-stdlib", None, None, "refused"),
        ("--per-split-data-args-path", '["a"]', "python-stdlib", None, None, "refused"),
        ("--per-split-data-args-path", "0.3 a", "python-stdlib", None, None, "refused"),
    ],
)  # fmt: skip
def test_a_file_of_data_arguments_is_read_next_to_the_script(flag, text, data, split, held_out, status, tmp_path):
    (tmp_path / "data.txt").write_text(text)
    imported = imported_from(Request(COMMAND + f"{flag} data.txt", str(tmp_path / "pretrain.sh")))
    assert flags(imported)[flag][0] == status
    if status == "refused":
        return
    train = build_plan(imported.values, "pretrain.sh").train
    assert (train.data, train.split, train.validation_data) == (data, split, held_out)


@pytest.mark.parametrize("name", ["../data.txt", "/etc/hostname", "elsewhere.txt", "folder", "$DATA"])
def test_a_file_of_data_arguments_elsewhere_is_not_read(name, tmp_path):
    (tmp_path / "data.txt").write_text("a")
    (tmp_path / "runs" / "folder").mkdir(parents=True)
    imported = imported_from(Request(COMMAND + f"--data-args-path {name}", str(tmp_path / "runs" / "pretrain.sh")))
    assert flags(imported)["--data-args-path"][0] == "no-effect"
    assert build_plan(imported.values, "pretrain.sh").train.data == "python-stdlib"


def test_data_of_a_plan_that_are_no_files_are_not_written_and_a_share_below_zero_is_refused():
    plan = build_plan(read("").values, "pretrain.sh")
    assert "data-path" not in write(plan).files[0][1]
    with pytest.raises(PlanError, match=r"pretrain\.sh:1: data has a with weight -1"):
        build_plan(read("--data-path -1 a 2 b").values, "pretrain.sh")
