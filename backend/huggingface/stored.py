"""Weights in folders of `torch.distributed.checkpoint` that other trainers have saved: Megatron-LM's `torch_dist` and
torchtitan's. Nothing in them is executed.

Such a folder does not describe its model: that is the plan's. Which trainer it is follows from the tensors' names, as
they were written down from megatron-core 0.16.1 (`core/models/gpt`, `core/transformer`) and torchtitan 0.3.0
(`models/*/state_dict_adapter.py`). Megatron keeps all layers of a kind in one tensor whose first dimension is the
layer's number, unless it was asked not to or layers differ, and norms that its layers fuse with a product under the
product's name. Both keep all experts of a layer in one tensor, whichever of Megatron's classes computed them; with
`singleton_local_shards` Megatron keeps each expert, and gates and up-projections, apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.base.errors import PlanError
from ...core.model.model import ModelSpec
from ...core.model.parameters import parameters
from ..dcp.files import opened
from ..dcp.index import Block, SavedTensor
from ..dcp.older import METADATA_FILE, ForeignTensors

if TYPE_CHECKING:
    from torch import Tensor

MEGATRON: Mapping[str, tuple[str, ...]] = {
    "embedding.tokens": ("embedding.word_embeddings",),
    "embedding.positions": ("embedding.position_embeddings",),
    "layer.attention.norm": ("input_layernorm",),
    "layer.attention.qkv": ("self_attention.linear_qkv",),
    "layer.attention.query_norm": ("self_attention.q_layernorm",),
    "layer.attention.key_norm": ("self_attention.k_layernorm",),
    "layer.attention.q": ("self_attention.linear_q_proj",),
    "layer.attention.q_down": ("self_attention.linear_q_down_proj",),
    "layer.attention.q_norm": ("self_attention.q_layernorm",),
    "layer.attention.q_up": ("self_attention.linear_q_up_proj",),
    "layer.attention.kv_down": ("self_attention.linear_kv_down_proj",),
    "layer.attention.kv_norm": ("self_attention.kv_layernorm",),
    "layer.attention.kv_up": ("self_attention.linear_kv_up_proj",),
    "layer.attention.output": ("self_attention.linear_proj",),
    "layer.mlp.norm": ("pre_mlp_layernorm",),
    "layer.mlp.up": ("mlp.linear_fc1",),
    "layer.mlp.down": ("mlp.linear_fc2",),
    "layer.mlp.router": ("mlp.router",),
    "layer.mlp.experts.up": ("mlp.experts.experts.linear_fc1",),
    "layer.mlp.experts.down": ("mlp.experts.experts.linear_fc2",),
    "layer.mlp.shared.up": ("mlp.shared_experts.linear_fc1",),
    "layer.mlp.shared.down": ("mlp.shared_experts.linear_fc2",),
    "head.norm": ("decoder.final_layernorm",),
    "head.output": ("output_layer",),
}
_UPS = ("layer.mlp.up", "layer.mlp.experts.up", "layer.mlp.shared.up")
MEGATRON_GATED: Mapping[str, tuple[str, ...]] = {**MEGATRON, **{up: MEGATRON[up] * 2 for up in _UPS}}
MEGATRON_APART: Mapping[str, tuple[str, ...]] = {
    **MEGATRON,
    **{up: tuple(f"{name}_{part}" for name in MEGATRON[up] for part in "wv") for up in _UPS},
}

TORCHTITAN: Mapping[str, tuple[str, ...]] = {
    "embedding.tokens": ("tok_embeddings",),
    "layer.attention.norm": ("attention_norm",),
    "layer.attention.qkv": ("attention.wq", "attention.wk", "attention.wv"),
    "layer.attention.query_norm": ("attention.q_norm",),
    "layer.attention.key_norm": ("attention.k_norm",),
    "layer.attention.q": ("attention.wq",),
    "layer.attention.q_down": ("attention.wq_a",),
    "layer.attention.q_norm": ("attention.q_norm",),
    "layer.attention.q_up": ("attention.wq_b",),
    "layer.attention.kv_down": ("attention.wkv_a",),
    "layer.attention.kv_norm": ("attention.kv_norm",),
    "layer.attention.kv_up": ("attention.wkv_b",),
    "layer.attention.output": ("attention.wo",),
    "layer.mlp.norm": ("ffn_norm",),
    "layer.mlp.up": ("feed_forward.w1", "feed_forward.w3"),
    "layer.mlp.down": ("feed_forward.w2",),
    "layer.mlp.router": ("moe.router.gate",),
    "layer.mlp.experts.up": ("moe.experts.w1", "moe.experts.w3"),
    "layer.mlp.experts.down": ("moe.experts.w2",),
    "layer.mlp.shared.up": ("moe.shared_experts.w1", "moe.shared_experts.w3"),
    "layer.mlp.shared.down": ("moe.shared_experts.w2",),
    "head.norm": ("norm",),
    "head.output": ("output",),
}

TABLES = {
    "megatron": MEGATRON,
    "megatron-gated": MEGATRON_GATED,
    "megatron-apart": MEGATRON_APART,
    "torchtitan-llama": TORCHTITAN,
    "torchtitan-qwen": TORCHTITAN,
}
"""By trainer and arrangement; torchtitan turns neighbouring features of its Llama, and halves of its Qwen 3."""

_OTHER_NAMES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"\.attention\.qkv_linear\."), ".attention."),
    (re.compile(r"^lm_head\."), "output."),
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_"), ".input_layernorm."),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_"), ".pre_mlp_layernorm."),
    (re.compile(r"\.linear_(q|kv)_up_proj\.layer_norm_"), r".\1_layernorm."),
    (re.compile(r"\.(weight|bias)_([wv])$"), r"_\2.\1"),
    (re.compile(r"\.moe\.(?:routed_experts\.inner_)?experts\.(w[123])(?:_EFD|_EDF)?$"), r".moe.experts.\1.weight"),
    (re.compile(r"\.moe\.expert_bias(?:_E)?$"), ".moe.router.gate.expert_bias"),
)
_STACKED = re.compile(r"^(decoder\.layers)\.([a-z].*)")
_OURS = re.compile(r"(decoder|embedding|output_layer|layers|tok_embeddings|norm|output)\.")
_HEADS = ("output.weight", "output_layer.weight")


def is_stored(path: str | Path) -> bool:
    """Whether a folder is one of DCP."""
    return (Path(path) / METADATA_FILE).is_file()


class StoredFolder:
    """The weights of such a folder, with the methods of `folder.Folder`: tensors by the names of one layer each, read
    block by block. Raises `PlanError` for a folder of neither trainer, or a model that is not read from one."""

    absent: tuple[str, ...] = ()

    def __init__(self, path: str | Path, model: ModelSpec):
        self.path, self.num_bytes_read = Path(path), 0
        self._tensors = ForeignTensors(self.path)
        self.files: dict[str, tuple[str, int | None]] = {}
        """Name -> the tensor that has it, and which of the layers that are stacked in that."""
        for name, shape in self._tensors.shapes.items():
            self.files |= _named_layers(name, shape)
        if model.tied_embeddings:
            self.files = {name: place for name, place in self.files.items() if name not in _HEADS}
        self.family = self._family(model)
        self._tensor = cache(self._tensors.tensor)

    def _family(self, model: ModelSpec) -> str:
        if "embedding.word_embeddings.weight" in self.files:
            apart = any(name.endswith("linear_fc1_w.weight") for name in self.files)
            family = "megatron-apart" if apart else "megatron-gated" if model.gated else "megatron"
        elif "tok_embeddings.weight" in self.files:
            family = "torchtitan-qwen" if model.qk_norm else "torchtitan-llama"
        else:
            raise PlanError(
                f"train.load={str(self.path)!r} has neither the tensors of Megatron-LM nor those of torchtitan. Give a "
                "folder of theirs, or of Hugging Face."
            )
        places = {re.sub(r"^layers\.\d+\.", "layer.", each.name).rpartition(".")[0] for each in parameters(model)}
        if unknown := sorted(places - TABLES[family].keys()):
            raise PlanError(
                f"train.load={str(self.path)!r} is of {family.partition('-')[0]}, whose names for {unknown[0]} of "
                f"model {model.name} are not known here. Convert it to a Hugging Face folder."
            )
        return family

    def shape(self, name: str) -> tuple[int, ...]:
        """The full shape of a tensor, of one layer."""
        stored, layer = self.files[name]
        shape = self._tensors.shapes[stored]
        return shape if layer is None else shape[1:]

    def dtype(self, name: str) -> str:
        """The number format of a tensor, as torch calls it."""
        return self._tensor(self.files[name][0]).dtype

    def can_read(self, name: str) -> bool:
        """Whether a tensor's number format is one of weights."""
        return self.dtype(name) in ("float32", "bfloat16", "float16")

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """A block of a tensor, from those blocks of the files that have a part of it."""
        import torch

        stored, layer = self.files[name]
        saved = self._tensor(stored)
        whole = index if layer is None else (slice(layer, layer + 1), *index)
        found = torch.empty([part.stop - part.start for part in whole], dtype=getattr(torch, saved.dtype))
        for block in saved.blocks:
            if (overlap := _overlap(block, whole)) is not None:
                theirs, ours = overlap
                rows, *others = theirs
                found[ours] = self._rows(saved, block, rows)[(slice(None), *others)]
        self.num_bytes_read += found.nbytes
        return found if layer is None else found[0]

    def _rows(self, saved: SavedTensor, block: Block, rows: slice) -> Tensor:
        """Some rows of a block, and no more than these from the disk."""
        import torch

        with opened(self.path / block.file) as reader:
            row_bytes, count = block.num_bytes // block.sizes[0], rows.stop - rows.start
            content = reader.read(block.first + rows.start * row_bytes, count * row_bytes)
        return torch.frombuffer(content, dtype=getattr(torch, saved.dtype)).view(count, *block.sizes[1:])

    def __enter__(self) -> StoredFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Files are open only while they are read."""


def _named_layers(stored: str, shape: tuple[int, ...]) -> dict[str, tuple[str, int | None]]:
    """The names that a stored tensor has here: one, one per layer, or none where it is no weight of the model."""
    name = stored
    for pattern, other in _OTHER_NAMES:
        name = pattern.sub(other, name)
    if not _OURS.match(name) or "_extra_state" in name:
        return {}
    if (stacked := _STACKED.match(name)) and shape:
        return {f"{stacked[1]}.{layer}.{stacked[2]}": (stored, layer) for layer in range(shape[0])}
    return {name: (stored, None)}


def _overlap(block: Block, wanted: tuple[slice, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What a block has of a wanted one, as places in the block and in what is wanted; None where that is nothing."""
    theirs, ours = [], []
    for part, first, size in zip(wanted, block.offsets, block.sizes, strict=True):
        lo, hi = max(part.start, first), min(part.stop, first + size)
        if lo >= hi:
            return None
        theirs.append(slice(lo - first, hi - first))
        ours.append(slice(lo - part.start, hi - part.start))
    return tuple(theirs), tuple(ours)
