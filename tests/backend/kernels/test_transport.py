"""Groups of GPUs by our kernels or over NCCL, as their members agree: on pretended GPUs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof.verify.pretended.environment import environment
from shardproof.verify.pretended.log import read_log
from shardproof.verify.pretended.races import races

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None,
    reason="needs a C++ compiler",
)

JOB = """
import torch
from shardproof.backend.kernels import transport as module
from shardproof.backend.kernels.group import KernelGroup
from shardproof.core.base.reduction import merges_of

module.BUFFER_BYTES = 1 << 14

def job(transport, lacks):
    rank, reach = transport.global_rank, torch.cuda.can_device_access_peer
    if rank == lacks:
        torch.cuda.can_device_access_peer = lambda one, other: False
    try:
        group = transport.group("g", "tp", range(transport.world_size))
    finally:
        torch.cuda.can_device_access_peer = reach
    alone = transport.group("alone", "tp", [rank])
    mine = torch.arange(5.0, device="cuda") + 10 * rank
    gathered = [each.tolist() for each in group.all_gather(mine)]
    values = torch.tensor([[1e8, 1.0], [-1e8, 1.0]][rank], device="cuda").view(1, 2)
    total = group.tree_all_reduce(values, [1, 1], merges_of(2, [(0, 1), (1, 2)]), torch.float32)
    kinds = [isinstance(each, KernelGroup) for each in (group, alone)]
    return kinds, gathered, total.tolist(), list(transport.notes)
"""

MAIN = """
import json, sys
from job import job
from shardproof.backend.launching.launch import run_ranks
if __name__ == "__main__":
    print(json.dumps(run_ranks(job, int(sys.argv[1]), world_size=2, transport="kernels", timeout_s=300)))
"""


@pytest.mark.parametrize("lacks", [pytest.param(-1, marks=pytest.mark.full), 1])
def test_members_use_kernels_where_all_reach_each_other_and_nccl_where_one_does_not(tmp_path: Path, lacks: int) -> None:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "main.py").write_text(MAIN)
    given = dict(environment(tmp_path, devices=2, capability=(8, 0)))
    command = [sys.executable, str(tmp_path / "main.py"), str(lacks)]
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank, (kinds, gathered, total, notes) in enumerate(json.loads(done.stdout.splitlines()[-1])):
        assert kinds == [lacks < 0, False]
        assert gathered == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]] and total == [0, 2]
        why = f"rank {rank} of 2: g over NCCL, not our kernels: rank 1: GPU 1 does not reach GPU 0."
        assert notes == ([] if lacks < 0 else [why])


STREAMS = """
import sys, torch
from shardproof.backend.kernels.group import KernelGroup

def job(transport, breaks):
    library = sys.modules["shardproof_pretended_stubs"].library
    library.pretended_write(b"rank", 0, b"0", b"", b"")
    if breaks:
        KernelGroup._begin = lambda group: None
    group = transport.group("g", "tp", range(transport.world_size))
    group.all_gather(torch.arange(5.0, device="cuda"))
    with torch.cuda.stream(torch.cuda.Stream()):
        group.all_gather(torch.arange(5.0, device="cuda"))
    library.pretended_flush()
"""


@pytest.mark.full
@pytest.mark.parametrize("breaks", [0, 1])
def test_a_group_that_is_used_on_another_stream_waits_for_the_kernel_before(tmp_path: Path, breaks: int) -> None:
    (tmp_path / "job.py").write_text(STREAMS)
    (tmp_path / "main.py").write_text(MAIN)
    given = dict(environment(tmp_path, devices=2, capability=(8, 0), log=True))
    command = [sys.executable, str(tmp_path / "main.py"), str(breaks)]
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    logs = [list(read_log(path)) for path in (tmp_path / "logs").glob("*.log")]
    found = [races(entries) for entries in logs if any(entry.kind == "rank" for entry in entries)]
    assert len(found) == 2
    for of_rank in found:
        named = [race for race in of_rank if race.first.entry.name == "triton::all_gather"]
        assert of_rank == named and ("written-while-read" in {race.rule for race in named}) == bool(breaks), of_rank


PLAN = """
[model]
preset = "tiny-gpt"
num_layers = 1
hidden_size = 32
ffn_hidden_size = 64
num_heads = 2
num_kv_heads = 2
head_dim = 16
vocab_size = 256
[cluster]
preset = "this-host"
num_devices = 2
[layout]
tp = 2
[batch]
global = 1
sequence = 16
[precision]
dtype = "fp32"
[numerics]
mode = "exact"
"""


@pytest.mark.full
def test_a_step_over_our_kernels_has_the_bits_of_one_device(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    given = dict(environment(tmp_path, devices=2, capability=(8, 0)))
    command = ["-m", "shardproof", "verify", str(plan), "--dynamic", "--steps", "1", "--transport", "kernels", "--json"]
    done = subprocess.run([sys.executable, *command], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and found["bits_different"] == 0
