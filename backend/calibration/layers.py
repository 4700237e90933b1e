"""Layers of next to no size: what a layer costs on a host besides the work that grows with its tensors.

Python, autograd's graph, views, the books of weight gradients and the first microseconds of every kernel are in it, as
the backend's own blocks have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ...core.layout.layout import Layout
from ...core.machine.cluster_presets import cluster_preset
from ...core.model.model_presets import model_preset
from ...core.plan.plan import Plan
from ...core.plan.sections import Batch, Numerics, Precision
from .cases import Case

TOKENS, LAYERS = 8, 4
SMALL = {
    "num_layers": LAYERS,
    "hidden_size": 16,
    "ffn_hidden_size": 32,
    "num_heads": 4,
    "head_dim": 4,
    "vocab_size": 32,
}

KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "plain": ("tiny-gpt", {"num_kv_heads": 4, "max_positions": TOKENS}),
    "gated": ("tiny-llama", {"num_kv_heads": 2}),
}
"""Kind of layer -> a preset that has it, and what is small about it here."""


def layers(group: Any, recorder: Any, device: Any) -> Iterator[Case]:
    """Cases of a forward and a whole backward of one layer of each kind; `group` is a group of one rank."""
    for kind, (preset, fields) in KINDS.items():
        model = replace(model_preset(preset), **{**SMALL, **fields})
        plan = Plan(
            model,
            cluster_preset("this-host", 1),
            Layout(),
            Batch(1, 1, TOKENS),
            precision=Precision("fp32"),
            numerics=Numerics("fast"),
        )
        run = _Run(plan, group, recorder, device)
        yield "kernel", f"layer_{kind}", (1,), partial(list, (run.forward,)), float(LAYERS)
        yield "kernel", f"layer_{kind}_backward", (1,), partial(list, (run.backward,)), float(LAYERS)


class _Run:
    """The blocks of a stage, one after the other, and back through them again and again."""

    def __init__(self, plan: Plan, group: Any, recorder: Any, device: Any):
        import torch

        from ..base.microbatch import Microbatch
        from ..model.transformer import Stage
        from ..numerics import make_numerics

        self._stage = Stage(plan, plan.stages[0], tp=group, numerics=make_numerics(plan, device), recorder=recorder)
        ids = torch.zeros(1, TOKENS, dtype=torch.int64, device=device)
        self._microbatch = Microbatch(0, 0, ids, ids, step=0)
        self._x = torch.randn(1, TOKENS, plan.model.hidden_size, device=device, requires_grad=True)
        self._y = self.forward()
        self._dy = torch.randn_like(self._y)

    def forward(self) -> Any:
        """The hidden states behind the last block."""
        y = self._x
        with self._stage.context.running(self._microbatch):
            for block in self._stage.blocks:
                y = block(y)
        return y

    def backward(self) -> Any:
        """The gradient of what goes into the first block; weight gradients are added to their sums."""
        import torch

        found = torch.autograd.grad(self._y, self._x, self._dy, retain_graph=True)
        self._stage.finish_gradients(self._microbatch)
        return found
