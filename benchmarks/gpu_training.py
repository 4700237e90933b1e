"""Training on one GPU for `gpu_suite.py`: tokens a second of this backend, of plain torch with the same shapes,
compiled, and of torchtitan's layers where they are installed; a step next to its prediction.

Every measurement is a check in a process of its own, so that one that fails or is cut off leaves the others.
The model has the shapes of a Llama of a billion parameters, without grouped heads, in bf16 with fp32 master weights
here, and in fp32 with autocast where torch trains it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from shardproof.core.machine.cluster import ClusterSpec
from shardproof.core.plan.plan import Plan
from shardproof.verify.doctor.catalog import a_gpu
from shardproof.verify.doctor.checks import Check, Result, Table
from shardproof.verify.doctor.machine import Machine

WARM_STEPS, STEPS = 3, 5
LIMIT_S = 90.0
COLUMNS = ("trainer", "layers, hidden, tokens", "step s", "tokens/s", "TFLOP/s")
CLUSTERS = {"H200": "dgx-h200", "B200": "dgx-b200", "A100": "dgx-a100-80g"}
"""Part of a GPU's name -> the preset that has it; the others are taken for an H100."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of a step; `ffn` is the multiple of `multiple_of` next above 8/3 of the hidden size."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    multiple_of: int
    vocab: int
    sequence: int
    samples: int
    micro: int

    def __str__(self) -> str:
        return f"{self.layers}, {self.hidden}, {self.samples * self.sequence:,}"


LARGE = Shape(16, 2048, 16, 5632, 512, 32000, sequence=2048, samples=8, micro=4)
SMALL = Shape(2, 64, 4, 192, 64, 512, sequence=32, samples=4, micro=2)


def shape_for(machine: Machine) -> Shape:
    """A billion parameters, or next to none."""
    return SMALL if machine.is_small else LARGE


def plan_of(machine: Machine, *, layout: str = "", extra: str = "", ranks: int = 1) -> Plan:
    """The plan of the model on this GPU; `layout` and `extra` are lines of a plan's text."""
    shape = shape_for(machine)
    return Plan.from_toml(
        f"""
[model]
num_layers = {shape.layers}
hidden_size = {shape.hidden}
ffn_hidden_size = {shape.ffn}
num_heads = {shape.heads}
num_kv_heads = {shape.heads}
vocab_size = {shape.vocab}
activation = "swiglu"
norm = "rmsnorm"
position = "rope"
tied_embeddings = false
[cluster]
preset = "{cluster_name(machine)}"
num_devices = {ranks}
[layout]
{layout}
[batch]
global = {shape.samples}
micro = {shape.micro}
sequence = {shape.sequence}
[precision]
dtype = "bf16"
[numerics]
mode = "fast"
{extra}
"""
    )


def cluster_name(machine: Machine) -> str:
    """The preset whose devices are like this machine's."""
    return next((preset for part, preset in CLUSTERS.items() if part in machine.gpus[0]), "dgx-h100")


def time_steps(transport: Any, given: tuple[Plan, int, int]) -> list[float]:
    """The job of a rank: seconds of its steps, without the first ones."""
    from shardproof.backend.ranks.training_rank import TrainingRank

    plan, warm, steps = given
    rank = TrainingRank(transport, plan)
    world, found = transport.group("suite", "world", range(transport.world_size)), []
    for step in range(warm + steps):
        world.barrier()
        start = time.perf_counter()
        rank.step(step)  # its loss is a number of the host: all work is done
        found.append(time.perf_counter() - start)
    return found[warm:]


def step_s(plan: Plan, machine: Machine) -> float:
    """Seconds of a step of a plan on one GPU, the median of the slowest rank's: a process, or ranks as threads."""
    from shardproof.backend.launching.launch import run_ranks

    counts = (1, 2) if machine.is_small else (WARM_STEPS, STEPS)
    job = functools.partial(run_ranks, time_steps, (plan, *counts), world_size=plan.world_size)
    limit_s = LIMIT_S * machine.patience
    if plan.world_size == 1:
        ranks = job(transport="nccl", timeout_s=limit_s)
    else:  # NCCL takes one rank on a GPU
        ranks = job(transport="memory", device="cuda", timeout_s=limit_s)
    return median(max(of_step) for of_step in zip(*ranks, strict=True))


def row(name: str, seconds: float, machine: Machine) -> tuple[str | float, ...]:
    """Of the table of trainers."""
    from shardproof import simulate

    shape, plan = shape_for(machine), plan_of(machine)
    report = simulate(plan).report
    flops = report["model_flops_per_s_per_device"] * report["step_time_s"]
    tokens = shape.samples * shape.sequence / seconds
    return name, str(shape), round(seconds, 5), round(tokens, 1), round(flops / seconds / 1e12, 2)


def result(name: str, seconds: float, machine: Machine, why: str = "") -> Result:
    """Of a trainer: tokens a second."""
    found = row(name, seconds, machine)
    return Result("ok", why, float(found[3]), "tokens/s", (Table("training on one GPU", COLUMNS, (found,)),))


def ours(machine: Machine) -> Result:
    """This backend on one rank."""
    return result("shardproof", step_s(plan_of(machine), machine), machine)


def ours_in_ranks(machine: Machine) -> Result:
    """Four ranks as threads that share the GPU: what cutting costs where nothing is gained."""
    plan = plan_of(machine, layout="tp = 2\npp = 2", ranks=4)
    return result("shardproof, tp2 pp2", step_s(plan, machine), machine, "four ranks share one GPU")


def with_key(key: str, value: str, what: str, machine: Machine) -> Result:
    """This backend with a key of the plan, where the backend runs it."""
    from shardproof.backend.unsupported import unsupported
    from shardproof.core.base.errors import PlanError

    section, _, name = key.partition(".")
    try:
        plan = plan_of(machine, extra=f"[{section}]\n{name} = {value}")
    except PlanError as error:
        return Result("skipped", f"this shardproof takes no {key} = {value}: {str(error).splitlines()[0]}"[:200])
    if problems := unsupported(plan):
        return Result("skipped", problems[0])
    return result(f"shardproof, {what}", step_s(plan, machine), machine)


def graphs(machine: Machine) -> Result:
    """Steps replayed from a CUDA graph."""
    return with_key("runtime.cuda_graphs", "true", "CUDA graphs", machine)


def offload(machine: Machine) -> Result:
    """Optimizer state in the host's memory."""
    return with_key("offload.optimizer", "1.0", "optimizer offloaded", machine)


def plain_torch(machine: Machine) -> Result:
    """A plain model with the same shapes, compiled, fused AdamW, clipping."""
    from shardproof.benchmarks.peer_model import Llama

    plan = plan_of(machine)
    return _torch_trainer("torch.compile", lambda: Llama(plan.model, plan.batch.sequence), machine)


def torchtitan(machine: Machine) -> Result:
    """torchtitan's own Llama 3 in the same loop."""
    if importlib.util.find_spec("torchtitan") is None:
        return Result("skipped", "torchtitan is not installed: pip install torchtitan")
    shape = shape_for(machine)
    arguments = importlib.import_module("torchtitan.models.llama3.model.args").TransformerModelArgs(
        dim=shape.hidden,
        n_layers=shape.layers,
        n_heads=shape.heads,
        vocab_size=shape.vocab,
        multiple_of=shape.multiple_of,
        max_seq_len=shape.sequence,
    )
    make = importlib.import_module("torchtitan.models.llama3.model.model").Transformer

    def made() -> Any:
        import torch

        model = make(arguments).cuda()
        model.init_weights(buffer_device=torch.device("cuda"))
        return model

    return _torch_trainer("torchtitan's layers, compiled", made, machine)


def _torch_trainer(name: str, make: Callable[[], Any], machine: Machine) -> Result:
    import torch
    from torch.nn import functional as F

    shape = shape_for(machine)
    with torch.device("cuda"):
        model = make().cuda()
    compiled = model if machine.pretended else torch.compile(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(shape.vocab, (shape.samples, shape.sequence + 1), device="cuda")

    def step() -> float:
        total = torch.zeros((), device="cuda")
        for part in tokens.split(shape.micro):
            with torch.autocast("cuda", torch.bfloat16):
                logits = compiled(part[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten()) * (len(part) / shape.samples)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return float(total)

    warm, steps = (1, 2) if machine.is_small else (WARM_STEPS, STEPS)
    seconds = []
    for _ in range(warm + steps):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    why = "not compiled: GPUs are pretended" if machine.pretended else ""
    return result(name, median(seconds[warm:]), machine, why)


def predicted(machine: Machine) -> Result:
    """The measured step next to the simulator's, with the device as its maker describes it and as it was measured."""
    from shardproof import simulate

    plan = plan_of(machine)
    measured_s = step_s(plan, machine)
    measured = measured_cluster(plan.cluster, machine)
    rows: list[tuple[str | float, ...]] = []
    for name, cluster in (("published", plan.cluster), ("measured", measured)):
        predicted_s = simulate(replace(plan, cluster=cluster)).report["step_time_s"]
        rows.append((name, round(predicted_s, 5), round(measured_s, 5), round(predicted_s / measured_s, 3)))
    table = Table("a step, predicted and measured", ("device", "predicted s", "measured s", "ratio"), tuple(rows))
    return Result("ok", "", float(rows[-1][3]), "predicted over measured", (table,))


def measured_cluster(cluster: ClusterSpec, machine: Machine) -> ClusterSpec:
    """A cluster with what this GPU takes for a large product, a sum of large tensors and a small one, in bf16."""
    import torch

    from shardproof.verify.doctor.gpu_ranks import seconds_on_gpu

    size, elements, calls = (64, 1 << 12, 1) if machine.is_small else (8192, 1 << 28, 10)
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2.0 * size**3 / max(1e-9, seconds_on_gpu(lambda: torch.matmul(left, right), calls))
    one, other, out = (torch.zeros(elements, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    add_s = max(1e-9, seconds_on_gpu(lambda: torch.add(one, other, out=out), calls))
    tiny = torch.zeros(16, device="cuda")
    start = time.perf_counter()
    for _ in range(1000):
        tiny.add_(1)
    host_s = (time.perf_counter() - start) / 1000
    source = "measured: benchmarks/gpu_training.py"
    fields: dict[str, Any] = {
        "peak_flops_per_s": {**cluster.peak_flops_per_s, "bf16": rate},
        "matmul_efficiency": 1.0,
        "device_memory_bytes_per_s": 6.0 * elements / add_s,
        "memory_efficiency": 1.0,
        "host_dispatch_s": host_s,
    }
    return replace(cluster, **fields, sources={**cluster.sources, **dict.fromkeys(fields, source)})


def _check(name: str, what: str, function: Callable[[Machine], Result]) -> Check:
    return Check(name, what, f"{__name__}:{function.__name__}", LIMIT_S, a_gpu)


TRAINING: Sequence[Check] = (
    _check("train", "a Llama of a billion parameters in bf16", ours),
    _check("train-torch", "the same shapes in plain torch, compiled", plain_torch),
    _check("train-predicted", "its step next to the simulator's", predicted),
    _check("train-graphs", "the same from CUDA graphs", graphs),
    _check("train-ranks", "four ranks on the GPU", ours_in_ranks),
    _check("train-offload", "optimizer state in host memory", offload),
    _check("train-torchtitan", "torchtitan's layers", torchtitan),
)
"""Each runs once."""
