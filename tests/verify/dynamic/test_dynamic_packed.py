"""Packed documents on real ranks: attention and positions begin again with each, and no bit differs from one device."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.gates import sampled
from helpers.plans import plan
from shardproof.core.plan.plan import Plan
from shardproof.verify.dynamic.proof import prove


def tiny(
    *,
    model: str = "tiny-gpt",
    micro: int = 1,
    block: int = 3,
    ring: bool = False,
    train: dict[str, Any],
    **degrees: Any,
) -> Plan:
    return plan(
        model=model,
        num_layers=2,
        samples=4,
        micro=micro,
        context_parallel="ring" if ring else None,
        gradient_token_block=block,
        reduction_token_block=min(block, 3),
        steps=2,
        learning_rate=0.01,
        **train,
        **degrees,
    )


@pytest.fixture
def documents(tmp_path: Path) -> dict[str, Any]:
    """Documents of 3 to 40 bytes: about two in a sequence of 24."""
    generator = random.Random(3)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    for number in range(300):
        text = " ".join(generator.choice(words) for _ in range(generator.randint(1, 7)))
        (tmp_path / f"{number:03}.txt").write_text(text)
    return {"packed": True, "data": str(tmp_path)}


@sampled(
    "choices",
    [
        pytest.param({"cp": 2, "tp": 2, "sequence_parallel": True, "micro": 2}, id="learned-positions"),
        pytest.param({"cp": 3, "dp": 2, "model": "tiny-llama", "block": 2, "ring": True}, id="rotary-positions-ring"),
        pytest.param({"cp": 4, "cp_inner": 2, "ring": True}, id="heads-of-2-then-ring"),
        pytest.param({"pp": 2, "block": 24, "micro": 2}, id="one-block"),
    ],
    on_push=2,
)
def test_no_bit_differs_with_packed_documents(choices: dict[str, Any], documents: dict[str, Any]) -> None:
    plan = tiny(**choices, train=documents)
    proof = prove(plan, transport="memory", steps=1)
    assert proof.findings == () and proof.report["bits_different"] == 0
    together = prove(replace(plan, train=replace(plan.train, packed=False)), transport="memory", steps=1)
    assert together.report["losses"] != proof.report["losses"]
