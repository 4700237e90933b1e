"""Token ids of a plan's data as text again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...core.plan.plan import Plan
from .tokenizer_files import TOKENIZER_FILE, tokenizer_files
from .tokenizers import JsonTokenizer
from .vocabulary import tokens_are_bytes


def decoder_of(plan: Plan) -> Callable[[Sequence[int]], str] | None:
    """What makes text of the ids of a plan's model: its tokenizer (`tokenizer_files`); ids as numbers where nobody
    knows which tokenizer made them; None where they are bytes. Raises as `JsonTokenizer` does."""
    path = tokenizer_files(plan).get(TOKENIZER_FILE)
    if path is not None:
        return JsonTokenizer(path, ends=False).decode
    return None if tokens_are_bytes(plan) else lambda ids: " ".join(map(str, ids))
