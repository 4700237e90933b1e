"""The rules that say what may be recomputed, and what may rest in host memory. `table` has them in order."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.errors import did_you_mean
from ...layout.layout import Layout
from ...model.model import ModelSpec
from ..runtime import RECOMPUTE_MODULES, Offload, Recompute
from ..sections import Precision


def recompute_is_chosen_once(recompute: Recompute) -> Iterator[str]:
    """Num_layers, layers and distribute belong to full, modules to selective recomputation."""
    if recompute.num_layers is not None and recompute.mode != "full":
        yield (
            f"num_layers={recompute.num_layers} limits full recomputation to so many layers of each stage, "
            f'but recompute.mode="{recompute.mode}". Set recompute.mode = "full", or leave num_layers out.'
        )
    if recompute.layers is not None and (recompute.mode != "full" or recompute.num_layers is not None):
        other = (
            f'recompute.mode="{recompute.mode}"' if recompute.mode != "full" else f"num_layers={recompute.num_layers}"
        )
        yield (
            f"layers={list(recompute.layers)} are the only ones that full recomputation repeats, but {other} says "
            "otherwise. "
            'Set recompute.mode = "full" without num_layers, or leave layers out.'
        )
    if recompute.distribute and recompute.mode != "full":
        yield (
            "distribute=true spreads the inputs that full recomputation keeps over tensor-parallel ranks, "
            f'but recompute.mode="{recompute.mode}". Set recompute.mode = "full", or leave distribute out.'
        )
    if recompute.modules != Recompute().modules and recompute.mode != "selective":
        yield (
            f"modules={list(recompute.modules)} chooses what selective recomputation repeats, "
            f'but recompute.mode="{recompute.mode}". Set recompute.mode = "selective", or leave modules out.'
        )


def distributed_inputs_are_whole(recompute: Recompute, layout: Layout) -> Iterator[str]:
    """Inputs that are spread over tensor-parallel ranks are not cut already."""
    if recompute.distribute and layout.sequence_parallel:
        yield (
            "recompute.distribute=true spreads inputs of layers that all tensor-parallel ranks hold, but with "
            "layout.sequence_parallel=true each holds its own tokens only. Leave one of the two out."
        )


def recomputed_layers_exist(recompute: Recompute, model: ModelSpec) -> Iterator[str]:
    """The model has the layers that are recomputed."""
    layers = list(recompute.layers or ())
    if wrong := [layer for layer in layers if not 0 <= layer < model.num_layers]:
        yield (
            f"layers={layers}: model {model.name} has the layers 0 to {model.num_layers - 1}, and no layer {wrong[0]}."
        )
    elif layers != sorted(set(layers)):
        yield f"layers={layers} must name every layer once, in order. Use {sorted(set(layers))}."


def recomputed_modules_exist(recompute: Recompute, model: ModelSpec) -> Iterator[str]:
    """A layer of the model has the modules that are recomputed."""
    for name in recompute.modules:
        if name not in RECOMPUTE_MODULES:
            yield (
                f"modules={list(recompute.modules)}: {name!r} is no part of a "
                f"layer{did_you_mean(name, RECOMPUTE_MODULES)}"
            )
        elif name in ("moe", "moe_act") and not model.is_moe:
            yield (
                f"modules={list(recompute.modules)}: model {model.name} has no experts, so there is no {name!r}. "
                "Leave it out."
            )
        elif name == "shared_experts" and not model.num_shared_experts:
            yield f"modules={list(recompute.modules)}: model {model.name} has no shared experts. Leave {name!r} out."
        elif name == "mla_up_proj" and not model.is_mla:
            yield f"modules={list(recompute.modules)}: model {model.name} has no latent attention. Leave {name!r} out."


def offloaded_layers_exist(offload: Offload, model: ModelSpec) -> Iterator[str]:
    """A model has as many layers as each of its stages is to offload; a stage with fewer offloads all of its own."""
    if offload.activations > model.num_layers:
        yield (
            f"activations={offload.activations} layers of each stage keep what their backward needs in host memory, "
            f"but model {model.name} has {model.num_layers}. Use at most {model.num_layers}."
        )


def offloaded_masters_exist(offload: Offload, precision: Precision) -> Iterator[str]:
    """fp32 weights that go to host memory are those of offloaded moments, and others than layers compute with."""
    if offload.masters and not offload.optimizer:
        yield (
            "masters=true keeps the fp32 weights of those parameters in host memory whose moments are there, but "
            "optimizer=0 keeps all moments on the device. Set offload.optimizer=1.0, or leave masters out."
        )
    if offload.masters and precision.dtype == "fp32":
        yield (
            "masters=true keeps fp32 weights in host memory, but with precision.dtype=fp32 layers compute with them. "
            "Use dtype=bf16, or leave masters out."
        )
