"""`TorchShardedStage`: a stage whose parameters torch's `fully_shard` (FSDP2) keeps in parts, for
those who prefer it to ours.

Every transformer layer is a unit of its own, and what lies around the layers another: torch gathers a unit before its
forward and its backward and adds up its gradients behind the latter (Zhao et al. 2023, "PyTorch FSDP"; the
per-parameter design of torch 2.4 on). Our layers compute weight gradients outside of autograd: they become the `grad`
of the parameters that torch has gathered, which it finds there when the backward of the unit ends. Only public
functions of torch are used.

torch wants its default process group and mesh. The group is the user's, or belongs to the transport for as long as it
is open; the mesh's are the transport's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ...core.base.errors import PlanError
from ...core.model.blocks import layer_prefix
from ...core.model.parameters import Parameter
from ...core.plan.plan import Plan
from ..base.microbatch import Microbatch
from ..gradients.gradients import ExpertCopies
from ..gradients.parameter import Shard, canonical, canonical_slices
from ..model.transformer import Stage
from ..numerics import Contribution
from ..numerics.token_product import AddedInPlace
from ..transport.base import Group, Transport
from ..transport.process_group import ProcessGroupTransport
from .base import DataParallel, SamplesOf


@dataclass(frozen=True)
class RowsPiece:
    """Rows of a shard, in storage orientation, that this rank keeps: their place in the full
    parameter, and the weights."""

    parameter: Parameter
    slices: tuple[slice, ...]
    tensor: Tensor


class HandedOver:
    """Where a layer's weight gradients go: into the `grad` of the parameter that torch has
    gathered. An `Accumulator`."""

    def __init__(self, unit: nn.Module, name: str):
        self._unit, self._name = unit, name

    @property
    def held(self) -> list[Tensor]:
        """Nothing: torch holds it."""
        return []

    def add(self, first_sample: int, contribution: Contribution) -> None:
        """Takes one microbatch's contribution, in storage orientation."""
        assert isinstance(contribution, Tensor | AddedInPlace), "fast numerics add up a microbatch at once"
        parameter = getattr(self._unit, self._name)
        if parameter.grad is None:
            parameter.grad = contribution if isinstance(contribution, Tensor) else contribution.total()
        elif isinstance(contribution, Tensor):
            parameter.grad.add_(contribution)
        else:
            contribution.add_to(parameter.grad)


class TorchShardedStage(DataParallel):
    """One stage over `copies`, in parts of whole rows. With ZeRO 3 a unit is let go of between its forward
    and its backward, with ZeRO 2 after the last backward of a step. Gradients accumulate on every rank
    until the last microbatch."""

    def __init__(self, plan: Plan, stage: Stage, transport: Transport, copies: Group, num_microbatches: int):
        """Takes the weights that the stage has now. Raises `PlanError` for ranks that are threads of one process."""
        # the executor changes no output of a stage, which is what torch warns of
        warnings.filterwarnings(
            "ignore", message=r"FSDP2-wrapped module \(FSDPStage\) returned a view", category=UserWarning
        )
        self._stage = stage
        self._num_microbatches = num_microbatches
        mesh = _mesh(plan, transport, copies)
        # The module of a name's parameter; the modules that torch gathers as one, the stage last; whether weights stay
        # gathered between forward and backward.
        self._owners = {name: _unit_of(stage, name) for name in stage.trained}
        for name, unit in self._owners.items():
            unit.register_parameter(_attribute(name), nn.Parameter(stage.shards[name].storage))
        keeps = plan.layout.zero < 3
        units = [unit for unit in stage.blocks if any(owner is unit for owner in self._owners.values())]
        self._units: list[Any] = [
            fully_shard(unit, mesh=mesh, reshard_after_forward=not keeps) for unit in (*units, stage)
        ]
        for each in self._units:
            assert isinstance(each, FSDPModule)
            each.set_gradient_divide_factor(1.0)  # sums over tokens, which STEP divides
            each.set_force_sum_reduction_for_comms(True)
        self._bind()
        self._keeps = keeps
        stage.register_forward_pre_hook(self._before_forward)
        self._gradients = stage.gradients
        keys = {key: usage.parameter.name for key, usage in stage.gradients.usages.items()}
        stage.gradients.hand_over({key: HandedOver(self._owners[name], _attribute(name)) for key, name in keys.items()})
        # What this rank keeps of every parameter, for the optimizer.
        self._pieces = list(self._rows())

    @property
    def pieces(self) -> Sequence[RowsPiece]:
        return self._pieces

    def reduce(self, samples_of: SamplesOf, tp: Group | None, experts: ExpertCopies | None) -> dict[str, Tensor]:
        """REDUCE_GRAD: what torch has added up behind the last backward; over `tp` what its ranks know of
        their own tokens or heads."""
        sums = {name: self._take(name) for name in self._owners}
        if owned := {self._gradients.usages[key].parameter.name for key in self._gradients.owned}:
            assert tp is not None, f"{', '.join(owned)} are sums over tensor-parallel ranks"
            names = [name for name in sums if name in owned]
            flat = tp.all_reduce(torch.cat([sums[name].reshape(-1) for name in names]), "sum")
            for name, part in zip(names, flat.split([sums[name].numel() for name in names]), strict=True):
                sums[name] = part.view(sums[name].shape)
        return sums

    def finished(self, reduced: Mapping[str, Tensor], table: Tensor | None) -> list[Tensor]:
        return [canonical(piece.parameter, reduced[piece.parameter.name]) for piece in self._pieces]

    def share(self) -> None:
        """Lets go of what an evaluation may have left gathered: before its next forward a unit gathers what the
        optimizer has changed."""
        self.free()

    def begin_batches_of(self, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches

    def gather(self) -> None:
        for each in self._units:
            each.unshard()

    def free(self) -> None:
        for each in self._units:
            each.reshard()

    @contextmanager
    def whole_masters(self) -> Iterator[None]:
        self.gather()
        try:
            yield
        finally:
            self.free()

    def _bind(self) -> None:
        """Makes the stage's shards views of what torch gathers: it always gathers into the same storage."""
        self.gather()
        for name, unit in self._owners.items():
            self._stage.shards[name].storage.data = getattr(unit, _attribute(name)).data
        self.free()

    def _before_forward(self, stage: nn.Module, inputs: tuple[Any, ...]) -> None:
        microbatch: Microbatch = inputs[0]
        is_last = microbatch.index == self._num_microbatches - 1
        for each in self._units:
            each.set_requires_gradient_sync(is_last, recurse=False)
            each.set_reshard_after_backward(is_last or not self._keeps, recurse=False)

    def _take(self, name: str) -> Tensor:
        """This rank's rows of a finished gradient, in storage orientation; zeros for a parameter
        that no layer has used."""
        parameter = getattr(self._owners[name], _attribute(name))
        own: Tensor = torch.zeros_like(parameter.to_local()) if parameter.grad is None else parameter.grad.to_local()
        parameter.grad = None
        return own

    def _rows(self) -> Iterator[RowsPiece]:
        for name, unit in self._owners.items():
            shard, parameter = self._stage.shards[name], getattr(unit, _attribute(name))
            assert isinstance(parameter, DTensor)
            own = parameter.to_local().detach()
            first = _first_row(len(shard.storage), parameter.device_mesh.size(), parameter.device_mesh.get_local_rank())
            yield RowsPiece(shard.parameter, _place(shard, first, len(own)), canonical(shard.parameter, own))


def _first_row(num_rows: int, size: int, rank: int) -> int:
    """Where a rank's rows begin: torch's `chunk`, whose parts are of one length but for the last
    ones, which may be empty.

    >>> [_first_row(10, 4, rank) for rank in range(4)], [_first_row(3, 4, rank) for rank in range(4)]
    ([0, 3, 6, 9], [0, 1, 2, 3])
    """
    return min(num_rows, rank * -(-num_rows // size))


def _place(shard: Shard, first: int, num_rows: int) -> tuple[slice, ...]:
    return canonical_slices(
        shard, (slice(first, first + num_rows), *(slice(0, size) for size in shard.storage.shape[1:]))
    )


def _unit_of(stage: Stage, name: str) -> nn.Module:
    """The transformer layer that a parameter belongs to, or the stage."""
    blocks = zip(stage.stage.layers, stage.blocks, strict=True)
    return next((block for layer, block in blocks if name.startswith(f"{layer_prefix(layer)}.")), stage)


def _attribute(name: str) -> str:
    """What a parameter is called among the attributes of its unit, which know no dots."""
    return "sharded_" + name.replace(".", "_")


def _mesh(plan: Plan, transport: Transport, copies: Group) -> DeviceMesh:
    """The ranks of `copies` as torch's mesh. All ranks of the world come together."""
    if not isinstance(transport, ProcessGroupTransport):
        raise PlanError(
            'data_parallel.library="torch" wants ranks that are processes, but here they are threads of one. '
            "Use transport gloo or nccl, or leave library out."
        )
    transport.open_default_group()
    groups = transport.torch_groups(plan.layout.groups("dp-cp"))
    own = next(
        group
        for group, ranks in zip(groups, plan.layout.groups("dp-cp"), strict=True)
        if transport.global_rank in ranks
    )
    assert sorted(copies.ranks) == dist.get_process_group_ranks(own)
    return DeviceMesh.from_group(own, transport.device.type)
