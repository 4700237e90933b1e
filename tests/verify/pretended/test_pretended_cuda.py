"""Steps of plans on pretended CUDA: bits of one device, no race; and what is made wrong is found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from shardproof.core.plan.plan import Plan
from shardproof.verify.pretended.changes import CHANGES, PLANS
from shardproof.verify.pretended.environment import environment
from shardproof.verify.pretended.examine import examined
from shardproof.verify.pretended.log import read_log
from shardproof.verify.pretended.races import races
from shardproof.verify.pretended.registered_changes import CALL_CHANGES

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None,
    reason="needs a C++ compiler",
)

EACH_IN_A_FORK = """
import json, os, sys, torch, traceback
found = {}
for name, script in json.load(sys.stdin).items():
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            exec(script, {})
            said = "right"
        except BaseException:
            said = traceback.format_exc()
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with open(read) as answer:
        found[name] = answer.read()
    os.wait()
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """`right` for each script that runs to its end on pretended CUDA, else its traceback; torch is loaded once."""
    scripts = {"TENSORS": TENSORS, "WEIGHT_GRADIENTS": WEIGHT_GRADIENTS, "STREAMS": STREAMS}
    command = [sys.executable, "-c", EACH_IN_A_FORK]
    variables = dict(environment(tmp_path_factory.mktemp("pretended")))
    done = subprocess.run(command, env=variables, input=json.dumps(scripts), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


TENSORS = """
import torch
a = torch.arange(6.0, device="cuda:2").view(2, 3).requires_grad_()
b = torch.nn.functional.silu(a) @ a.t()
b.sum().backward()
c = a.detach().cpu().requires_grad_()
d = torch.nn.functional.silu(c) @ c.t()
d.sum().backward()
assert b.device == torch.device("cuda:2") and torch.allclose(b.detach().cpu(), d.detach())
assert torch.allclose(a.grad.cpu(), c.grad)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    assert torch.cuda.current_stream() == stream
    e = torch.cat([a.detach(), a.detach()])[:, 1:].contiguous()
torch.cuda.current_stream().wait_stream(stream)
assert e.tolist() == [[1, 2], [4, 5]] * 2 and e.nonzero().shape == (8, 2)
x = torch.empty(0, device="cuda").resize_(3).fill_(2)
host = torch.empty(6, pin_memory=True)
assert host.is_pinned() and not torch.empty(6).is_pinned()
host.view(2, 3).copy_(a.detach(), non_blocking=True)
assert torch.equal(host.to("cuda:2", non_blocking=True), a.detach().flatten())
assert x.sum().item() == 6 and torch.arange(3, device="cuda")[x > 1].tolist() == [0, 1, 2]
try:
    a + c
except RuntimeError as error:
    assert "same device" in str(error), error
else:
    raise AssertionError("tensors of two devices were added")
"""


def test_tensors_on_pretended_cuda_are_those_of_the_cpu(said: Mapping[str, str]) -> None:
    assert said["TENSORS"] == "right"


WEIGHT_GRADIENTS = """
import torch
from shardproof.backend.numerics.token_product import ROWS_AT_ONCE, InterleavedProduct, TokenProduct
torch.manual_seed(0)
x, y = torch.randn(5, 2 * ROWS_AT_ONCE).bfloat16(), torch.randn(5, 3).bfloat16()
exact = x.double().t() @ y.double()
for device, worst in (("cpu", 0.1), ("cuda", 1e-5)):
    product = TokenProduct(x.to(device), y.to(device))
    total = product.total()
    product.add_to(total)
    error = (total.cpu() - 2 * exact).abs().max().item()
    assert error <= worst and (device == "cuda" or error > 1e-3), (device, error)
    parts = InterleavedProduct(torch.stack([x, -x]).to(device), y.to(device))
    total = parts.total()
    parts.add_to(total)
    assert (total[0::2].cpu() - 2 * exact).abs().max() <= worst and torch.equal(total[0::2], -total[1::2])
"""


def test_on_cuda_a_bf16_weight_gradient_is_added_to_its_fp32_sum_without_rounding(said: Mapping[str, str]) -> None:
    assert said["WEIGHT_GRADIENTS"] == "right"


STREAMS = """
import torch
from shardproof.backend.base.streams import LaneStreams
device = torch.device("cuda:1")
lanes = LaneStreams(device)

def number(name):
    with lanes.of(name):
        return torch.cuda.current_stream(device).stream_id

first = [number("recv_F:0"), number("send_F:2")]
assert len(set(first)) == 2
pool = [torch.cuda.Stream(device).stream_id for _ in range(32)]
high = torch.cuda.Stream(device, priority=-1).stream_id
assert len(set(pool)) == 32 and pool[-2:] == first and high not in pool, (first, pool, high)
assert torch.cuda.Stream("cuda:2").stream_id not in pool
for step in range(40):
    assert [number("recv_F:0"), number("send_F:2")] == first
"""


def test_torch_has_32_streams_and_a_lane_keeps_its_own(said: Mapping[str, str]) -> None:
    assert said["STREAMS"] == "right"


ROOMS = """
import sys, threading
import torch
import torch.distributed as dist
from shardproof.backend.transport.process_group import ProcessGroupTransport
from shardproof.core.plan.communicators import Communicators

store, found = dist.HashStore(), {}

def rank(number):
    transport = ProcessGroupTransport(store, number, 2, backend="nccl", device=f"cuda:{number}", timeout_s=60)
    transport.communicators = Communicators(registered=("dp",))
    with transport:
        groups = [transport.group(name, axis, (0, 1)) for name, axis in (("a", "dp"), ("b", "dp_shard"), ("c", "tp"))]
        for group in groups:
            group.want_room(32, 64)
        transport.register_rooms()
        like, kept = torch.empty(0, device=transport.device), []
        for group in groups:
            for value in (1.0, 2.0):  # what is given back of sums stays when the room is used again
                sent = group.room(like, 2, 4).fill_(value + number)
                kept.append(group.reduce_scatter(list(sent))[0].item())
                sent = group.room(like, 8).fill_(value + number)
                kept.append(group.all_reduce(sent, "sum", used_up=True))
                sent = group.room(like, 8).fill_(value + number)
                kept.append([row[0].item() for row in group.all_gather(sent)])
        kept = [each[0].item() if isinstance(each, torch.Tensor) else each for each in kept]
        assert kept == 3 * [3.0, 3.0, [1.0, 2.0], 5.0, 5.0, [2.0, 3.0]], kept
        rooms = [group.room(like, 8).untyped_storage().nbytes() for group in groups]
        # both are held: memory that was let go of may be given out again at the same address
        twice = [(group.room(like, 8), group.room(like, 8)) for group in groups]
        small = [first.data_ptr() == second.data_ptr() for first, second in twice]
        found[number] = small, group.room(like, 9).shape, transport.notes

threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
for each in threads:
    each.start()
for each in threads:
    each.join()
print(found[0][0], found[0][1:], found[1][0] == found[0][0])
"""


@pytest.mark.parametrize("multicast", ["all", "none"])
def test_groups_put_together_what_they_send_in_memory_that_nccl_knows(multicast: str, tmp_path: Path) -> None:
    variables = dict(environment(tmp_path, log=True)) | {"SHARDPROOF_PRETENDED_MULTICAST": multicast}
    done = subprocess.run([sys.executable, "-c", ROOMS], env=variables, capture_output=True, text=True)
    if multicast == "all":
        assert done.stdout == "[True, True, False] (torch.Size([9]), ()) True\n", done.stderr
    else:
        assert done.stdout.startswith("[False, False, False]"), done.stderr
        assert "buffers of a, b are not registered: rank 0: cuda:0 has no multicast" in done.stdout
    (log,) = (tmp_path / "logs").glob("*.log")
    ends = {"all": ["register"] * 2 + ["deregister"] * 2 + ["shut down"] * 3, "none": ["shut down"] * 3}[multicast]
    entries = [each for each in read_log(log) if each.kind in ("register", "deregister", "shut down")]
    for thread in {each.thread for each in entries}:
        assert [each.kind for each in entries if each.thread == thread] == ends


def test_a_process_without_the_environment_has_no_cuda() -> None:
    import torch

    assert not torch.cuda.is_available() or torch.version.cuda is not None


@pytest.mark.full
@pytest.mark.parametrize("plan", ["tp2-pp2", "dp2-zero1", "dp3-hybrid"])
def test_a_step_has_the_bits_of_one_device_and_no_race(plan: str) -> None:
    found = examined(Plan.from_toml(PLANS[plan]))
    assert found.ok and found.races, found.text()
    assert all(rank.ended and rank.calls and rank.asked for rank in found.calls)


OPTIONS = """
[communicators]
min_ctas = { tp = 2 }
max_ctas = { tp = 16, pp = 4 }
cga_cluster_size = { tp = 2 }
high_priority = ["pp"]
network = "Socket"
split = true
"""


@pytest.mark.full
def test_options_arrive_at_the_communicators_of_their_axes_and_change_no_bits() -> None:
    found = examined(Plan.from_toml(PLANS["tp2-pp2"] + OPTIONS))
    assert found.ok, found.text()
    opened = {each.key: each for each in found.calls[2].communicators}
    assert list(opened) == ["whole", "tp/2", "tp-gradients/2", "model/0", "embedding/0", "B/2-0", "F/0-2"]
    plain = {"min_ctas": None, "max_ctas": None, "cga_cluster_size": None, "high_priority": False, "split_from": None}
    for key, given in {
        "whole": {},
        "tp/2": {"min_ctas": 2, "max_ctas": 16, "cga_cluster_size": 2, "split_from": "whole"},
        "tp-gradients/2": {"min_ctas": 2, "max_ctas": 16, "cga_cluster_size": 2, "split_from": "whole"},
        "model/0": {"split_from": "whole"},
        "embedding/0": {},
        "F/0-2": {"max_ctas": 4, "high_priority": True},
    }.items():
        options = opened[key].options
        assert {name: options[name] for name in plain} == {**plain, **given}, key
        assert options["net_name"] == "Socket"
    assert opened["tp/2"].ranks == (2, 3) and opened["tp/2"].options["split_color"] == 2
    # the compute lane's calls come one after the other, and messages of each direction at the same time
    assert [(len(each.lines), each.least_ctas, each.most_ctas) for each in found.at_once] == [(3, 4, 40)] * 4


@pytest.mark.full
@pytest.mark.parametrize(
    "plan", ["dp2-zero3", "ep2", "tp2-overlap", "tp2-offload", "dp2-masters", "pairs-offload", "dp2-saves"]
)
def test_steps_of_other_plans(plan: str) -> None:
    test_a_step_has_the_bits_of_one_device_and_no_race(plan)


FEW = ("the norm is read before the update",)


@pytest.mark.parametrize(
    "change", [pytest.param(each, id=each.what, marks=() if each.what in FEW else pytest.mark.full) for each in CHANGES]
)
def test_what_is_made_wrong_is_found(change) -> None:
    found = examined(Plan.from_toml(PLANS[change.plan]), change=change.what)
    assert found.bits_different == 0  # what a device may do later is done at once here
    assert change.rule in found.rules, found.text()
    assert not found.order


@pytest.mark.full
@pytest.mark.parametrize("what", CALL_CHANGES)
def test_calls_in_another_order_are_found_with_their_rank_and_action(what: str) -> None:
    change = CALL_CHANGES[what]
    found = examined(Plan.from_toml(PLANS[change.plan]), change=what, patience_s=4)
    named = [fault.what for fault in found.order if fault.rule == change.rule and change.rank in (None, *fault.ranks)]
    assert any(change.action in said for said in named), found.text()


THREADS = """
import torch
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.verify.pretended.labelled import pretended

def job(transport, _):
    with torch.cuda.stream(torch.cuda.Stream()):
        group = transport.group("both", "tp", (0, 1))
        mine = torch.arange(4.0, device="cuda:0") + 4 * transport.global_rank
        found = torch.cat([*group.all_gather(mine), *group.all_to_all([mine[:1], mine[1:2]], [(1,), (1,)])])
        found = torch.cat([found, group.all_reduce(mine, "sum")])
        channel = transport.channel("line", 0, 1)
        if transport.global_rank == 0:
            channel.send(mine)
            mine.zero_()  # it is this rank's again
        else:
            found = torch.cat([found, channel.receive((4,), torch.float32)])
        return found.tolist()

first, second = run_threads(MemoryWorld(2, device="cuda:0", timeout_s=60), job, None)
assert first == [0, 1, 2, 3, 4, 5, 6, 7, 0, 4, 4, 6, 8, 10], first
assert second == [0, 1, 2, 3, 4, 5, 6, 7, 1, 5, 4, 6, 8, 10, 0, 1, 2, 3], second
pretended().pretended_flush()
"""


def test_ranks_that_share_a_gpu_as_threads_hand_over_between_their_streams(tmp_path: Path) -> None:
    variables = dict(environment(tmp_path, log=True))
    done = subprocess.run([sys.executable, "-c", THREADS], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "logs").glob("*.log")
    entries = list(read_log(log))
    assert len({entry.stream for entry in entries if entry.kind == "op"}) >= 2
    assert list(map(str, races(entries))) == []


def test_a_file_that_is_not_there_is_named() -> None:
    command = [sys.executable, "-m", "shardproof.verify.pretended", "no-such-plan.toml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "no-such-plan.toml" in done.stderr
