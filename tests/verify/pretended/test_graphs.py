"""Steps that are captured and replayed on pretended CUDA: bits of one device; and what is made wrong is found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof.core.base.errors import InternalError
from shardproof.core.plan.plan import Plan
from shardproof.core.program import stage_groups
from shardproof.simulator.cost.graph_launches import sum_calls
from shardproof.verify.pretended.changes import Change
from shardproof.verify.pretended.environment import environment
from shardproof.verify.pretended.examine import examined
from shardproof.verify.pretended.graph_changes import (
    BITS,
    GRAPH_CHANGES,
    GRAPH_PLANS,
    LAYER_CHANGES,
    LAYER_PLANS,
    NO_NUMBERS,
)
from shardproof.verify.pretended.log import read_log

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None,
    reason="needs a C++ compiler",
)

PLANS = GRAPH_PLANS | LAYER_PLANS

CAPTURES = """
import threading, torch
x, other = torch.arange(6.0, device="cuda"), torch.cuda.Stream()
w = torch.ones(6, device="cuda", requires_grad=True)
torch.autograd.set_multithreading_enabled(False)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
    y = torch.nn.functional.silu(x) * w
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        z = torch.cat([y.detach(), x])[1:] * 2
        w.detach()[:1].fill_(7)
    torch.cuda.current_stream().wait_stream(other)
    (gradient,) = torch.autograd.grad(y.sum(), w)
assert y.isnan().all() and w[0] == 1  # a device does nothing while it is captured
for value in (1.0, 2.0):
    x.fill_(value)
    graph.replay()
    expected = torch.nn.functional.silu(torch.full((6,), value))
    assert gradient.tolist() == expected.tolist() and z[5] == 2 * value and w[0] == 7
    w.data.fill_(1)

def refused(work, why):
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
            work()
    except RuntimeError as error:
        assert why in str(error), error
    else:
        raise AssertionError(f"not refused: {why}")

def elsewhere():
    with torch.cuda.stream(other):
        x + 1

def alone():
    other.wait_stream(torch.cuda.current_stream())
    elsewhere()

def by_another_thread():
    began, done = threading.Event(), threading.Event()
    def work():
        began.wait()
        other.synchronize()
        (x + 1).sum().item()
        done.set()
    thread = threading.Thread(target=work)
    thread.start()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        began.set()
        assert done.wait(60)
        y + 1
    thread.join()

by_another_thread()  # which was there before the capture, and goes on

pool, kept = torch.cuda.graph_pool_handle(), []
for number in (1.0, 2.0):
    each = torch.cuda.CUDAGraph()
    with torch.cuda.graph(each, pool=pool, stream=other):
        between = torch.ones(6, device="cuda") * number  # let go of: the second graph may keep something in its memory
        kept.append((each, between + number))
        del between
for order, right in (((0, 1), [2.0, 4.0]), ((1, 0), [2.0, None])):
    for place in order:
        kept[place][0].replay()
    found = [None if of_graph.isnan().all() else of_graph[0].item() for _, of_graph in kept]
    assert found == right, found

before = torch.cuda.current_stream().record_event()
refused(lambda: x.sum().item(), "a number for the host")
refused(lambda: x.cpu(), "a copy between host and device")
refused(lambda: torch.tensor([1.0], device="cuda"), "a copy between host and device")
refused(lambda: x[x > 1], "the host waits: aten::nonzero")
refused(lambda: torch.cuda.synchronize(), "the host waits: for the device")
refused(elsewhere, "no part of the capture")
refused(alone, "aten::add on stream 1 is not waited for at the end of the capture")
refused(lambda: torch.cuda.current_stream().wait_event(before), "recorded outside of it")
del x
try:
    graph.replay()
except RuntimeError as error:
    assert "let go of since" in str(error), error
else:
    raise AssertionError("a graph read memory that is gone")
print("right")
"""

PLAN = """
[model]
preset = "tiny-gpt"
num_layers = 1
{model}
[cluster]
preset = "this-host"
num_devices = 1
[batch]
global = 2
micro = 1
sequence = 32
[precision]
dtype = "{dtype}"
[numerics]
mode = "fast"
gradient_token_block = 8
reduction_token_block = 8
[runtime]
cuda_graphs = true
{runtime}
[train]
{train}
"""

ONE_RANK = """
import sys, torch
from shardproof.core.plan.plan import Plan
from shardproof.verify.doctor.gpu_graphs import replayed
for text in sys.stdin.read().split("====="):
    found = replayed(Plan.from_toml(text), torch.device("cuda:0"))
    print(found.different, *found.captures.values())
"""


def run(tmp_path: Path, code: str, text: str = "") -> subprocess.CompletedProcess[str]:
    env = dict(environment(tmp_path))
    return subprocess.run([sys.executable, "-c", code], env=env, input=text, capture_output=True, text=True)


def test_captures_and_replays_of_pretended_cuda_are_those_of_a_device(tmp_path: Path) -> None:
    done = run(tmp_path, CAPTURES)
    assert done.stdout == "right\n", done.stderr


RATES = """\
steps = 4
learning_rate = 1e-2
[optimizer]
schedule = "linear"
warmup_steps = 1
initial_learning_rate = 1e-3
weight_decay_schedule = "linear"
end_weight_decay = 0.5
"""
"""Every step has a rate and a weight decay of its own, which no graph may keep."""


def trimmed(tmp_path: Path) -> str:
    """A plan whose microbatches have other shapes in every step."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):  # of 8, 16, 24, 32 tokens and more
        (texts / f"{number}.txt").write_text("ab" * (4 + 4 * (number % 5)))
    return PLAN.format(
        model="",
        dtype="fp32",
        runtime="trim_padding = true",
        train=f'padded = true\nignore_token = 0\ndata = "{texts}"',
    )


def test_replayed_steps_have_the_bits_of_others_and_new_shapes_are_captured_anew(tmp_path: Path) -> None:
    drops = PLAN.format(model="hidden_dropout = 0.1", dtype="fp16", runtime="", train=RATES)
    # two microbatches, one after the other, in one slot: a forward, a backward, a forward of held-out data
    layers = drops.replace("[train]", 'cuda_graph_scope = "layer"\n[train]')
    done = run(tmp_path, ONE_RANK, f"{drops}====={trimmed(tmp_path)}====={layers}")
    assert done.stdout.splitlines() == ["() 1 1", "() 3 1", "() 1 1 1"], done.stdout + done.stderr


@pytest.mark.full
def test_a_step_of_another_batch_is_captured_anew_and_held_out_data_once(tmp_path: Path) -> None:
    grows = PLAN.format(model="", dtype="fp32", runtime="", train=RATES)
    # of 2, 2, 3 and 3 sequences, of which the first is not captured
    done = run(tmp_path, ONE_RANK, grows.replace("global = 2", "global = 3\nrampup = [2, 1, 4]"))
    assert done.stdout.splitlines() == ["() 2 1"], done.stdout + done.stderr


SUMS = """
import sys, torch
import torch.distributed as dist
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.transport.process_group import ProcessGroupTransport
from shardproof.core.plan.plan import Plan
from shardproof.verify.pretended.labelled import LabelledRecorder, note, pretended
plan = Plan.from_toml(sys.stdin.read())
with ProcessGroupTransport(dist.HashStore(), 0, 1, backend="nccl", device=torch.device("cuda:0")) as transport:
    transport.recorder = LabelledRecorder()
    rank = TrainingRank(transport, plan)
    for step in range(plan.runtime.cuda_graph_warmup_steps + 2):
        note("step", str(step))
        rank.step(step)
    pretended().pretended_flush()
"""


def test_launches_into_sums_after_a_replay_are_those_that_the_simulator_counts(tmp_path: Path) -> None:
    text = PLAN.format(
        model="", dtype="fp32", runtime='cuda_graph_scope = "layer"\ncuda_graph_warmup_steps = 1', train=""
    )
    env = dict(environment(tmp_path, log=True))
    done = subprocess.run([sys.executable, "-c", SUMS], env=env, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "logs").glob("*.log")
    entries = list(read_log(log))
    last = max(place for place, entry in enumerate(entries) if entry.kind == "step")
    given = [e for e in entries[last:] if e.kind == "op" and e.label.startswith("0B1 layers.0")]
    plan = Plan.from_toml(text)
    (group,) = (each for each in stage_groups(plan, 0) if each.kind == "layer")
    assert len(given) == sum_calls(plan.model, group) > 0


@pytest.mark.full
def test_a_graph_that_is_not_captured_anew_is_found(tmp_path: Path) -> None:
    same_shapes = "from shardproof.backend.pipeline import graphs\ngraphs.shapes_of = len\n"
    done = run(tmp_path, same_shapes + ONE_RANK, trimmed(tmp_path))
    assert done.returncode and "must match the size" in done.stderr, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
def test_replays_have_the_bits_of_one_device_and_no_race(plan: str) -> None:
    found = examined(Plan.from_toml(PLANS[plan]), steps=4)
    assert found.ok and found.races, found.text()


@pytest.mark.full
@pytest.mark.parametrize("change", [pytest.param(each, id=each.what) for each in (*GRAPH_CHANGES, *LAYER_CHANGES)])
def test_what_is_made_wrong_with_a_capture_is_found(change: Change) -> None:
    try:
        found = examined(Plan.from_toml(PLANS[change.plan]), steps=3, change=change.what)
    except InternalError as error:  # what training itself finds, in fast numerics
        assert (NO_NUMBERS if change.rule == BITS else change.rule) in str(error)
        return
    if change.rule == BITS:
        assert found.bits_different
    else:
        assert change.rule in found.rules or change.rule in "".join(found.findings), found.text()
