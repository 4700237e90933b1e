"""Megatron-LM's argument lines, argument files and shell scripts: how they are recognised, and the way to the reader.

The tables are imported when something is read.
"""

from __future__ import annotations

import re

from .account import Imported, Request

_TELLING = re.compile(
    r"(?<![\w-])--(num-layers|hidden-size|num-attention-heads|seq-length|micro-batch-size|global-batch-size|"
    r"tensor-model-parallel-size|pipeline-model-parallel-size|max-position-embeddings|ffn-hidden-size)\b"
)
_OTHER_SUFFIXES = (".toml", ".json", ".csv", ".py", ".md")
_PLAN_SECTION = re.compile(r"^\s*\[(model|layout|cluster|batch)\]", re.MULTILINE)


def recognises(request: Request) -> bool:
    """True for a text in which several arguments are Megatron's."""
    if request.source.endswith(_OTHER_SUFFIXES) or _PLAN_SECTION.search(request.text):
        return False
    return len({found[1] for found in _TELLING.finditer(request.text)}) >= 2


def read(request: Request) -> Imported:
    """What the file says. Raises `PlanError` for a text that has no training command, or several."""
    from .megatron_meaning import imported_from

    return imported_from(request)
