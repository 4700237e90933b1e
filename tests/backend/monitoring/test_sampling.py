"""Text from the model: what one device would say, in every layout, and training goes on with the same bits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from helpers.plans import training_plan
from shardproof import Layout, Trainer
from shardproof.backend.base.microbatch import Microbatch
from shardproof.backend.monitoring.sampling import bytes_as_text, sampled
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.core.base.metrics import read_metrics
from shardproof.core.plan.log import Log

OPTIONS = {"samples": 4, "sequence": 16, "gradient_token_block": 4, "steps": 2, "learning_rate": 0.05, "seed": 3}
OPTIONS |= {"sample_every": 1, "sample_tokens": 4}


def texts_of(rank_transport, plan):
    rank = TrainingRank(rank_transport, plan)
    found = []
    for step in range(plan.train.steps):
        loss = rank.step(step)[0].loss
        found.append((loss, sampled(rank, plan, rank_transport.everyone, step + 1)))
    return found


def greedy(transport, plan):
    """The same by the logits of one stage, without pipeline, batches and ranks."""
    rank = TrainingRank(transport, plan)
    for step in range(plan.train.steps):
        rank.step(step)
    (stage,) = rank.stages.values()
    tokens = rank.batches.prompt(8)
    with torch.no_grad():
        while len(tokens) < 12:
            row = torch.tensor([tokens + [0] * (16 - len(tokens))])
            logits = stage.logits(Microbatch(0, 0, row, row), None)
            tokens.append(int(logits[0, len(tokens) - 1].argmax()))
    return bytes_as_text(tokens[:8]), bytes_as_text(tokens[8:])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_text_is_the_same_in_every_layout_and_changes_no_bit(temperature, workers):
    options = {**OPTIONS, "sample_temperature": temperature}
    one = training_plan(**options)
    expected = workers(1, "memory").run(texts_of, one)[0]
    # vocabulary, sequence, stages and samples cut
    cut = training_plan(Layout(tp=2, cp=2, pp=2), **options)
    assert all(found == expected for found in workers(8, "memory").run(texts_of, cut))
    quiet = workers(1, "memory").run(texts_of, replace(one, train=replace(one.train, sample_every=None)))[0]
    assert [loss for loss, _ in quiet] == [loss for loss, _ in expected] and quiet[0][1] is None
    _, last = expected[-1]
    plain = workers(1, "memory").run(greedy, one)[0]
    assert ((last.prompt, last.text) == plain) == (temperature == 0.0)


def test_texts_are_in_the_metrics(tmp_path):
    file = tmp_path / "run.jsonl"
    plan = training_plan(**{**OPTIONS, "steps": 3, "sample_every": 2, "sample_tokens": 2}, log=Log(file=str(file)))
    Trainer(plan, transport="memory").fit()
    assert ["sample" in row for row in read_metrics(file)] == [False, True, True]
    sample = json.loads(file.read_text().splitlines()[-1])["sample"]
    assert len(sample["prompt"]) == 8 and len(sample["text"]) == 2


def test_bytes_that_are_no_characters_are_marked():
    assert bytes_as_text([*"für".encode(), 0xFF, 300]) == "für\ufffd\ufffd"
