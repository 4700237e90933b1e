"""DeepSpeed's JSON configurations: which files are, and the way to their account, whose tables are loaded when one
is read."""

from __future__ import annotations

from .account import Imported, Request


def recognises(request: Request) -> bool:
    """Whether a JSON file is a configuration of DeepSpeed: it says how large batches are, or which ZeRO stage."""
    text = request.text
    marks = (
        '"zero_optimization"',
        '"train_micro_batch_size_per_gpu"',
        '"train_batch_size"',
        '"gradient_accumulation_steps"',
    )
    return request.source.endswith(".json") and len(text) < 200_000 and any(mark in text for mark in marks[:3])


def read(request: Request) -> Imported:
    """The account of a configuration. Raises `PlanError` for a text that is none."""
    from .deepspeed_meaning import account

    return account(request)
