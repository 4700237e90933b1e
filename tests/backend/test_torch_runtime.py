"""Schedules exported for torch run in torch's own `_PipelineScheduleRuntime`, on gloo processes, and compute what our executor does.

Two oracles. *Our stages in torch's runtime*: the same exact-numerics stages run once under each runtime. Rows, messages, waits and the
moments of I and W are then all that differs, so activations, losses and gradients must be equal to the last bit, whatever the order
in which a schedule adds up its microbatches. *A plain torch model in torch's runtime*: nothing but the schedule and the numbers of
the weights is ours, weight gradients pass through torch's own split of the backward, and results agree within a bound.

Bound. A product that sums K terms is off by at most K u of its operands' norms (u = 2^-24), and first-order errors add along a chain
(as in test_model_oracle.py). Forward and backward through L layers of 5 products, the head and the sum over tokens, with norms,
softmax and activations counted as products, are 2 (8 L + 3) operations; no sum has more than K = 256 terms, the vocabulary.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn import functional as F

from shardproof import Schedule, build, lower
from shardproof.backend.model.transformer import Microbatch, Stage
from shardproof.backend.training_rank import TrainingRank
from shardproof.core.cluster_presets import cluster_preset
from shardproof.core.layout import Layout
from shardproof.core.model import ModelSpec
from shardproof.core.plan import Batch, Numerics, Plan, Precision, ScheduleChoice
from shardproof.core.stages import StageLayers

SEQUENCE, HIDDEN, VOCABULARY = 8, 32, 256


def bound(num_layers: int) -> float:
    """Relative to the norm of what is compared."""
    return 2 * (8 * num_layers + 3) * VOCABULARY * 2.0**-24


@dataclass(frozen=True)
class Export:
    """One schedule in files, as torch reads it and as we do. `form` is torch's name for how much is in the file."""

    plan: Plan
    torch_csv: str
    form: str
    rendezvous: str


def export(schedule: Schedule, folder: Path, form: str = "compute_comms") -> Export:
    """One layer per stage and one sample of 8 tokens per microbatch. A compute-only file is lowered by whoever reads it."""
    written = lower(schedule) if form == "compute_comms" else schedule
    ours, theirs = folder / "ours.csv", folder / "torch.csv"
    ours.write_text(written.to_csv())
    theirs.write_text(written.to_csv(dialect="torch"))
    layout = Layout(pp=schedule.num_ranks, vpp=schedule.num_stages // schedule.num_ranks)
    model = ModelSpec(
        *("squared", schedule.num_stages, HIDDEN, 48, 4, 2, 8, VOCABULARY, SEQUENCE), activation="relu_squared", position="learned"
    )
    plan = Plan(
        model,
        cluster_preset("this-host", layout.world_size),
        layout,
        Batch(schedule.num_microbatches, 1, SEQUENCE),
        precision=Precision("fp32"),
        schedule=ScheduleChoice(file=str(ours)),
        numerics=Numerics("exact"),
    )
    return Export(plan, str(theirs), form, str(folder / "rendezvous"))


class Seen:
    """An observer that keeps what a step computes: activations by (name, microbatch), gradients by name."""

    def __init__(self):
        self.activations: dict[tuple[str, int], Tensor] = {}
        self.gradients: dict[str, Tensor] = {}

    def begin_step(self, step):
        self.activations, self.gradients = {}, {}

    def activation(self, name, microbatch, tensor):
        self.activations[name, microbatch] = tensor.detach().clone()

    def gradient(self, name, slices, tensor):
        self.gradients[name] = tensor.clone()

    def scalar(self, name, value):
        pass

    def optimizer_state(self, name, slices, exp_avg, exp_avg_sq):
        pass

    def weight(self, name, slices, tensor):
        pass


class DeferredFrom(torch.autograd.Function):
    """Passes a stage's output on. Its backward comes before all others of the stage, and says whose weight gradients are to wait."""

    @staticmethod
    def forward(ctx, output, work, microbatch):
        ctx.work, ctx.microbatch = work, microbatch
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient):
        ctx.work.begin(ctx.microbatch)
        return gradient, None, None


class OurStage(nn.Module):
    """A `Stage` as a submodule of torch's `PipelineStage`. All its weight gradients wait until `dw_builder` is asked for them.

    torch calls `dw_builder` right after a stage's backward, and what it returned then at once for B, or when the W comes.
    """

    def __init__(self, stage: Stage):
        super().__init__()
        self.stage = stage
        self._waiting: int | None = None
        self._deferral = None

    def forward(self, x, *, sample, target):
        (first,) = sample.tolist()
        hidden, tokens = (None, x) if self.stage.stage.embedding else (x, target)
        return DeferredFrom.apply(self.stage(Microbatch(first, first, tokens, target), hidden), self, first)

    def begin(self, microbatch: int) -> None:
        self._waiting, self._deferral = microbatch, self.stage.weight_work.defer(microbatch)
        self._deferral.__enter__()

    def dw_builder(self) -> Callable[[], None]:
        self._deferral.__exit__(None, None, None)
        microbatch = self._waiting
        return lambda: self.stage.weight_work.run(microbatch)


class PlainStage(nn.Module):
    """The same stage in plain torch, as one would write it from the papers. Parameters have our names, with underscores."""

    dw_builder = None

    def __init__(self, stage: Stage):
        super().__init__()
        self.content: StageLayers = stage.stage
        for name, shard in stage.shards.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(shard.tensor.detach().clone()))

    def __getitem__(self, name: str) -> Tensor:
        return self.get_parameter(name.replace(".", "_"))

    def forward(self, x, *, sample, target):
        if self.content.embedding:
            x = F.embedding(x, self["embedding.tokens.weight"]) + self["embedding.positions.weight"]
        for layer in self.content.layers:
            x = x + self.attention(f"layers.{layer}.attention", x)
            x = x + self.mlp(f"layers.{layer}.mlp", x)
        if not self.content.head:
            return x
        logits = F.linear(self.norm("head.norm", x), self["head.output.weight"])
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)

    def norm(self, name, x):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self[f"{name}.weight"]

    def attention(self, name, x):
        rows = F.linear(self.norm(f"{name}.norm", x), self[f"{name}.qkv.weight"]).view(*x.shape[:2], 2, 4, 8)  # 2 groups of 2 queries, k, v
        q, k, v = rows[:, :, :, :2], rows[:, :, :, 2], rows[:, :, :, 3]
        scores = torch.einsum("bigrd,bjgd->bgrij", q, k) / 8**0.5
        scores = scores.masked_fill(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1), -torch.inf)
        mixed = torch.einsum("bgrij,bjgd->bigrd", scores.softmax(-1), v)
        return F.linear(mixed.reshape(x.shape), self[f"{name}.output.weight"])

    def mlp(self, name, x):
        return F.linear(F.relu(F.linear(self.norm(f"{name}.norm", x), self[f"{name}.up.weight"])) ** 2, self[f"{name}.down.weight"])


def run_in_torch(rank: TrainingRank, modules: Mapping[int, nn.Module], case: Export) -> tuple[list[Tensor], Tensor | None]:
    """Loss per microbatch and token losses [samples, s], where the last stage is; [] and None elsewhere."""
    tokens, targets = rank.corpus.batch(0, 0, case.plan.batch.global_size, SEQUENCE, case.plan.train.seed, case.plan.batch.global_size)
    num_stages, num_microbatches = len(case.plan.stages), case.plan.num_microbatches
    stages = []
    for number, module in modules.items():
        sample = tokens[:1] if number == 0 else torch.zeros(1, SEQUENCE, HIDDEN, requires_grad=True)
        shape = (1, SEQUENCE) if number == num_stages - 1 else (1, SEQUENCE, HIDDEN)
        example = torch.zeros(shape, requires_grad=True)
        place = (module, number, num_stages, torch.device("cpu"))
        stages.append(PipelineStage(*place, input_args=(sample,), output_args=(example,), dw_builder=module.dw_builder))
    runtime = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn=lambda output, target: output.sum(), scale_grads=False)
    runtime._load_csv(case.torch_csv, format=case.form)
    losses: list[Tensor] = []
    first = (tokens,) if 0 in modules else ()
    samples = torch.arange(len(tokens))
    output = runtime.step(*first, target=targets, losses=losses, sample=samples, **{"target_BS": targets})
    return [loss.detach() for loss in losses], None if output is None else output.detach()
