"""What may be wrong with captured steps, as changes of our own code in a rank's process: each an error that names it,
or bits that differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...backend.base import draw_keys
from ...backend.gradients import not_finite
from ...backend.pipeline import graphs, messages
from ...backend.ranks import training_rank
from ...backend.tensor_parallel import context
from ...backend.tensor_parallel.data import context_positions
from .changes import EARLY, TOP, Change

BITS = "bits"
"""The rule of what is found by bits that differ; other rules are words of the error that names it."""


def _fills_keys_alone(own: graphs.StepGraphs, captured: graphs.Captured[Any], microbatches: Any) -> None:
    captured.keys.fill(microbatches[0].step)


def _bakes_step(like: Callable[..., Any]) -> Callable[..., Any]:
    return lambda microbatch, keys, device: replace(like(microbatch, keys, device), step=microbatch.step)


def _moves_weights(refresh: Callable[[training_rank.TrainingRank], None]) -> Callable[..., None]:
    def refreshed(rank: training_rank.TrainingRank) -> None:
        refresh(rank)
        for shard in rank.shards:
            shard.storage.data = shard.storage.data.clone()

    return refreshed


def _copied_places(layers: context.LayerContext) -> Any:
    return context_positions(layers.chunks.num_items, layers.cp.size, layers.cp.rank).to(layers.numerics.device)


def _is_never_captured(device: Any) -> bool:
    return False


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
        "is_captured",
        _is_never_captured,
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
        "refresh",
        _moves_weights(training_rank.TrainingRank.refresh),
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
)

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


LAYER_PLANS = {
    "layer-tp2-pp2": _by_layer(4, model=_DROPOUT, ranks=4, layout="tp = 2\npp = 2"),
    "layer-zero-bubble": _by_layer(4, model=_DROPS, ranks=2, layout="pp = 2")
    .replace("[data_parallel]", _ZERO_BUBBLE)
    .replace("[train]", _SELECTIVE),
    "layer-experts": _by_layer(4, model=_EXPERTS, ranks=2, layout="dp = 2\nep = 2"),
    "layer-zero3": _by_layer(4, ranks=4, layout="pp = 2\nvpp = 2\ndp = 2\nzero = 3").replace(
        "[data_parallel]", _ONE_STAGE
    ),
}
"""The same whose layers are captured: dropout, a split backward with recomputation, experts with a shared one and
multi-token prediction, weights that rest in parts."""
