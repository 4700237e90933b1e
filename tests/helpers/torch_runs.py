"""Short runs of torch over gloo on this machine, with what its profiler exports and what their own clocks say."""

import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

COMMON = """
import sys, time, json, torch, torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
kind, rank, world, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
busy = []
def timed(call):
    def inner(*args, **options):
        start = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            busy.append(time.perf_counter() - start)
    return inner
def net():
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
def record(step):
    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            dist.barrier()
            busy.clear()
            start = time.perf_counter()
            step()
            ended = time.perf_counter()
    profiler.export_chrome_trace(f"{folder}/traces/{rank}.json.gz")
    json.dump([sum(busy), start, ended], open(f"{folder}/{rank}.own", "w"))
    dist.barrier()
"""

PIPELINE = """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()
        self.forward = timed(self.net.forward)
chunks = 2 if kind == "Interleaved1F1B" else 1
stages = [PipelineStage(Timed(), rank + world * i, world * chunks, torch.device("cpu")) for i in range(chunks)]
for stage in stages:
    stage.backward_one_chunk = timed(stage.backward_one_chunk)
made = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe, "Interleaved1F1B": ScheduleInterleaved1F1B}[kind]
loss = timed(lambda y, t: ((y - t) ** 2).mean())
schedule = made(stages if chunks > 1 else stages[0], 4, loss_fn=loss)
x = torch.randn(4 * 512, 512)  # long actions: what a busy machine takes between them counts less
given = {"target": x} if rank == world - 1 else {}
record(lambda: schedule.step(*([x] if rank == 0 else []), **given))
"""

FSDP = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
waited = FSDPState._root_post_backward_final_callback
def finish(self):
    # for the last gradients: no part of a backward, as in our own timelines
    start = time.perf_counter()
    waited(self)
    busy.append(start - time.perf_counter())
FSDPState._root_post_backward_final_callback = finish
model = net()
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(256, 512)
gathered = []
# behind FSDP's own, which wait for the first layer's weights: no part of a forward either
model[0].register_forward_pre_hook(lambda *_: gathered.append(time.perf_counter()))
def forward():
    y = model(x).square().mean()
    busy.append(time.perf_counter() - gathered.pop())
    return y
backward, update = timed(lambda y: y.backward()), timed(optimizer.step)
def step():
    for _ in range(3):
        backward(forward())
    update()
    optimizer.zero_grad()
record(step)
"""


def run(folder: Path, kind: str, world: int, script: str) -> tuple[Path, Sequence[float]]:
    """The folder of the traces, without annotations of actions, and by rank the bubble by its own clock."""
    (folder / "traces").mkdir()
    (folder / "bare").mkdir()
    (folder / "run.py").write_text(COMMON + script)
    command = [sys.executable, folder / "run.py", kind]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world), str(folder)], stderr=subprocess.PIPE)
        for rank in range(world)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=240)
        assert rank.returncode == 0, said.decode()
    for trace in (folder / "traces").iterdir():
        document = json.loads(gzip.decompress(trace.read_bytes()))
        events = [event for event in document["traceEvents"] if not str(event.get("name")).startswith("PP:")]
        (folder / "bare" / trace.name).write_bytes(
            gzip.compress(json.dumps({**document, "traceEvents": events}).encode())
        )
    own = [json.loads((folder / f"{rank}.own").read_text()) for rank in range(world)]
    step_s = max(ended for _, _, ended in own) - min(start for _, start, _ in own)
    return folder / "bare", [1 - busy_s / step_s for busy_s, _, _ in own]
