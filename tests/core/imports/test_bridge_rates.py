"""Megatron-Bridge's scheduler: both schedules and batches that grow are keys of a plan."""

from __future__ import annotations

import pytest

pytest.importorskip("yaml")

from shardproof.core.imports.account import Imported, Request
from shardproof.core.imports.given import import_file

HEAD = """\
_target_: megatron.bridge.training.config.ConfigContainer
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 512}
optimizer: {optimizer: adam, lr: 0.001, min_lr: 0.0001, weight_decay: 0.1}
"""


def account(scheduler: str, train: str = "global_batch_size: 64, train_iters: 100") -> Imported:
    found = import_file(Request(f"{HEAD}train: {{{train}}}\nscheduler: {{{scheduler}}}\n", "run_config.yaml", 8))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (
            "lr_decay_style: cosine, lr_warmup_iters: 10, lr_warmup_init: 0.00001, lr_decay_iters: 90",
            {
                "schedule": "cosine",
                "warmup_steps": 10,
                "initial_learning_rate": 1e-5,
                "decay_steps": 90,
                "minimum_learning_rate": 1e-4,
            },
        ),
        ("lr_warmup_fraction: 0.1", {"schedule": "linear", "warmup_fraction": 0.1, "minimum_learning_rate": 1e-4}),
        (
            "lr_decay_style: WSD, lr_wsd_decay_iters: 20, lr_wsd_decay_style: minus_sqrt",
            {
                "schedule": "wsd",
                "wsd_decay_steps": 20,
                "wsd_decay": "minus_sqrt",
                "minimum_learning_rate": 1e-4,
            },
        ),
        (
            "lr_decay_style: constant, weight_decay_incr_style: linear, start_weight_decay: 0.01, "
            "end_weight_decay: 0.2, wd_incr_steps: 6400",
            {
                "schedule": "constant",
                "weight_decay_schedule": "linear",
                "weight_decay": 0.01,
                "end_weight_decay": 0.2,
            },
        ),
    ],
)
def test_schedules_are_mapped(scheduler, expected):
    found = account(scheduler)
    assert not list(found.of_status("refused"))
    given = {key: value.value for key, value in found.values["optimizer"].items()}
    assert {key: given.get(key) for key in expected} == expected
    own = {key for key in given if "decay" in key or "learning" in key or key in ("schedule", "warmup_steps")}
    assert own <= {*expected, "weight_decay"}


def test_batches_that_grow_are_mapped_and_what_they_cannot_be_is_refused():
    train = "global_batch_size: 64, train_iters: 100, rampup_batch_size: "
    assert account("lr_warmup_iters: 1", train + "[16, 16, 500]").values["batch"]["rampup"].value == [16, 16, 500]
    (refused,) = account("lr_warmup_iters: 1", train + "[16, 16]").of_status("refused")
    assert refused.flag == "train.rampup_batch_size"


def test_wsd_without_a_length_is_refused_and_without_a_run_the_rate_stays():
    (refused,) = account("lr_decay_style: WSD").of_status("refused")
    assert refused.flag == "scheduler.lr_decay_style"
    found = account("lr_decay_style: cosine", "global_batch_size: 64")
    assert "schedule" not in found.values["optimizer"]
    assert any("lacks train.train_iters" in each.why for each in found.of_status("not-modelled"))
