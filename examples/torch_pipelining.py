"""A schedule from the catalog in torch's own pipeline runtime: the loss of every microbatch, there and in one process.

    torchrun --nproc-per-node 4 examples/torch_pipelining.py ZBVZeroBubble

torch.distributed.pipelining reads our compute-only CSV and adds messages and reductions itself;
`lower(schedule).to_csv("torch")` with `format="compute_comms"` would hand it ours.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from shardproof import build
from shardproof.core.schedule import CATALOG

NUM_MICROBATCHES, SAMPLES, WIDTH = 8, 4, 16


def layer(stage: int) -> nn.Module:
    """One layer per stage, the same whoever makes it."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def batch() -> Tensor:
    """Inputs and targets, [2, samples of all microbatches, width]."""
    torch.manual_seed(0)
    return torch.randn(2, NUM_MICROBATCHES * SAMPLES, WIDTH)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error."""
    return (output - target).square().mean()


def losses_in_torch(name: str) -> list[float]:
    """One step on all ranks of the default group; the losses are on the rank of the last stage."""
    pp, rank = dist.get_world_size(), dist.get_rank()
    schedule = build(name, pp=pp, num_microbatches=NUM_MICROBATCHES, vpp=CATALOG[name].nearest_vpp(1))
    held, example = schedule.placement.stages_of(rank), torch.zeros(SAMPLES, WIDTH, requires_grad=True)
    device = torch.device("cpu")
    stages = [
        PipelineStage(layer(stage), stage, schedule.num_stages, device, input_args=(example,), output_args=(example,))
        for stage in held
    ]
    runtime = _PipelineScheduleRuntime(stages, NUM_MICROBATCHES, loss_fn=loss_of)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(schedule.to_csv(dialect="torch"))
        runtime._load_csv(str(path), format="compute_only")
    inputs, targets = batch()
    losses: list[Tensor] = []
    runtime.step(*((inputs,) if 0 in held else ()), target=targets, losses=losses)
    return [loss.item() for loss in losses]


def losses_in_one_process(num_stages: int) -> list[float]:
    """The same without a pipeline."""
    inputs, targets = batch()
    model = nn.Sequential(*(layer(stage) for stage in range(num_stages)))
    pairs = zip(inputs.split(SAMPLES), targets.split(SAMPLES), strict=True)
    return [loss_of(model(x), target).item() for x, target in pairs]


def main(name: str) -> None:
    """Prints both, on the rank of the last stage."""
    dist.init_process_group("gloo")
    losses = losses_in_torch(name)
    if losses:
        print(f"{name:>16}: {' '.join(loss.hex() for loss in losses)}")
        num_stages = dist.get_world_size() * CATALOG[name].nearest_vpp(1)
        print(f"{'one process':>16}: {' '.join(loss.hex() for loss in losses_in_one_process(num_stages))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:] or ["ZBVZeroBubble"])
