"""Tokens on their way to experts and back: put elsewhere, or without the sums of their gradients."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backend.model import experts, mlp
from ...backend.model.experts import Experts
from ...backend.tensor_parallel.expert_linear import ExpertLinear
from ..ledger.ledger import ACTIVATION, ACTIVATION_GRADIENT, HELD_OUT
from .mutant import Expected, Mutant
from .mutants_more import OURS
from .patches import Function, Patches
from .plans import EXPERTS, tiny

if TYPE_CHECKING:
    from ...backend.tensor_parallel.exchange import Exchange
    from ...backend.tensor_parallel.linear import ParallelLinear
    from ...core.plan.plan import Plan


class _OwnRows(torch.autograd.Function):
    """`size` items of a dimension; the backward has nothing for the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, first: int, size: int) -> Tensor:
        ctx.of = x.shape, dim, first, size
        return x.narrow(dim, first, size).clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        shape, dim, first, size = ctx.of
        dx = dy.new_zeros(shape)
        dx.narrow(dim, first, size).copy_(dy)
        return dx, None, None, None


class _Summed(torch.autograd.Function):
    """The identity; its backward adds the gradients of all members of a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: object) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return torch.stack(ctx.group.all_gather(dy)).sum(0), None


def keeps_own_gradients(patches: Patches, *, of: str) -> None:
    """Where ranks take their own tokens (`dispatch`) or weights (`combine`) of what all hold, the backward does not
    bring the gradients of all together."""

    def scatter(original: Function) -> Function:
        def own(x: Any, group: Any, *, dim: int, sizes: Any) -> object:
            if not group.recorder.current_layer.endswith(of):
                return original(x, group, dim=dim, sizes=sizes)
            return _OwnRows.apply(x, dim, sum(sizes[: group.rank]), sizes[group.rank])

        return own

    patches.replace(experts, "scatter", scatter)


def does_not_sum_expert_inputs(patches: Patches, *, layer: str) -> None:
    """The gradient of the experts' input is that of each rank's own part of their width."""

    def contract(original: Function) -> Function:
        def own(linear: ParallelLinear, x_NC: Tensor, exchange: Exchange, of: str) -> object:
            total = original(linear, x_NC, exchange, of)
            if linear.name != layer:
                return total
            products = linear.context.numerics.contract_experts(
                x_NC, linear.shard.operand, exchange.rows, linear.leaves
            )
            return products.sum(0)[exchange.inverse].split(list(exchange.member_rows))[exchange.groups.etp.rank]

        return own

    patches.replace(ExpertLinear, "contract", contract)


def swaps_gate_and_up(patches: Patches) -> None:
    """The two halves of a gated unit are taken for each other."""
    patches.replace(mlp, "split_fused", lambda original: lambda x, widths: original(x, widths)[::-1])


def adds_bias_on_every_rank(patches: Patches, *, layer: str) -> None:
    """Before the sum over the ranks that cut experts every rank adds their bias; the layer itself
    adds that of the first."""

    def contract(original: Function) -> Function:
        def with_bias(linear: Any, x_NC: Any, exchange: Any, of: str) -> Any:
            found, others = original(linear, x_NC, exchange, of), exchange.groups.etp.size - 1
            return found + others * linear.bias.operand[exchange.own_experts] if linear.name == layer else found

        return with_bias

    patches.replace(ExpertLinear, "contract", contract)


def sums_equal_gradients(patches: Patches) -> None:
    """The backward of a gather after which all ranks go on in the same way adds their gradients, which are equal."""

    def gather(original: Function) -> Function:
        return lambda x, group, *, dim, sizes: _Summed.apply(original(x, group, dim=dim, sizes=sizes), group)

    patches.replace(experts, "gather", gather)


def forgets_the_batch(patches: Patches) -> None:
    """Results of ranks are put one behind the other, as if each had one sample."""

    def gather(original: Function) -> Function:
        def flat(x_BSH: Any, group: Any, *, dim: int, sizes: Any) -> object:
            samples, hidden = x_BSH.shape[0], x_BSH.shape[2]
            rows = original(x_BSH.reshape(1, -1, hidden), group, dim=1, sizes=[samples * size for size in sizes])
            return rows.view(samples, -1, hidden)

        return flat

    patches.replace(experts, "gather", gather)


def reads_features_as_rows(patches: Patches) -> None:
    """The buffer that brings rows to their experts is read along its other dimension."""

    def exchanged(original: Function) -> Function:
        def moved(layer: Any, rows: Tensor, exchange: Exchange, to_experts: bool, name: str) -> object:
            found = original(layer, rows, exchange, to_experts, name)
            return found.t().reshape(found.shape) if to_experts and name == layer.dispatch_name else found

        return moved

    patches.replace(Experts, "exchanged", exchanged)


def supposes_even_parts(patches: Patches) -> None:
    """Results of ranks are put together as if each had its even share of the tokens, rounded up;
    rows that lack are zero."""

    def gather(original: Function) -> Function:
        def even(x_BSH: Any, group: Any, *, dim: int, sizes: Any) -> Any:
            whole, slots = original(x_BSH, group, dim=dim, sizes=sizes), -(-sum(sizes) // group.size)
            parts = whole.split(list(sizes), dim)
            filled = [
                torch.nn.functional.pad(part[:, :slots], (0, 0, 0, slots - part[:, :slots].shape[1])) for part in parts
            ]
            return torch.cat(filled, dim)[:, : sum(sizes)]

        return even

    patches.replace(experts, "gather", gather)


def loses_shared_inputs(patches: Patches) -> None:
    """What shared experts give to the gradient of their input is not added: their input was detached."""

    def backward(original: Function) -> Function:
        def uses(ctx: Any, *gradients: Tensor) -> Any:
            *others, shared = gradients
            return original(ctx, *others, torch.zeros_like(shared))

        return uses

    patches.replace(experts._Uses, "backward", backward)


def _experts() -> Plan:
    return tiny(model=EXPERTS, tp=3, dp=2, ep=2, micro=2)


MUTANTS = (
    Mutant(
        "MR06",
        "the gradient of the router's weights is taken for a replica, and each rank has that of its own tokens",
        "pytorch/torchtitan#4054",
        plan=_experts,
        breaks=partial(keeps_own_gradients, of="combine"),
        expected=Expected(ACTIVATION_GRADIENT, "layers.1.mlp.router", ("missing",), ("B",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "MR07",
        "the gradient of the experts' input is not added over the ranks that cut the experts",
        "pytorch/torchtitan#1878",
        plan=_experts,
        breaks=partial(does_not_sum_expert_inputs, layer="layers.1.mlp.experts.up"),
        expected=Expected(ACTIVATION_GRADIENT, "layers.1.mlp.norm", ("missing",), ("B",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "MR10-b",
        "the bias of experts is added on every rank that cuts them, before the sum over these ranks",
        "pytorch/torchtitan#4245",
        plan=lambda: tiny(model={**EXPERTS, "bias": True}, tp=3),
        breaks=partial(adds_bias_on_every_rank, layer="layers.0.mlp.experts.down"),
        # the first forward with biases
        expected=Expected(HELD_OUT, "layers.0.mlp", ("scaled",), ("F",), ranks=(0, 1, 2), step=1),
    ),
    Mutant(
        "MR12",
        "the backward of a gather adds gradients that are the same on all ranks",
        "THUDM/slime#1748",
        plan=_experts,
        breaks=sums_equal_gradients,
        expected=Expected(ACTIVATION_GRADIENT, "layers.1.mlp.router", ("scaled",), ("B",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "LY03",
        "the tokens of several samples are put to places that a single one would have",
        "pytorch/torchtitan#3604",
        plan=_experts,
        breaks=forgets_the_batch,
        expected=Expected(ACTIVATION, "layers.0.mlp", ("permuted",), ("F",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "LY03-b",
        "gate and up-projection are taken for each other",
        "pytorch/torchtitan#3604",
        plan=_experts,
        breaks=swaps_gate_and_up,
        expected=Expected(ACTIVATION, "layers.0.mlp", ("other values",), ("F",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "LY05",
        "experts read slices of features as tokens",
        "deepspeedai/DeepSpeed#8195",
        plan=_experts,
        breaks=reads_features_as_rows,
        expected=Expected(ACTIVATION, "layers.0.mlp", ("other values",), ("F",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "PD02",
        "results of uneven parts of a sequence are put together as if the parts were even",
        "pytorch/torchtitan#3664",
        plan=lambda: tiny(model=EXPERTS, tp=6),
        breaks=supposes_even_parts,
        expected=Expected(ACTIVATION, "layers.0.mlp", ("permuted",), ("F",), ranks=tuple(range(6))),
    ),
    Mutant(
        "XX95",
        "the gradient of the input of shared experts is lost",
        OURS,
        plan=lambda: tiny(model={**EXPERTS, "num_shared_experts": 1}, dp=2, ep=2),
        breaks=loses_shared_inputs,
        expected=Expected(ACTIVATION_GRADIENT, "layers.1.mlp.norm", ("missing",), ("B",)),
        steps=1,
    ),
)
