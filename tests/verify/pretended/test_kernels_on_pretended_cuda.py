"""Triton's kernels, the doctor's checks of GPUs and the suite, on pretended CUDA: they run to their ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof.verify.pretended.environment import environment

ROOT = Path(__file__).parents[3]
pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None,
    reason="needs a C++ compiler",
)

LAUNCHES = """
import torch
from shardproof.backend.kernels.exact_products import ExactProducts
from shardproof.backend.kernels.launch import launch_alone
from shardproof.verify.doctor.gpu_kernels import AllReduce, Streams
from shardproof.verify.doctor.machine import Machine
from shardproof.verify.kernels.products_story import SMALL_TILES
generator = torch.Generator("cuda").manual_seed(3)
x, w = (torch.randint(-8, 8, shape, device="cuda", generator=generator).float() for shape in ((5, 40), (40, 7)))
products = ExactProducts(launch_alone, 4, SMALL_TILES)
found = products.contract(x, w, 16, [(0, 3)])[0]
assert torch.equal(found.cpu(), x.cpu() @ w.cpu())  # whole numbers: every order has these bits
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):  # tables that are there, and others
    made = products.contract(x, w, 16, [(0, 3)])[0], products.contract(x[:4], w, 16, [(0, 2), (2, 3)]).sum(0)
products._tables.clear()  # as when there are too many
x.neg_()
graph.replay()
assert all(torch.equal(each.cpu(), (x.cpu() @ w.cpu())[: len(each)]) for each in made)

streams = Streams(2, 1 << 16, Machine(gpus=("one",), pretended=True))
calls = [AllReduce(peer, torch.zeros(64, device="cuda"), "all_reduce_one_shot") for peer in streams.peers]
streams.together(calls, 1)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    streams.together(calls, 1)
for number in (1.0, 2.0):
    for rank, call in enumerate(calls):
        call.values.fill_(number * (rank + 1))
    graph.replay()
    assert [call.out.tolist() for call in calls] == [[3 * number] * 64] * 2
print("right")
"""


def run(folder: Path, *command: str, devices: int = 1) -> subprocess.CompletedProcess[str]:
    """A command on pretended GPUs for which our products are carried out."""
    given = dict(environment(folder, devices=devices, capability=(8, 0)))
    return subprocess.run([sys.executable, *command], env=given, capture_output=True, text=True)


def test_kernels_give_their_values_alone_with_peers_and_replayed(tmp_path: Path) -> None:
    done = run(tmp_path, "-c", LAUNCHES)
    assert done.stdout == "right\n", done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "check",
    [
        *("gpu-products", "gpu-exact-products", "gpu-kernels", "gpu-barriers", "gpu-capture", "gpu-all-reduce"),
        "gpu-graphs",
    ],
)
def test_a_check_of_gpus_holds(tmp_path: Path, check: str) -> None:
    done = run(tmp_path, "-m", "shardproof", "doctor", "--gpus", "--small", "--only", check, "--json")
    found = json.loads(done.stdout)["checks"]
    assert [(each["name"], each["status"]) for each in found] == [(check, "ok")], found


CAPTURED = """
[model]
preset = "tiny-gpt"
num_layers = 1
hidden_size = 16
num_heads = 2
num_kv_heads = 2
ffn_hidden_size = 40
vocab_size = 257
[cluster]
preset = "this-host"
num_devices = 1
[batch]
global = 2
micro = 1
sequence = 10
[precision]
dtype = "bf16"
[numerics]
mode = "exact"
gradient_token_block = 4
triton_products = ["all"]
[runtime]
cuda_graphs = true
cuda_graph_scope = "{scope}"
"""

REPLAYS = """
import sys, torch
from shardproof.core.plan.plan import Plan
from shardproof.verify.doctor.gpu_graphs import replayed
found = replayed(Plan.from_toml(sys.argv[1]), torch.device("cuda:0"), 3)
print(found.different, *found.captures.values())
"""


@pytest.mark.full
@pytest.mark.parametrize(("scope", "said"), [("step", "() 1 1"), ("layer", "() 1 1 1")])
def test_captured_products_of_our_kernels_have_the_bits_of_others(tmp_path: Path, scope: str, said: str) -> None:
    done = run(tmp_path, "-c", REPLAYS, CAPTURED.format(scope=scope))
    assert done.stdout == f"{said}\n", done.stderr


@pytest.mark.full
def test_a_step_over_nccl_is_one_devices(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "shardproof", "doctor", "--gpus", "--only", "gpu-step", "--json", devices=2)
    assert [each["status"] for each in json.loads(done.stdout)["checks"]] == ["ok"], done.stdout


@pytest.mark.full
def test_the_suite_comes_to_its_end_and_says_of_everything_what_it_found(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run(tmp_path, str(ROOT / "benchmarks" / "gpu_suite.py"), "--small", "--minutes", "1", "-o", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    found = {each["name"]: each for each in json.loads(report.read_text())["checks"]}
    assert {each["status"] for each in found.values()} <= {"ok", "skipped"}
    trained = {"train", "train-torch", "train-predicted", "train-ranks"}
    assert all(found[name]["status"] == "ok" and found[name]["value"] > 0 for name in trained)
    assert {row[1] for each in found["gpu-kernels"]["tables"] for row in each["rows"]} == {"pretended device"}
