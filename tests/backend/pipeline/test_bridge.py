"""Bridges on real transports: tensors and gradients at their places, as DAGs of modules, and as
message lanes of a pipeline."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, replace

import pytest
import torch

from helpers.gates import sampled
from helpers.plans import plan
from shardproof.backend.base.microbatch import Microbatch
from shardproof.backend.launching.launch import Workers
from shardproof.backend.model.transformer import Stage
from shardproof.backend.numerics import make_numerics
from shardproof.backend.pipeline.bridge import Bridge, BridgeReceiver, BridgeSender, open_bridge
from shardproof.backend.pipeline.executor import Executor
from shardproof.backend.pipeline.messages import Clock
from shardproof.backend.tensor_parallel.data import context_part
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.base.errors import RankFailure
from shardproof.core.layout.layout import Layout
from shardproof.core.layout.stages import assign_layers
from shardproof.core.model.model_presets import model_preset
from shardproof.core.model.parameters import parameters
from shardproof.core.plan.plan import Plan
from shardproof.core.program import Collective, Message
from shardproof.core.program.bridge import Grid, Holding, stage_grid
from shardproof.core.schedule import build, lower

SAMPLES, SEQUENCE = 6, 24
SIZES = {"num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 48, "num_heads": 12, "num_kv_heads": 12, "head_dim": 2}
MODEL = replace(model_preset("tiny-gpt"), **SIZES, tied_embeddings=False)


def plan_of(layout: Layout, micro: int = 1) -> Plan:
    """A plan of the layout's ranks only; blocks of 2 tokens and of 1, so that every degree here cuts 24 tokens."""
    return plan(
        layout,
        model=MODEL,
        samples=SAMPLES,
        micro=micro,
        sequence=SEQUENCE,
        gradient_token_block=2,
        reduction_token_block=1,
    )


def even_samples(dp: int) -> list[list[tuple[int, int]]]:
    each = SAMPLES // dp
    return [[(rank * each, (rank + 1) * each)] for rank in range(dp)]


def grid_of(layout: Layout, first_rank: int) -> Grid:
    return stage_grid(plan_of(layout), samples=even_samples(layout.dp), first_rank=first_rank)


def part(whole: torch.Tensor, holding: Holding) -> torch.Tensor:
    """What a rank holds of the whole tensor, item by item."""
    for dim, spans in enumerate(holding.dims):
        whole = whole.index_select(
            dim, torch.tensor([item for lo, hi in spans for item in range(lo, hi)], dtype=torch.int64)
        )
    return whole


def numbers(seed: int, hidden: int = MODEL.hidden_size) -> torch.Tensor:
    return torch.randn(SAMPLES, SEQUENCE, hidden, generator=torch.Generator().manual_seed(seed))


SP = {"sequence_parallel": True}
CUTS = [
    pytest.param(Layout(tp=4), Layout(tp=2), id="tp4-tp2"),
    pytest.param(Layout(tp=2), Layout(tp=3, **SP), id="tp2-tp3-sp"),
    pytest.param(Layout(tp=4, **SP), Layout(tp=3, **SP), id="sp4-sp3"),
    pytest.param(Layout(dp=2), Layout(dp=3), id="dp2-dp3"),
    pytest.param(Layout(dp=3), Layout(), id="fan-in"),
    pytest.param(Layout(), Layout(tp=2, dp=3), id="fan-out"),
    pytest.param(Layout(cp=2), Layout(cp=3), id="zig-zag"),
    pytest.param(Layout(cp=2, tp=2, **SP), Layout(dp=2, tp=3), id="cp2-sp2-dp2-tp3"),
]

Setting = tuple[Layout, Layout, bool]


def cross(transport, setting: Setting):
    """Over and back on one rank: what arrived, the gradient that came back, and what was recorded."""
    source_layout, destination_layout, colocated = setting
    source = grid_of(source_layout, 0)
    destination = grid_of(destination_layout, 0 if colocated else len(source.ranks))
    transport.recorder.enabled = True
    group = transport.group("bridge", "bridge", range(transport.world_size))
    bridge = Bridge(group, source, destination, dtype=torch.float32)
    held, wanted = (grid.holding_of(transport.global_rank) for grid in (source, destination))
    x = None if held is None else part(numbers(1), held).requires_grad_()
    y = bridge(x)
    assert y.requires_grad and tuple(y.shape) == ((0,) if wanted is None else wanted.shape)
    y.backward(torch.empty(0) if wanted is None else part(numbers(2), wanted))
    return y.detach(), None if x is None else x.grad, [event for _, event in transport.recorder.events]


def check_crossing(results, setting: Setting) -> None:
    source_layout, destination_layout, colocated = setting
    source = grid_of(source_layout, 0)
    destination = grid_of(destination_layout, 0 if colocated else len(source.ranks))
    for rank, (y, gradient, _) in enumerate(results):
        if (wanted := destination.holding_of(rank)) is not None:
            assert torch.equal(y, part(numbers(1), wanted)), rank
        if (held := source.holding_of(rank)) is not None:
            assert torch.equal(gradient, part(numbers(2), held)), rank


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize(("source", "destination"), CUTS)
def test_hidden_states_arrive_and_gradients_come_back(source, destination, colocated):
    setting = (source, destination, colocated)
    sizes = source.world_size, destination.world_size
    world = max(sizes) if colocated else sum(sizes)
    check_crossing(run_threads(MemoryWorld(world, timeout_s=120), cross, setting), setting)


def test_every_byte_is_sent_once_each_way():
    """tp4 -> tp2 without sequence parallelism: two replicas send the whole, and two of four gradients come
    from each destination."""
    setting = (Layout(tp=4), Layout(tp=2), False)
    results = run_threads(MemoryWorld(6, timeout_s=120), cross, setting)
    whole = numbers(1).nbytes
    sent = [[event.sent_bytes for event in events if isinstance(event, Collective)] for *_, events in results]
    assert sent == [[whole, 0], [whole, 0], [0, 0], [0, 0], [0, 2 * whole], [0, 2 * whole]]
    assert {(event.layer, event.op, event.axis) for *_, events in results for event in events} == {
        ("bridge", "all_to_all", "bridge")
    }


def encoder_grids() -> tuple[Grid, Grid, Grid]:
    """Two encoders of other degrees and the decoder that takes what both give: a DAG of three modules on
    rank ranges of their own."""
    return grid_of(Layout(dp=2), 0), grid_of(Layout(cp=3), 2), grid_of(Layout(dp=3), 5)


def run_encoders(transport, _):
    first, second, decoder = encoder_grids()
    bridges = [
        Bridge(
            transport.group(f"bridge{i}", "bridge", source.ranks + decoder.ranks), source, decoder, dtype=torch.float64
        )
        if transport.global_rank in source.ranks + decoder.ranks
        else None
        for i, source in enumerate((first, second))
    ]
    inputs, outputs = [], []
    for number, (grid, bridge) in enumerate(zip((first, second), bridges, strict=True)):
        if bridge is None:
            continue
        held = grid.holding_of(transport.global_rank)
        x = None if held is None else part(numbers(number).double(), held).requires_grad_()
        inputs.append(x)
        outputs.append(bridge(None if x is None else encoder(x, number)))
    wanted = decoder.holding_of(transport.global_rank)
    if wanted is None:
        outputs[0].backward(torch.empty(0, dtype=torch.float64))
    else:
        (outputs[0] * outputs[1].sin()).sum().backward()
    return [None if x is None else x.grad for x in inputs]


def encoder(x: torch.Tensor, number: int) -> torch.Tensor:
    return x.exp() if number else x * x


def test_two_encoders_of_other_degrees_and_a_decoder_have_the_gradients_of_one_process():
    results = run_threads(MemoryWorld(8, timeout_s=120), run_encoders, None)
    whole = [numbers(number).double().requires_grad_() for number in (0, 1)]
    (encoder(whole[0], 0) * encoder(whole[1], 1).sin()).sum().backward()
    for number, grid in enumerate(encoder_grids()[:2]):
        for rank, holding in zip(grid.ranks, grid.holdings, strict=True):
            assert torch.equal(results[rank][0], part(whole[number].grad, holding)), rank


def test_a_frozen_source_still_takes_part_in_the_backward():
    """Without a gradient of its own input, a source receives what the others send."""
    results = run_threads(MemoryWorld(2, timeout_s=120), frozen, None)
    assert results == [True, True]


def frozen(transport, _):
    bridge = Bridge(
        transport.group("b", "bridge", range(2)), grid_of(Layout(), 0), grid_of(Layout(), 1), dtype=torch.float32
    )
    y = bridge(numbers(1) if transport.global_rank == 0 else None)
    y.backward(torch.zeros_like(y))
    return y.requires_grad


# As message lanes


def lanes(transport, layouts: tuple[Layout, Layout]):
    """Three messages each way at the same time, as the lanes of a pipeline do."""
    source, destination = grid_of(layouts[0], 0), grid_of(layouts[1], layouts[0].world_size)
    there = open_bridge(transport, "F", source, destination)
    back = open_bridge(transport, "B", destination, source)
    holding = (source if isinstance(there, BridgeSender) else destination).holding_of(transport.global_rank)
    sender, receiver = (there, back) if isinstance(there, BridgeSender) else (back, there)
    assert isinstance(sender, BridgeSender) and isinstance(receiver, BridgeReceiver)
    first_seed = 0 if sender is there else 10

    def send():
        for seed in range(3):
            sender.send(part(numbers(first_seed + seed), holding))

    thread = threading.Thread(target=send)
    thread.start()
    received = [receiver.receive(holding.shape, torch.float32) for _ in range(3)]
    thread.join()
    return all(torch.equal(one, part(numbers(10 - first_seed + seed), holding)) for seed, one in enumerate(received))


def test_lanes_bring_messages_in_order_both_ways_at_once():
    layouts = Layout(tp=2, cp=2, **SP), Layout(dp=3)
    assert run_threads(MemoryWorld(7, timeout_s=120), lanes, layouts) == [True] * 7


# A model whose layers lie on two grids, run by the executor


@dataclass(frozen=True)
class Modules:
    """The first layer and embedding on one layout, the last layer and head on another.

    In every round each data-parallel rank has a microbatch, and all of a module together the same samples.
    Where that gives a rank samples with others between them, gradients of weights are not added up: exact
    numerics do that for intervals.
    """

    layouts: tuple[Layout, Layout]
    rounds: int
    schedule: str = "1F1B"

    @property
    def has_intervals(self) -> bool:
        return self.rounds == 1 or self.layouts[0].dp == self.layouts[1].dp

    def plan(self, module: int) -> Plan:
        return plan_of(self.layouts[module], SAMPLES // self.rounds // self.layouts[module].dp)

    def first_rank(self, module: int) -> int:
        return module * self.layouts[0].world_size

    def first_samples(self, module: int, dp_rank: int) -> list[int]:
        plan = self.plan(module)
        first, size = plan.samples_of(dp_rank)[0], plan.batch.micro_size
        if self.has_intervals:
            return [first + number * size for number in range(self.rounds)]
        return [number * size * plan.layout.dp + dp_rank * size for number in range(self.rounds)]

    def grid(self, module: int, number: int = 0) -> Grid:
        """Where the hidden states between the modules lie in a round; in others they lie the same, some samples on."""
        plan = self.plan(module)
        firsts = [self.first_samples(module, dp_rank)[number] for dp_rank in range(plan.layout.dp)]
        return stage_grid(
            plan, samples=[[(lo, lo + plan.batch.micro_size)] for lo in firsts], first_rank=self.first_rank(module)
        )


class Outputs:
    """The observer of one rank: outputs of layers and their gradients, with the samples and tokens they are of."""

    def __init__(self):
        self.seen = []

    def activation(self, name, microbatch, tokens, tensor):
        positions = [item for run in tokens for item in range(run.start, run.stop)]

        def keep(phase, values):
            self.seen.append((phase, name, microbatch.first_sample, positions, values.detach().clone()))

        keep("forward", tensor)
        tensor.register_hook(lambda gradient: keep("backward", gradient))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(0, MODEL.vocab_size, (SAMPLES, SEQUENCE + 1), generator=torch.Generator().manual_seed(5))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {p.name: torch.randn(p.shape, generator=generator) * 0.15 + (p.constant or 0.0) for p in parameters(MODEL)}


def make_microbatches(firsts: list[int], size: int, cp: int = 1, cp_rank: int = 0) -> list[Microbatch]:
    tokens, targets = (context_part(whole, cp, cp_rank) for whole in batch())
    return [Microbatch(i, lo, tokens[lo : lo + size], targets[lo : lo + size], 0) for i, lo in enumerate(firsts)]


def train_modules(transport, modules: Modules):
    """One step on one rank: what its layers computed, its gradients with their slices, and the
    bytes of its messages."""
    transport.recorder.enabled = True
    module = int(transport.global_rank >= modules.first_rank(1))
    plan, first_rank, observer, gradients = modules.plan(module), modules.first_rank(module), Outputs(), {}
    here, layout = plan.layout.coordinates(transport.global_rank - first_rank), plan.layout

    def group(axes: str):
        ranks = [first_rank + rank for rank in layout.group_of(transport.global_rank - first_rank, axes)]
        return transport.group(f"{axes}/{ranks[0]}", axes, ranks)

    tp, cp, copies, parts = (group(axes) for axes in ("tp", "cp", "cp-dp", "tp-cp"))
    grids = modules.grid(0), modules.grid(1)
    ends = {"F": open_bridge(transport, "F", *grids), "B": open_bridge(transport, "B", *reversed(grids))}
    stage = Stage(
        plan,
        assign_layers(MODEL.num_layers, Layout(pp=2))[module],
        tp=tp,
        cp=cp,
        numerics=make_numerics(plan, global_rank=transport.global_rank - first_rank),
        recorder=transport.recorder,
        observer=observer,
    )
    stage.load(weights())
    executor = Executor(
        lower(build(modules.schedule, pp=2, num_microbatches=modules.rounds)),
        module,
        {module: stage},
        channel=lambda direction, peer, sending: ends[direction],
        message_shape=grids[module].holding_of(transport.global_rank).shape,
        dtype=torch.float32,
        global_rank=transport.global_rank,
        recorder=transport.recorder,
    )

    def reduce(_: int) -> None:
        if modules.has_intervals:
            samples_of = functools.partial(plan.copy_samples, 0)
            gradients.update(stage.gradients.reduce(copies, samples_of, parts if layout.tp > 1 else None))

    executor.train(
        make_microbatches(modules.first_samples(module, here["dp"]), plan.batch.micro_size, layout.cp, here["cp"]),
        reduce_gradients=reduce,
        step=lambda losses: None,
        clock=Clock(transport.device),
    )
    sent = [event.num_bytes for _, event in transport.recorder.events if isinstance(event, Message)]
    return observer.seen, {name: (stage.shards[name].slices, gradient) for name, gradient in gradients.items()}, sent


def one_device(transport, _):
    plan, observer = plan_of(Layout()), Outputs()
    tp, dp = (transport.group(axis, axis, [0]) for axis in ("tp", "dp"))
    stage = Stage(
        plan, plan.stages[0], tp=tp, numerics=make_numerics(plan), recorder=transport.recorder, observer=observer
    )
    stage.load(weights())
    for microbatch in make_microbatches(list(range(SAMPLES)), 1):
        losses = stage(microbatch, None)
        losses.backward(torch.ones_like(losses))
        stage.finish_gradients(microbatch)
    whole = {(phase, name, first): values for phase, name, first, _, values in observer.seen}
    return whole, stage.gradients.reduce(dp, plan.samples_of)


@pytest.fixture(scope="module")
def reference():
    return run_threads(MemoryWorld(1), one_device, None)[0]


@sampled(
    "modules",
    [
        pytest.param(Modules((Layout(tp=4), Layout(tp=2)), 3), id="tp4-tp2"),
        pytest.param(Modules((Layout(tp=2), Layout(tp=6, **SP)), 6), id="tp2-tp6-sp"),
        pytest.param(Modules((Layout(tp=3, **SP), Layout(tp=2, **SP)), 2, "ZBH1"), id="sp3-sp2-split-backward"),
        pytest.param(Modules((Layout(cp=3), Layout(cp=2)), 3), id="cp3-cp2"),
        pytest.param(Modules((Layout(cp=2, tp=2, **SP), Layout(tp=3)), 3), id="cp2-sp2-tp3"),
        pytest.param(Modules((Layout(dp=2), Layout(dp=3)), 1), id="dp2-dp3"),
        pytest.param(Modules((Layout(dp=3, tp=2), Layout(dp=2, cp=2)), 1), id="dp3-tp2-dp2-cp2"),
        pytest.param(Modules((Layout(dp=2, tp=3), Layout(dp=2, tp=2, **SP)), 3), id="dp2-tp3-dp2-sp2"),
        pytest.param(Modules((Layout(tp=3), Layout(dp=2)), 1, "GPipe"), id="tp3-dp2-gpipe"),
        pytest.param(Modules((Layout(dp=3), Layout(tp=2)), 2), id="fan-in-in-rounds"),
        pytest.param(Modules((Layout(), Layout(dp=3, tp=2)), 2), id="fan-out-in-rounds"),
    ],
    on_push=6,
)
def test_a_model_on_two_grids_has_the_bits_of_one_device(modules, reference):
    world = MemoryWorld(sum(layout.world_size for layout in modules.layouts), timeout_s=60)
    check_modules(run_threads(world, train_modules, modules), modules, reference)


def check_modules(results, modules: Modules, reference) -> None:
    outputs, gradients = reference
    seen, reduced = set(), set()
    for own_outputs, own_gradients, _ in results:
        for phase, name, first, positions, values in own_outputs:
            for offset, rows in enumerate(values):
                seen.add(key := (phase, name, first + offset))
                assert torch.equal(rows, outputs[key][0, positions]), key
        for name, (slices, gradient) in own_gradients.items():
            reduced.add(name)
            assert torch.equal(gradient, gradients[name][slices]), name
    assert seen == set(outputs) and reduced == (set(gradients) if modules.has_intervals else set())


def test_all_of_it_over_gloo_processes(reference):
    """gloo's sends wait for their receives, and its sockets are opened in one order: a circle would show."""
    setting = (Layout(cp=2), Layout(tp=2, **SP), False)
    modules = Modules((Layout(tp=2), Layout(dp=2)), 1)
    with Workers(4, timeout_s=60) as workers:
        check_crossing(workers.run(cross, setting), setting)
        assert workers.run(lanes, setting[:2]) == [True] * 4
        check_modules(workers.run(train_modules, modules), modules, reference)


def test_messages_of_a_bridge_are_recorded_with_the_bytes_that_leave_each_rank():
    """tp3 -> tp2: two of three replicas send forward, and of two destinations one answers two sources."""
    modules = Modules((Layout(tp=3), Layout(tp=2)), 3)
    results = run_threads(MemoryWorld(5, timeout_s=60), train_modules, modules)
    whole = 2 * SEQUENCE * MODEL.hidden_size * 4
    assert [sent for *_, sent in results] == [[whole] * 3, [whole] * 3, [0] * 3, [2 * whole] * 3, [whole] * 3]


# What is refused


def refused(transport, what: str):
    grids = grid_of(Layout(tp=2), 0), grid_of(Layout(), 2)
    if what == "group":
        Bridge(transport.group("all", "bridge", range(4)), *grids, dtype=torch.float32)
    if what == "shared":
        open_bridge(transport, "F", grids[0], grid_of(Layout(), 1))
    if transport.global_rank == 3 and what == "outside":
        open_bridge(transport, "F", *grids)
    if transport.global_rank < 3 and what in ("shape", "dtype", "absent"):
        bridge = Bridge(transport.group("three", "bridge", range(3)), *grids, dtype=torch.float32)
        if transport.global_rank == 1:
            bridge({"shape": numbers(1)[1:], "dtype": numbers(1).double(), "absent": None}[what])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("group", r"joins the ranks of both its grids, which are \[0, 1, 2\]"),
        ("shared", "bridge 'F': rank 1 is in both grids"),
        ("outside", "rank 3 is in neither grid of bridge 'F'"),
        ("shape", r"expects shape \(6, 24, 24\) from this rank, but was given shape \(5, 24, 24\)"),
        ("dtype", "made for torch.float32, but was given torch.float64"),
        ("absent", r"expects shape \(6, 24, 24\) from this rank, but was given nothing"),
    ],
)
def test_a_wrong_bridge_is_refused(what, words):
    with pytest.raises((ValueError, RankFailure), match=words):
        run_threads(MemoryWorld(4, timeout_s=120), refused, what)


def test_an_end_of_a_bridge_refuses_other_shapes_and_the_other_direction():
    sender, receiver = BridgeSender((2, 3, 4), []), BridgeReceiver((2, 3, 4), [], torch.device("cpu"))
    with pytest.raises(ValueError, match=r"sends shape \(2, 3, 4\), but was given shape \(3, 3, 4\)"):
        sender.send(torch.zeros(3, 3, 4))
    with pytest.raises(ValueError, match=r"receives shape \(2, 3, 4\), but was asked for shape \(2, 3\)"):
        receiver.receive((2, 3), torch.float32)
    with pytest.raises(ValueError, match="sending end"):
        sender.receive((2, 3, 4), torch.float32)
    with pytest.raises(ValueError, match="receiving end"):
        receiver.send(torch.zeros(2, 3, 4))
