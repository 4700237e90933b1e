"""The peers of `peers.py`: torch's own data, tensor and pipeline parallelism, each training the plain
Llama of `peer_model.py`.

All keep to a plan: its model, weights, data, global batch, microbatches, AdamW and clipping. Every rank returns
the mean loss of the global batch and the gradient norm before clipping, as ours does. They use torch's default
process group, over gloo.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from peer_model import Llama, initial_weights, mean_loss
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from shardproof.backend.data.corpus import Corpus
from shardproof.core.plan.plan import Plan

PIPELINES: dict[str, Any] = {
    "1F1B": pipelining.Schedule1F1B,
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "ZBVZeroBubble": pipelining.ScheduleZBVZeroBubble,
}
"""Our name of a schedule -> torch's."""


class Peer:
    """Model, optimizer and data of one rank. `step(n)` trains on global batch n."""

    def __init__(self, plan: Plan, corpus: Corpus, global_rank: int):
        self.plan = plan
        self.corpus = corpus
        self.global_rank = global_rank
        self.model = plan.model

    def step(self, step: int) -> tuple[float, float]:
        """The mean loss per token of the global batch before the update, and the gradient norm before clipping."""
        loss = self.backward(step)
        norm, loss = self.totals(loss)
        nn.utils.clip_grads_with_norm_(self.parameters, self.plan.optimizer.clip_grad_norm, torch.tensor(norm))
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return loss, norm

    def backward(self, step: int) -> Tensor:
        """Forward and backward of this rank's microbatches; its share of the mean loss, a scalar."""
        raise NotImplementedError

    def totals(self, loss: Tensor) -> tuple[float, float]:
        """The gradient norm over the whole model, and the loss over the global batch."""
        raise NotImplementedError

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Everything that is trained here."""
        return [parameter for module in self.modules for parameter in module.parameters()]

    @property
    def tensors(self) -> Iterable[Tensor]:
        """What is held between steps: weights, buffers and optimizer state."""
        yield from self.parameters
        yield from (buffer for module in self.modules for buffer in module.buffers())
        yield from (
            value for state in self.adamw.state.values() for value in state.values() if isinstance(value, Tensor)
        )

    def optimize(self, *modules: nn.Module) -> None:
        """AdamW over the parameters of some modules: torch's fused kernel, its fastest on the CPU."""
        self.modules = modules
        choice, named = self.plan.optimizer, [each for module in modules for each in module.named_parameters()]
        groups = [
            {
                "params": [each for name, each in named if name.endswith("norm.weight") != decays],
                "weight_decay": choice.weight_decay * decays,
            }
            for decays in (True, False)
        ]
        self.adamw = torch.optim.AdamW(
            groups, lr=self.plan.train.learning_rate, betas=choice.betas, eps=choice.eps, fused=True
        )

    def whole_model(self) -> Llama:
        """The model with our initial weights."""
        model = Llama(self.model, self.plan.batch.sequence)
        model.load_state_dict(initial_weights(self.model, self.plan.train.seed))
        return model

    def batch(self, step: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of samples [lo, hi) of a global batch."""
        plan, before = self.plan, step * self.plan.batch.global_size
        return self.corpus.batch(before + lo, before + hi, plan.batch.sequence, plan.train.seed)


class DataPeer(Peer):
    """Copies of the model, or shards of it, that see different samples. Gradients are reduced
    after the last microbatch."""

    def microbatches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Those of this rank."""
        tokens, targets = self.batch(step, *self.plan.samples_of(self.global_rank))
        size = self.plan.batch.micro_size
        return list(zip(tokens.split(size), targets.split(size), strict=True))

    def totals(self, loss: Tensor) -> tuple[float, float]:
        norm = nn.utils.get_total_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        dist.all_reduce(loss)
        return float(norm), float(loss) / dist.get_world_size()


class Ddp(DataPeer):
    """`DistributedDataParallel`, gradients accumulated under `no_sync` and kept in its buckets."""

    def __init__(self, plan: Plan, corpus: Corpus, global_rank: int):
        super().__init__(plan, corpus, global_rank)
        self.ddp = DistributedDataParallel(self.whole_model(), gradient_as_bucket_view=True, broadcast_buffers=False)
        self.optimize(self.ddp.module)

    def backward(self, step: int) -> Tensor:
        microbatches, total = self.microbatches(step), torch.zeros(())
        for number, (tokens, targets) in enumerate(microbatches, 1):
            with self.ddp.no_sync() if number < len(microbatches) else nullcontext():
                loss = mean_loss(self.ddp(tokens), targets) / len(microbatches)
                loss.backward()
            total += loss.detach()
        return total


class Fsdp2(DataPeer):
    """`fully_shard` of every block and of the model. Parameters are gathered once a step, as ours are by whole stages:
    they stay from a forward to its backward."""

    def __init__(self, plan: Plan, corpus: Corpus, global_rank: int):
        super().__init__(plan, corpus, global_rank)
        mesh = init_device_mesh("cpu", (plan.layout.dp,))
        self.sharded = self.whole_model()
        for block in self.sharded.layers.values():
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(self.sharded, mesh=mesh, reshard_after_forward=False)
        self.optimize(self.sharded)

    def backward(self, step: int) -> Tensor:
        microbatches, total = self.microbatches(step), torch.zeros(())
        for number, (tokens, targets) in enumerate(microbatches, 1):
            is_last = number == len(microbatches)
            self.sharded.set_is_last_backward(is_last)
            self.sharded.set_requires_gradient_sync(is_last)
            self.sharded.set_reshard_after_backward(is_last)
            loss = mean_loss(self.sharded(tokens), targets) / len(microbatches)
            loss.backward()
            total += loss.detach()
        return total


class DTensorTp(Peer):
    """Tensor and sequence parallelism by DTensor, cut as in torchtitan, with the loss over cut logits."""

    def __init__(self, plan: Plan, corpus: Corpus, global_rank: int):
        super().__init__(plan, corpus, global_rank)
        mesh = init_device_mesh("cpu", (plan.layout.tp,))
        self.cut = self.whole_model()
        tokens = Shard(1)
        parallelize_module(
            self.cut,
            mesh,
            {
                "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
                "norm": SequenceParallel(),
                "output": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
            },
        )
        for block in self.cut.layers.values():
            parallelize_module(
                block,
                mesh,
                {
                    "attention_norm": SequenceParallel(),
                    "attention": PrepareModuleInput(
                        input_layouts=(tokens, None, None), desired_input_layouts=(Replicate(), None, None)
                    ),
                    **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
                    "attention.wo": RowwiseParallel(output_layouts=tokens),
                    "ffn_norm": SequenceParallel(),
                    "feed_forward": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(Replicate(),)),
                    **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
                    "feed_forward.w2": RowwiseParallel(output_layouts=tokens),
                },
            )
        self.optimize(self.cut)

    def backward(self, step: int) -> Tensor:
        tokens, targets = self.batch(step, 0, self.plan.batch.global_size)
        microbatches, total = (
            list(zip(*(part.split(self.plan.batch.micro_size) for part in (tokens, targets)), strict=True)),
            torch.zeros(()),
        )
        for own_tokens, own_targets in microbatches:
            with loss_parallel():
                loss = mean_loss(self.cut(own_tokens), own_targets) / len(microbatches)
                loss.backward()
            total += loss.detach().full_tensor()
        return total

    def totals(self, loss: Tensor) -> tuple[float, float]:
        norm = nn.utils.get_total_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        return float(norm.full_tensor()), float(loss)


class Pipeline(Peer):
    """`torch.distributed.pipelining` with the plan's schedule and stages."""

    def __init__(self, plan: Plan, corpus: Corpus, global_rank: int):
        super().__init__(plan, corpus, global_rank)
        self.num_stages, weights = plan.layout.num_stages, initial_weights(self.model, plan.train.seed)
        own = plan.placement.stages_of(global_rank)
        stages = [self._stage(stage, weights) for stage in own]
        self.has_first, self.has_last = 0 in own, self.num_stages - 1 in own
        schedule = PIPELINES[plan.schedule.name]
        self.schedule = schedule(
            stages[0] if plan.layout.vpp == 1 else stages, plan.num_microbatches, loss_fn=mean_loss
        )
        self.optimize(*(stage.submod for stage in stages))

    def _stage(self, stage: int, weights: dict[str, Tensor]) -> pipelining.PipelineStage:
        layers, batch = self.plan.stages[stage], self.plan.batch
        module = Llama(self.model, batch.sequence, layers=layers.layers, first=layers.embedding, last=layers.head)
        module.load_state_dict({name: weights[name] for name in module.state_dict()})
        return pipelining.PipelineStage(module, stage, self.num_stages, torch.device("cpu"))

    def backward(self, step: int) -> Tensor:
        losses: list[Tensor] = []
        tokens, targets = self.batch(step, 0, self.plan.batch.global_size)
        last = {"target": targets, "losses": losses} if self.has_last else {}
        self.schedule.step(*((tokens,) if self.has_first else ()), **last, return_outputs=False)
        return torch.stack(losses).mean() if losses else torch.zeros(())

    def totals(self, loss: Tensor) -> tuple[float, float]:
        """Every parameter and every loss is on one rank: one sum for both."""
        norm = nn.utils.get_total_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        both = torch.stack([norm.double().square(), loss.double()])
        dist.all_reduce(both)
        return math.sqrt(float(both[0])), float(both[1])


PEERS: dict[str, type[Peer]] = {"ddp": Ddp, "fsdp2": Fsdp2, "tp": DTensorTp, "pp": Pipeline}
