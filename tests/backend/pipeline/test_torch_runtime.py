"""Schedules exported for torch run in torch's own `_PipelineScheduleRuntime`, on gloo processes, and
compute what our executor does.

Two oracles. *Our stages in torch's runtime*: the same exact-numerics stages run once under each runtime. Rows,
messages, waits and the moments of I and W are then all that differs, so activations, losses and gradients must be equal
to the last bit, whatever the order in which a schedule adds up its microbatches. *A plain torch model in torch's
runtime*: nothing but the schedule and the numbers of the weights is ours, weight gradients pass through torch's own
split of the backward, and results agree within a bound.

Bound. A product that sums K terms is off by at most K u of its operands' norms (u = 2^-24), and first-order errors add
along a chain (as in test_model_oracle.py). Forward and backward through L layers of 5 products, the head and the sum
over tokens, with norms, softmax and activations counted as products, are 2 (8 L + 3) operations; no sum has more than K
= 256 terms, the vocabulary.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn import functional as F

from helpers.gates import sample
from helpers.plans import product_plan
from shardproof import Schedule, build, check, lower
from shardproof.backend.base.microbatch import Microbatch
from shardproof.backend.base.observe import Observer
from shardproof.backend.launching.launch import preload
from shardproof.backend.model.transformer import Stage
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.transport.base import Transport
from shardproof.core.base.errors import ScheduleError
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import TOKEN_TABLE
from shardproof.core.plan.plan import Plan
from shardproof.core.schedule import CATALOG

SEQUENCE, HIDDEN, VOCABULARY = 8, 32, 256


def bound(num_layers: int) -> float:
    """Relative to the norm of what is compared."""
    return 2 * (8 * num_layers + 3) * VOCABULARY * 2.0**-24


Form = Literal["compute_only", "compute_comms"]
"""How much is in a file, in torch's words. What is missing is added by torch itself."""


@dataclass(frozen=True)
class Export:
    """One schedule as a plan of ours and as files for torch."""

    plan: Plan
    torch_csv: Mapping[Form, str]
    rendezvous: str


def export(schedule: Schedule, folder: Path) -> Export:
    """One layer per stage and one sample of 8 tokens per microbatch."""

    def write(name: str, text: str) -> str:
        (folder / name).write_text(text)
        return str(folder / name)

    layout = Layout(pp=schedule.num_ranks, vpp=schedule.num_stages // schedule.num_ranks)
    shape = (schedule.num_stages, HIDDEN, 48, 4, 2, 8, VOCABULARY, SEQUENCE)
    file = write("ours.csv", schedule.to_csv())
    plan = product_plan(
        layout, model=ModelSpec("squared", *shape, activation="relu_squared", position="learned"),
        samples=schedule.num_microbatches, sequence=SEQUENCE, dtype="fp32", mode="exact", file=file,
    )  # fmt: skip
    forms = {"compute_only": schedule, "compute_comms": lower(schedule)}
    files = {form: write(f"{form}.csv", each.to_csv(dialect="torch")) for form, each in forms.items()}
    return Export(plan, files, str(folder / "rendezvous"))


class Seen(Observer):
    """An observer that keeps activations by (name, first sample) and finished gradients by name."""

    def __init__(self):
        self.activations: dict[tuple[str, int], Tensor] = {}
        self.gradients: dict[str, Tensor] = {}

    def begin_step(self, step):
        self.activations, self.gradients = {}, {}

    def activation(self, name, microbatch, tokens, tensor):
        self.activations[name, microbatch.first_sample] = tensor.detach().clone()

    def gradient(self, name, slices, tensor):
        self.gradients[name] = tensor.clone()


class BackwardBegins(torch.autograd.Function):
    """Passes a stage's output on; its backward comes before all others of the stage."""

    @staticmethod
    def forward(ctx, output, begin):
        ctx.begin = begin
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient):
        ctx.begin()
        return gradient, None


class OurStage(nn.Module):
    """A `Stage` as a submodule of torch's `PipelineStage`. Weight gradients wait until `dw_builder` is asked for them.

    torch calls `dw_builder` right after a stage's backward, and what it returned then at once for B, or at the W.
    """

    def __init__(self, stage: Stage):
        super().__init__()
        self.stage = stage
        self._deferred: tuple[int, ExitStack] | None = None

    def forward(self, x, *, sample, targets):
        (index,) = sample.tolist()
        microbatch = Microbatch(index, index, x if self.stage.stage.embedding else targets, targets)
        output = self.stage(microbatch, None if self.stage.stage.embedding else x)
        return BackwardBegins.apply(output, lambda: self.defer(index))

    def defer(self, microbatch: int) -> None:
        self._deferred = microbatch, ExitStack()
        self._deferred[1].enter_context(self.stage.weight_work.defer(microbatch))

    def dw_builder(self) -> Callable[[], None]:
        microbatch, deferral = self._deferred
        deferral.close()
        return lambda: self.stage.weight_work.run(microbatch)


class PlainStage(nn.Module):
    """The same stage in plain torch, as one would write it from the papers. Parameters have our
    names, with underscores."""

    dw_builder = None

    def __init__(self, stage: Stage):
        super().__init__()
        self.content = stage.stage
        self.names = list(stage.shards)
        for name, shard in stage.shards.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(shard.tensor.detach().clone()))

    def __getitem__(self, name: str) -> Tensor:
        return self.get_parameter(name.replace(".", "_"))

    def forward(self, x, *, sample, targets):
        if self.content.embedding:
            x = F.embedding(x, self[TOKEN_TABLE]) + self["embedding.positions.weight"]
        for layer in self.content.layers:
            x = x + self.attention(f"layers.{layer}.attention", x)
            x = x + self.mlp(f"layers.{layer}.mlp", x)
        if not self.content.head:
            return x
        logits = F.linear(self.norm("head.norm", x), self["head.output.weight"])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)

    def norm(self, name, x):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self[f"{name}.weight"]

    def attention(self, name, x):
        """Two groups of two queries, a key and a value, each of width 8."""
        rows = F.linear(self.norm(f"{name}.norm", x), self[f"{name}.qkv.weight"]).view(1, SEQUENCE, 2, 4, 8)
        scores = torch.einsum("bigrd,bjgd->bgrij", rows[:, :, :, :2], rows[:, :, :, 2]) / 8**0.5
        scores = scores.masked_fill(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1), -torch.inf)
        mixed = torch.einsum("bgrij,bjgd->bigrd", scores.softmax(-1), rows[:, :, :, 3])
        return F.linear(mixed.reshape(x.shape), self[f"{name}.output.weight"])

    def mlp(self, name, x):
        return F.linear(
            F.relu(F.linear(self.norm(f"{name}.norm", x), self[f"{name}.up.weight"])) ** 2, self[f"{name}.down.weight"]
        )


def run_in_torch(rank: TrainingRank, modules: Mapping[int, nn.Module], path: str, form: Form) -> list[Tensor]:
    """The first step of the plan on torch's runtime; the loss of every microbatch where the last stage
    is, nothing elsewhere."""
    size, num_stages = rank.plan.batch.global_size, len(rank.plan.stages)
    tokens, targets = rank.batches.corpus.batch(0, size, SEQUENCE, rank.plan.train.seed)
    stages = []
    for number, module in modules.items():
        taken = tokens[:1] if number == 0 else torch.zeros(1, SEQUENCE, HIDDEN, requires_grad=True)
        made = torch.zeros((1, SEQUENCE) if number == num_stages - 1 else (1, SEQUENCE, HIDDEN), requires_grad=True)
        where = (module, number, num_stages, torch.device("cpu"))
        stages.append(PipelineStage(*where, input_args=(taken,), output_args=(made,), dw_builder=module.dw_builder))
    runtime = _PipelineScheduleRuntime(stages, size, loss_fn=lambda losses, _: losses.sum(), scale_grads=False)
    runtime._load_csv(path, format=form)
    losses: list[Tensor] = []
    first = (tokens,) if 0 in modules else ()
    runtime.step(
        *first, target=targets, losses=losses, return_outputs=False, sample=torch.arange(size), targets=targets
    )
    return [loss.detach() for loss in losses]


@contextmanager
def default_group(rendezvous: str, transport: Transport) -> Iterator[None]:
    """torch's default process group, which its runtime cannot do without, among the ranks of a transport."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(rendezvous, transport.world_size)
    dist.init_process_group("gloo", store=store, rank=transport.global_rank, world_size=transport.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Outcome:
    """One step on one rank: activations of our stages, finished gradients, and the loss of every microbatch on
    the last stage's rank."""

    activations: Mapping[tuple[str, int], Tensor]
    gradients: Mapping[str, Tensor]
    losses: list[Tensor]


def all_runs(transport: Transport, case: Export) -> dict[str, Outcome] | None:
    """The same step with the same weights: our stages and plain ones in torch's runtime, then
    our stages in our executor.

    Processes beyond the plan's world do nothing: starting ranks takes longer than a step, so there is one pool of four.
    """
    world_size = case.plan.layout.world_size
    if transport.global_rank >= world_size:
        return None
    transport = copy.copy(transport)
    transport.world_size = world_size
    seen = Seen()
    rank = TrainingRank(transport, case.plan, observer=seen)
    ours = {number: OurStage(stage) for number, stage in rank.stages.items()}
    plain = {number: PlainStage(stage) for number, stage in rank.stages.items()}
    outcomes = {}
    with default_group(case.rendezvous, transport):
        for form, path in case.torch_csv.items():
            seen.begin_step(0)
            losses = run_in_torch(rank, ours, path, form)
            sums = [stage.gradients.reduce(rank.mesh.dp, case.plan.samples_of) for stage in rank.stages.values()]
            gradients = {name: total / rank.batches.num_tokens for of_stage in sums for name, total in of_stage.items()}
            outcomes[form] = Outcome(seen.activations, gradients, losses)
        losses = run_in_torch(rank, plain, case.torch_csv["compute_comms"], "compute_comms")
    gradients = {
        name: module[name].grad / rank.batches.num_tokens for module in plain.values() for name in module.names
    }
    outcomes["plain"] = Outcome({}, gradients, losses)
    rank.step(0)
    outcomes["executor"] = Outcome(seen.activations, seen.gradients, losses_of(seen))
    return outcomes


def losses_of(seen: Seen) -> list[Tensor]:
    found = {sample: tensor.sum() for (name, sample), tensor in seen.activations.items() if name == "head.losses"}
    return [found[sample] for sample in sorted(found)]


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


REPLICATED = {"DualPipe"}
"""Schedules that torch's dialect cannot say: a stage has one rank there."""


def case(name: str, pp: int, num_microbatches: int, vpp: int = 1) -> Schedule:
    return build(name, pp=pp, vpp=CATALOG[name].nearest_vpp(vpp), num_microbatches=num_microbatches)


SHAPES = [
    *((name, 3, 6, 2) for name in CATALOG if name not in REPLICATED),
    ("1F1B", 4, 8, 1),
    ("ZBVZeroBubble", 4, 8, 2),
    ("1F1B", 3, 2, 1),  # fewer microbatches than ranks
    ("Interleaved1F1B", 2, 4, 3),  # both directions of every value go to the same peer
    ("Interleaved1F1B", 3, 5, 2),
    ("ZBVZeroBubble", 2, 5, 2),  # a vee of two
    ("VMin", 2, 5, 2),
    ("VHalf", 3, 7, 2),
    ("DualPipeV", 3, 7, 2),
]
CASES = {f"{name} p{pp} v{CATALOG[name].nearest_vpp(vpp)} m{m}": case(name, pp, m, vpp) for name, pp, m, vpp in SHAPES}


@pytest.fixture(scope="module", params=sample(CASES.values(), on_push=len(CASES) - 9), ids=CASES.keys())
def schedule(request) -> Schedule:
    return request.param


@pytest.fixture(scope="module")
def runs(schedule, workers, tmp_path_factory) -> list[dict[str, Outcome]]:
    """Per rank the outcome of every run of one schedule."""
    preload("torch.distributed.pipelining", "torch._dynamo")
    return workers(4).run(all_runs, export(schedule, tmp_path_factory.mktemp("csv")))[: schedule.num_ranks]


def test_torchs_runtime_returns_one_loss_per_microbatch_on_the_rank_of_the_last_stage(schedule, runs):
    last = schedule.placement.rank_of(schedule.num_stages - 1)
    for pp_rank, outcomes in enumerate(runs):
        assert {len(outcome.losses) for outcome in outcomes.values()} == {
            schedule.num_microbatches if pp_rank == last else 0
        }


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_our_stages_compute_the_same_bits_in_torchs_runtime_and_in_our_executor(schedule, runs, form):
    num_compared = 0
    for outcomes in runs:
        theirs, ours = outcomes[form], outcomes["executor"]
        assert theirs.losses == ours.losses
        for found, expected in ((theirs.activations, ours.activations), (theirs.gradients, ours.gradients)):
            assert found.keys() == expected.keys()
            assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
            num_compared += len(expected)
    # Activations: embedding, losses and five per layer. Gradients: two tables, two in the head, six per layer.
    assert num_compared == schedule.num_microbatches * (2 + 5 * schedule.num_stages) + 4 + 6 * schedule.num_stages


def test_a_plain_torch_model_in_torchs_runtime_agrees_with_our_executor_within_the_bound(schedule, runs):
    for outcomes in runs:
        theirs, ours = outcomes["plain"], outcomes["executor"]
        assert all(
            relative(*pair) < bound(schedule.num_stages) for pair in zip(theirs.losses, ours.losses, strict=True)
        )
        assert theirs.gradients.keys() == ours.gradients.keys()
        assert max(relative(theirs.gradients[name], gradient) for name, gradient in ours.gradients.items()) < bound(
            schedule.num_stages
        )


@pytest.mark.parametrize("name", sorted(REPLICATED))
def test_a_schedule_with_replicas_is_refused_because_torch_has_one_rank_per_stage(name):
    with pytest.raises(ScheduleError, match="one rank per stage"):
        case(name, 4, 8).to_csv(dialect="torch")


def test_swapped_sends_pass_torchs_loader_and_change_two_losses_but_check_names_them(workers, tmp_path):
    schedule = case("1F1B", 3, 4)
    correct = export(schedule, tmp_path)
    text = Path(correct.torch_csv["compute_comms"]).read_text()
    swapped = text.replace("0SEND_F0,0F1,0SEND_F1", "0F1,0SEND_F1,0SEND_F0")
    assert swapped != text
    (tmp_path / "swapped.csv").write_text(swapped)
    files = {**correct.torch_csv, "compute_comms": str(tmp_path / "swapped.csv")}
    last = workers(4).run(all_runs, replace(correct, torch_csv=files))[2]
    wrong = [not torch.equal(*pair) for pair in zip(last["compute_comms"].losses, last["executor"].losses, strict=True)]
    assert wrong == [True, True, False, False]
    assert [finding.rule for finding in check(Schedule.from_csv(swapped))] == ["message-order"]


def example_losses(transport: Transport, rendezvous: str) -> tuple[list[float], list[float]]:
    example = importlib.import_module("shardproof.examples.torch_pipelining")
    with default_group(rendezvous, transport):
        return example.losses_in_torch("ZBVZeroBubble"), example.losses_in_one_process(2 * transport.world_size)


def test_the_torch_pipelining_example_prints_the_losses_of_one_process(workers, tmp_path):
    (in_torch, in_one_process), *others = workers(4).run(example_losses, str(tmp_path / "rendezvous"))
    assert len(in_torch) == 8
    assert in_torch == in_one_process
    assert all(losses == [] for losses, _ in others)
