"""Weights that go out of a run as files are not those that were trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from ...backend.huggingface import save
from ...backend.tensor_parallel import Shard
from ..ledger.ledger import WEIGHT
from .mutant import Expected, Mutant, Stops
from .patches import Patches
from .plans import tiny
from .scenarios import exported


def promises_the_tied_head(patches: Patches) -> None:
    """The index still names the head that the converter leaves out because it is the token table."""

    def make(index_of: Callable[..., str]) -> Callable[..., str]:
        def index(layouts: Any) -> str:
            found = json.loads(index_of(layouts))
            found["weight_map"]["lm_head.weight"] = layouts[-1].name
            return json.dumps(found)

        return index

    patches.replace(save, "index_of", make)


def clears_while_writing(patches: Patches) -> None:
    """Whoever writes the first shard lets go of all tensors, which the next ones are still to be taken from."""

    def make(write: Callable[..., None]) -> Callable[..., None]:
        def wrote(shards: Iterable[Shard], places: object, files: object) -> None:
            first, *rest = shards
            write([first], places, files)
            for shard in rest:
                shard.tensor.zero_()
            write(rest, places, files)

        return wrote

    patches.replace(save, "_write", make)


MUTANTS = (
    Mutant(
        "CK07",
        "the index of an export names a tied head that no file has",
        "pytorch/torchtitan#3764",
        plan=lambda: tiny(pp=2, model={"tied_embeddings": True}),
        breaks=promises_the_tied_head,
        expected=Stops(r"names tensors that are not there: lm_head\.weight \(model-\d+-of-\d+\.safetensors\)"),
        scenario=exported,
        steps=1,
    ),
    Mutant(
        "CK15",
        "writing the first part of an export clears what is still to be written",
        "deepspeedai/DeepSpeed#6791",
        plan=lambda: tiny(tp=3),
        breaks=clears_while_writing,
        expected=Expected(WEIGHT, "layers.0.attention.norm.weight", ("missing",), ("STEP",), ranks=(0,), step=2),
        scenario=exported,
        steps=1,
    ),
)
