"""What may be wrong with captured steps, as changes of our own code in a rank's process: each an error that names it,
or bits that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ...backend.base import draw_keys, recorder
from ...backend.gradients import not_finite
from ...backend.pipeline import graphs, messages
from ...backend.pipeline.slots import slots_of
from ...backend.ranks import graphed_part, layer_graphs, training_rank
from ...backend.tensor_parallel import context
from ...backend.tensor_parallel.data import context_positions
from .changes import EARLY, TOP, Change

BITS = "bits"
"""The rule of what is found by bits that differ; other rules are words of the error that names it."""

NO_NUMBERS = "which are no finite numbers"
"""What training says where it reads memory that was let go of: pretended CUDA fills that with NaN."""


def _fills_keys_alone(own: graphs.StepGraphs, captured: graphs.Captured[Any], microbatches: Any) -> None:
    captured.keys.fill(microbatches[0].step)


def _bakes_step(like: Callable[..., Any]) -> Callable[..., Any]:
    return lambda microbatch, keys, device: replace(like(microbatch, keys, device), step=microbatch.step)


def _moves_weights(share: Callable[[training_rank.TrainingRank], None]) -> Callable[..., None]:
    def moved(rank: training_rank.TrainingRank) -> None:
        share(rank)
        for shard in rank.shards:
            shard.storage.data = shard.storage.data.clone()

    return moved


def _copied_places(layers: context.LayerContext) -> Any:
    return context_positions(layers.chunks.num_items, layers.cp.size, layers.cp.rank).to(layers.numerics.device)


def _is_never_captured(device: Any) -> bool:
    return False


def _looks_at_once(held: Mapping[str, Any]) -> not_finite.Found:
    found = not_finite.find(held)
    return lambda: found


def _finishes_alone(lane: Any) -> None:
    lane._mail.wait_until(lambda: len(lane._times) == len(lane._actions))
    lane._thread.join()


GRAPH_CHANGES = (
    Change(
        "tokens are not copied to where a graph reads them",
        graphs.StepGraphs,
        "_fill",
        _fills_keys_alone,
        BITS,
        "tp2-pp2",
    ),
    Change(
        "the number of the step is captured",
        graphs,
        "own_microbatch",
        _bakes_step(graphs.own_microbatch),
        BITS,
        "tp2-pp2",
    ),
    Change(
        "keys of draws are not those of the step", draw_keys.DrawKeys, "fill", lambda keys, step: None, BITS, "tp2-pp2"
    ),
    Change(
        "a lane is no part of the capture",
        messages,
        "capture_of",
        lambda device: None,
        "no part of the capture",
        "tp2-pp2",
    ),
    Change(
        "a lane is not waited for by the capture",
        messages.Lane,
        "finish",
        _finishes_alone,
        "not waited for at the end of the capture",
        "tp2-pp2",
    ),
    Change(
        "the host looks at gradients in a capture",
        not_finite,
        "look",
        _looks_at_once,
        "the host waits: a number for the host in 1REDUCE_GRAD",
        "tp2-pp2",
    ),
    Change(
        "the host makes positions in a capture",
        context.LayerContext,
        "places",
        _copied_places,
        "the host waits: a copy between host and device in 0F0",
        "tp2-pp2",
    ),
    Change(
        "weights are moved between replays",
        training_rank.TrainingRank,
        "_share",
        _moves_weights(training_rank.TrainingRank._share),
        "has been let go of since",
        "tp2-pp2",
    ),
    Change(
        "times are taken inside of the graph",
        messages,
        "is_captured",
        _is_never_captured,
        "an event of a captured stream is no time",
        "tp2-pp2",
    ),
    Change(
        "a captured step is there when communicators end",
        graphs.StepGraphs,
        "close",
        lambda graphs: None,
        "ends-under-graph",
        "tp2-pp2",
    ),
)


def _one_slot(row: Any) -> Mapping[int, Mapping[int, int]]:
    return {stage: dict.fromkeys(slots, 0) for stage, slots in slots_of(row).items()}


def _copies_alone(slot: Any) -> None:
    graphs.copy_into([slot.taken], [replace(slot.own, place=None)])


def _one_late(backward: Callable[..., Any]) -> Callable[..., Any]:
    def replayed(part: Any, microbatch: Any, gradients: Any) -> Any:
        before = [own.clone() for own in part._gradients] if part._backwards else gradients
        found = backward(part, microbatch, before)
        for own, gradient in zip(part._gradients, gradients, strict=True):
            own.copy_(gradient)
        return found

    return replayed


def _adds_once(give: Callable[..., None]) -> Callable[..., None]:
    captured: list[Any] = []  # compared by what they are

    def given(part: Any, own: Any, microbatch: Any) -> None:
        is_new = not any(each is own for each in captured)
        captured.append(own)
        give(part, own if is_new else [], microbatch)

    return given


def _lets_go(capture: Callable[..., Any]) -> Callable[..., Any]:
    def captured(part: Any, deferring: bool) -> Any:
        found = capture(part, deferring)
        part._outputs = [output.detach() for output in part._outputs]
        return found

    return captured


def _as_it_lies(contribution: Any) -> Any:
    return contribution


def _nothing(*given: Any) -> None:
    """Does nothing."""


_new_pool = torch.cuda.graph_pool_handle
_pools: list[Any] = []


def _one_pool() -> Any:
    if not _pools:
        _pools.append(_new_pool())
    return _pools[0]


_Part = graphed_part.GraphedPart

LAYER_CHANGES = (
    Change(
        "two microbatches in flight have one slot",
        training_rank,
        "slots_of",
        _one_slot,
        "before the weight gradients of microbatch",
        "layer-zero-bubble",
    ),
    Change("graphs of all slots have one pool", torch.cuda, "graph_pool_handle", _one_pool, BITS, "layer-zero-bubble"),
    Change("keys of layers are not filled", layer_graphs.LayerGraphs, "fill_keys", _nothing, BITS, "layer-zero-bubble"),
    Change(
        "layers draw for no microbatch of their own",
        layer_graphs._Slot,
        "_take",
        _copies_alone,
        BITS,
        "layer-zero-bubble",
    ),
    Change(
        "the host makes positions while a layer is captured",
        context.LayerContext,
        "places",
        _copied_places,
        "the host waits: a copy between host and device in 0F0",
        "layer-zero-bubble",
    ),
    Change(
        "a backward is replayed before its gradient has come",
        _Part,
        "backward",
        _one_late(_Part.backward),
        BITS,
        "layer-zero-bubble",
    ),
    Change(
        "gradients are added when they are captured, not when they are replayed",
        _Part,
        "_give",
        _adds_once(_Part._give),
        BITS,
        "layer-zero-bubble",
    ),
    Change(
        "gradients are added up where graphs write them",
        graphed_part,
        "own_contribution",
        _as_it_lies,
        BITS,
        "layer-zero-bubble",
    ),
    Change(
        "what a backward needs is given to others once it is captured",
        _Part,
        "_capture_backward",
        _lets_go(_Part._capture_backward),
        "which are no finite numbers",
        "layer-experts",
    ),
    Change(
        "a stage sends from where a graph writes",
        layer_graphs.StageParts,
        "leave",
        lambda parts, x_BSH: x_BSH,
        "written-while-read",
        "layer-zero-bubble",
    ),
    Change(
        "what is replayed is not recorded",
        recorder.Recorder,
        "repeat",
        _nothing,
        "other-than-program",
        "layer-zero-bubble",
    ),
    Change(
        "weights that rest in parts come together anywhere",
        training_rank,
        "gather_in_place",
        _nothing,
        "has been let go of since",
        "layer-zero3",
    ),
    Change(
        "captured layers are there when communicators end",
        layer_graphs.LayerGraphs,
        "close",
        lambda graphs: None,
        "ends-under-graph",
        "layer-tp2-pp2",
    ),
)
"""What may be wrong with captured layers; a rule is `BITS`, a rule of `Examined.rules`, or words of the error."""

_GRAPHS = "[runtime]\ncuda_graphs = true\ncuda_graph_warmup_steps = 1\n[train]"
_DROPOUT = "hidden_dropout = 0.1\nattention_dropout = 0.1"


def _graphed(**parts: Any) -> str:
    return TOP.format(**{"model": "", "data": "", **parts}).replace("[train]", _GRAPHS)


GRAPH_PLANS = {
    "tp2-pp2": _graphed(model=_DROPOUT, ranks=4, layout="tp = 2\npp = 2"),
    "dp2-zero1": _graphed(ranks=2, layout="dp = 2\nzero = 1", data=EARLY),
    "cp2": _graphed(ranks=2, layout="cp = 2").replace(
        '"exact"', '"exact"\ngradient_token_block = 8\nreduction_token_block = 8'
    ),
    "pp2-interleaved": _graphed(ranks=2, layout="pp = 2\nvpp = 2").replace(
        "[data_parallel]", '[schedule]\nname = "Interleaved1F1B"\n[data_parallel]'
    ),
}
"""Small plans whose steps are captured; the first is that of all changes. Three steps are replayed after the first."""

_DROPS = "hidden_dropout = 0.1"
_ZERO_BUBBLE = '[schedule]\nname = "ZBH1"\n[data_parallel]'
_SELECTIVE = '[recompute]\nmode = "selective"\nmodules = ["core_attn", "norm", "mlp_act"]\n[train]'
_EXPERTS = f"""{_DROPS}
num_experts = 4
experts_per_token = 2
expert_bias = true
num_shared_experts = 1
num_mtp_layers = 1"""
_ONE_STAGE = '[schedule]\nname = "Interleaved1F1B"\nmax_active_stages = 1\n[data_parallel]'
_BY_LAYER = 'cuda_graphs = true\ncuda_graph_scope = "layer"'


def _by_layer(microbatches: int, **parts: Any) -> str:
    text = _graphed(**parts).replace("cuda_graphs = true", _BY_LAYER)
    return text.replace(f"global = {parts['ranks']}", f"global = {microbatches}")


def _batches(schedule: str, text: str) -> str:
    return text.replace("[batch]", f'[batch]\nschedule = "{schedule}"')


LAYER_PLANS = {
    "layer-tp2-pp2": _by_layer(4, model=_DROPOUT, ranks=4, layout="tp = 2\npp = 2"),
    "layer-zero-bubble": _by_layer(4, model=_DROPS, ranks=2, layout="pp = 2")
    .replace("[data_parallel]", _ZERO_BUBBLE)
    .replace("[train]", _SELECTIVE),
    "layer-experts": _by_layer(4, model=_EXPERTS, ranks=2, layout="dp = 2\nep = 2"),
    "layer-zero3": _by_layer(4, ranks=4, layout="pp = 2\nvpp = 2\ndp = 2\nzero = 3").replace(
        "[data_parallel]", _ONE_STAGE
    ),
    "layer-batches": _batches("0:4 4:8 12:4 16:8", _by_layer(8, model=_DROPS, ranks=2, layout="pp = 2")),
    "layer-zero3-batches": _batches(
        "0:4 4:8 12:4 16:8", _by_layer(8, ranks=4, layout="pp = 2\nvpp = 2\ndp = 2\nzero = 3")
    ).replace("[data_parallel]", _ONE_STAGE),
    "layer-registered": _by_layer(4, ranks=2, layout="dp = 2\nzero = 2", data=EARLY)
    .replace('"exact"', '"fast"')
    .replace("[train]", '[communicators]\nregistered = ["dp"]\n[train]'),
}
"""The same whose layers are captured: dropout, a split backward with recomputation, experts with a shared one and
multi-token prediction, weights that rest in parts, batches that change, buckets in memory that NCCL knows."""
