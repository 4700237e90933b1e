"""Documents of different lengths, padded to one sequence: padding changes no bit, and may be left out
of layers and messages."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.gates import sampled
from helpers.plans import training_plan
from shardproof.backend.data.corpus import Corpus
from shardproof.backend.launching.launch import run_ranks
from shardproof.backend.unsupported import unsupported
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute, Runtime
from shardproof.core.plan.sections import Precision
from shardproof.core.plan.train import Train
from shardproof.core.program import Message
from shardproof.verify.matrix.matrix import prove_plan
from shardproof.verify.run.references import References

SEQUENCE, BLOCK, HIDDEN = 32, 4, 16
TRIMMED = Runtime(trim_padding=True)
REFERENCES = References(most=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Forty files of 1 to 40 letters."""
    path, chosen = tmp_path_factory.mktemp("documents"), random.Random(3)
    for number in range(40):
        letters = (chosen.randrange(97, 123) for _ in range(chosen.choice((1, 3, 5, 9, 14, 20, 31, 40))))
        (path / f"{number:02}.txt").write_bytes(bytes(letters))
    return str(path)


def padded(folder: str, layout: Layout, *, model: str = "tiny-llama", **choices) -> Plan:
    sizes = {
        "num_layers": 4,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 24,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 8,
    }
    texts = {"data": folder, "padded": True, "ignore_token": 0, "samples": 6, "sequence": SEQUENCE}
    chosen = {
        "runtime": TRIMMED,
        "gradient_token_block": BLOCK,
        "reduction_token_block": 2,
        "steps": 1,
        "clip_grad_norm": 0.05,
        **choices,
    }
    return training_plan(layout, model=model, **sizes, **texts, **chosen)


CASES = {
    "whole-sequences": (Layout(tp=2, dp=3), {"runtime": Runtime()}),
    "pp2": (Layout(pp=2), {}),
    "pp3-tp2-micro3-in-order": (
        Layout(pp=3, tp=2, stages="Ett|t|tL"),
        {"micro": 3, "schedule": "ZBH1", "runtime": Runtime(trim_padding=True, p2p_overlap=False, p2p_batched=False)},
    ),
    "vee-dp3-learned-positions": (
        Layout(pp=2, vpp=2, dp=3, zero=1),
        {"model": "tiny-gpt", "schedule": "ZBVZeroBubble"},
    ),
    "recomputed-bf16": (
        Layout(pp=2, dp=2),
        {"micro": 3, "recompute": Recompute("full"), "precision": Precision("bf16")},
    ),
    "dualpipe": (Layout(pp=2), {"schedule": "DualPipe", "runtime": Runtime(trim_padding=True, p2p_overlap=False)}),
}


@sampled(("layout", "choices"), CASES.values(), ids=CASES, on_push=3)
def test_no_bit_differs_from_one_device_with_whole_sequences(folder: str, layout: Layout, choices: dict) -> None:
    plan = padded(folder, layout, **choices)
    assert unsupported(plan) == []
    outcome = prove_plan(plan, {}, REFERENCES, steps=1)
    assert outcome.ok and outcome.tensors_compared > 100, outcome.line


def lengths_and_messages(transport, plan: Plan):
    """Tokens of every microbatch of the first step, and what its messages held."""
    from shardproof.backend.ranks.training_rank import TrainingRank

    rank = TrainingRank(transport, plan)
    lengths = [microbatch.tokens.shape[1] for microbatch in rank.batches.training(0, 1.0)]
    transport.recorder.enabled = True
    rank.step(0)
    events = transport.recorder.events
    return lengths, {str(action): operation.num_bytes for action, operation in events if isinstance(operation, Message)}


def test_messages_are_as_long_as_the_longest_document_of_their_microbatch_in_whole_blocks(folder: str) -> None:
    (lengths, sent), (there, back) = run_ranks(
        lengths_and_messages, padded(folder, Layout(pp=2), micro=2), world_size=2, transport="memory"
    )
    tokens, _ = Corpus.load(folder).padded(0, 6, SEQUENCE, Train().seed, 0)
    documents = (tokens != 0).sum(1).tolist()
    assert (
        lengths == there == [-(-max(documents[i : i + 2]) // BLOCK) * BLOCK for i in (0, 2, 4)]
        and len(set(lengths)) == 3
    )
    assert sent == {f"0SEND_F{i}": 4 * 2 * length * HIDDEN for i, length in enumerate(lengths)}
    assert back == {f"1SEND_B{i}": 4 * 2 * length * HIDDEN for i, length in enumerate(lengths)}


@pytest.mark.parametrize(
    ("layout", "changes", "words"),
    [
        (Layout(cp=2), {}, "with cp=2"),
        (Layout(tp=2, sequence_parallel=True), {}, "with sequence_parallel=true"),
        (Layout(), {"hidden_dropout": 0.1}, "with dropout"),
        (Layout(), {"num_mtp_layers": 1}, "with multi-token prediction"),
        (Layout(tp=2), {"qk_norm": True}, "with norms of heads and tp=2"),
    ],
)
def test_what_counts_over_whole_sequences_is_not_trimmed(
    folder: str, layout: Layout, changes: dict, words: str
) -> None:
    plan = padded(folder, layout)
    (problem,) = unsupported(replace(plan, model=replace(plan.model, **changes)))
    assert words in problem and "Use trim_padding=false" in problem
    assert unsupported(replace(plan, model=replace(plan.model, **changes), runtime=Runtime())) == []


def test_padding_needs_a_token_of_its_own(folder: str) -> None:
    plan = padded(folder, Layout())
    with pytest.raises(PlanError, match="padded=true fills sequences up with ignore_token, which is not given"):
        replace(plan, train=replace(plan.train, ignore_token=None))
    with pytest.raises(PlanError, match="trim_padding=true leaves padding out, but padded=true is not set"):
        replace(plan, train=replace(plan.train, padded=False))


def test_the_folder_has_documents_shorter_and_longer_than_a_sequence(folder: str) -> None:
    sizes = {path.stat().st_size for path in Path(folder).iterdir()}
    assert min(sizes) == 1 and max(sizes) > SEQUENCE
