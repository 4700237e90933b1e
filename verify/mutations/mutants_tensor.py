"""Sums over tensor-parallel ranks that are left out, doubled, or taken over other ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...backend.model import alibi
from ...backend.numerics.exact import ExactNumerics
from ...backend.tensor_parallel import context, recompute
from ...backend.tensor_parallel.linear import ParallelLinear
from ...backend.tensor_parallel.mappings import all_parts
from ...backend.tensor_parallel.norm import HeadNorm, Norm
from ...backend.transport.mesh import Mesh
from ...core.plan.runtime import Recompute
from ..ledger.ledger import ACTIVATION, ACTIVATION_GRADIENT, GRADIENT, HELD_OUT, RECOMPUTED, WEIGHT
from .mutant import Expected, Mutant
from .patches import Function, Patches, rank_here
from .plans import EXPERTS, tiny

if TYPE_CHECKING:
    from torch import Tensor

    from ...backend.numerics.base import Numerics
    from ...core.layout.leaves import Leaves
    from ...core.model.parameters import Parameter
    from ...core.plan.plan import Plan


def loses_the_tag(patches: Patches, *, name: str) -> None:
    """Norms of this name (all where it is empty) are not among those whose gradients are sums over ranks' tokens."""

    def known_part(original: Function) -> Function:
        def known(parameter: Parameter, **how: object) -> object:
            part = original(parameter, **how)
            return None if part == "tokens" and name in ("", parameter.name) else part

        return known

    def token_sums(original: Function) -> Function:
        def sums(norm: Norm, x_BSH: Tensor) -> object:
            is_lost = norm.weight.parameter.name not in norm.context.gradients.owned
            return norm.context.numerics.token_sums(x_BSH) if is_lost else original(norm, x_BSH)

        return sums

    patches.replace(context, "known_part", known_part)
    patches.replace(Norm, "token_sums", token_sums)


def keeps_sums_of_own_heads(patches: Patches) -> None:
    """Norms of query and key heads are not among those whose gradients are sums over ranks' heads."""

    def known_part(original: Function) -> Function:
        def known(parameter: Parameter, **how: object) -> object:
            part = original(parameter, **how)
            return None if part == "heads" else part

        return known

    patches.replace(context, "known_part", known_part)
    patches.replace(HeadNorm, "token_sums", lambda original: lambda norm, x: norm.context.numerics.head_sums(x, None))


def sums_over_the_world(patches: Patches, *, layer: str) -> None:
    """The reduce-scatter of a row-parallel layer's output goes over all ranks."""
    _open_group(patches, "world", lambda layout, here: range(layout.world_size))

    def finish_contract(original: Function) -> Function:
        def finished(linear: Any, partial_BSF: object, dtype: object) -> Tensor:
            own = original(linear, partial_BSF, dtype)
            if linear.name != layer:
                return own
            tp, sizes = linear.context.tp, linear.context.tokens.sizes
            world = tp.wrong_group
            shapes = [(own.shape[0], sizes[member % tp.size], own.shape[2]) for member in range(world.size)]
            return sum(world.all_gather(own, shapes)[tp.rank :: tp.size])

        return finished

    patches.replace(ParallelLinear, "finish_contract", finish_contract)


def gathers_over_other_ranks(patches: Patches) -> None:
    """Recomputation brings the parts of a saved input together over a data-parallel group of the same size."""
    _open_group(patches, "mixed", lambda layout, here: layout.group_of(here, "dp"))

    def from_parts(original: Function) -> Function:
        def gathered(part: Any, shape: Any, layers: Any, layer: str) -> object:
            with layers.recorder.layer(layer):
                return all_parts(part, layers.tp.wrong_group, 0, [len(part)] * layers.tp.size).view(shape)

        return gathered

    patches.replace(recompute, "from_parts", from_parts)


def keeps_its_partial_sum(patches: Patches, *, layer: str) -> None:
    """The sum over ranks is made in a temporary, and what comes back is what this rank brought to it."""

    def finish_contract(original: Function) -> Function:
        def finished(linear: ParallelLinear, partial_BSF: Tensor, dtype: torch.dtype) -> object:
            own = partial_BSF.sum(0).to(dtype)
            total = original(linear, partial_BSF, dtype)
            return own if linear.name == layer else total

        return finished

    patches.replace(ParallelLinear, "finish_contract", finish_contract)


def sums_twice(patches: Patches, *, layer: str) -> None:
    """What is the sum over ranks already is added over them once more."""

    def finish_contract(original: Function) -> Function:
        def finished(linear: ParallelLinear, partial_BSF: Tensor, dtype: torch.dtype) -> object:
            total = original(linear, partial_BSF, dtype)
            return torch.stack(linear.context.tp.all_gather(total)).sum(0) if linear.name == layer else total

        return finished

    patches.replace(ParallelLinear, "finish_contract", finish_contract)


def adds_bias_on_every_rank(patches: Patches, *, layer: str) -> None:
    """Before the sum over ranks every rank adds the bias, which all have; the layer itself adds that of the first."""

    def partial_contract(original: Function) -> Function:
        def products(linear: Any, x_BSC: Any) -> Any:
            found = original(linear, x_BSC)
            if linear.name == layer and linear.context.tp.rank:
                found[0].add_(linear.bias.operand)
            return found

        return products

    patches.replace(ParallelLinear, "partial_contract", partial_contract)


def takes_logarithms_first(patches: Patches) -> None:
    """The logarithm of the sum over the vocabulary is taken of each rank's part, before the parts are added."""

    def row_sums(original: Function) -> Function:
        def sums(numerics: Numerics, parts: Any, leaves: Leaves, group: Any, single: Tensor | None = None) -> object:
            found = original(numerics, parts, leaves, group, single)
            if single is None:
                return found
            logarithms = group.all_gather(parts[-1].sum(0).log())
            return [*found[:-2], torch.stack(logarithms).sum(0).exp(), found[-1]]

        return sums

    patches.replace(ExactNumerics, "row_sums", row_sums)


def draws_routers_apart(patches: Patches, *, tp: int) -> None:
    """Every tensor-parallel rank draws its own copy of a router's weights."""

    def initial_shard(original: Function) -> Function:
        def shard(parameter: Parameter, *given: object, drawn_as: str | None = None) -> object:
            tp_rank = rank_here() % tp
            apart = parameter.name.endswith("router.weight") and tp_rank
            return original(parameter, *given, drawn_as=f"{parameter.name}/{tp_rank}" if apart else drawn_as)

        return shard

    patches.replace(context, "initial_shard", initial_shard)


def takes_the_first_slopes(patches: Patches) -> None:
    """Every tensor-parallel rank takes the slopes of ALiBi from the first head on."""
    patches.replace(alibi, "first_query_head", lambda original: lambda context: 0)


def _open_group(patches: Patches, name: str, members: Function) -> None:
    """Another group for each rank's tensor-parallel one to be mistaken for: its `wrong_group`."""

    def make(original: Function) -> Function:
        def init(mesh: Any, transport: Any, layout: Any, *given: Any, **options: Any) -> None:
            original(mesh, transport, layout, *given, **options)
            ranks = list(members(layout, transport.global_rank))
            mesh.tp.wrong_group = transport.group(f"{name}/{ranks[0]}", name, ranks)

        return init

    patches.replace(Mesh, "__init__", make)


def _cut_sequences() -> Plan:
    return tiny(tp=3, dp=2, sequence_parallel=True)


def _whole_sequences() -> Plan:
    return tiny(tp=2, dp=2)


def _five_heads() -> Plan:
    return tiny(tp=5, model={"num_heads": 5, "num_kv_heads": 5})


MUTANTS = (
    Mutant(
        "MR01",
        "one norm's weight is not tagged for sequence parallelism: its gradient stays that of each rank's own tokens",
        "NVIDIA/Megatron-LM@20b7a5489d",
        plan=_cut_sequences,
        breaks=partial(loses_the_tag, name="layers.0.mlp.norm.weight"),
        expected=Expected(GRADIENT, "layers.0.mlp.norm.weight", ("missing",), ("REDUCE_GRAD",), ranks=tuple(range(6))),
    ),
    Mutant(
        "MR01-b",
        "gradients of the norms of query and key heads are not added over the ranks that cut heads",
        "NVIDIA/Megatron-LM@20b7a5489d",
        plan=lambda: tiny(tp=3, model={"qk_norm": True}),
        breaks=keeps_sums_of_own_heads,
        expected=Expected(
            GRADIENT, "layers.1.attention.key_norm.weight", ("missing",), ("REDUCE_GRAD",), ranks=(0, 1, 2)
        ),
    ),
    Mutant(
        "MR02",
        "no norm's gradient is added over the ranks that cut sequences",
        "hpcaitech/ColossalAI#4926",
        plan=_cut_sequences,
        breaks=partial(loses_the_tag, name=""),
        expected=Expected(GRADIENT, "head.norm.weight", ("missing",), ("REDUCE_GRAD",), ranks=tuple(range(6))),
    ),
    Mutant(
        "MR04",
        "a reduce-scatter without its group runs over all ranks, other data-parallel ones too",
        "EleutherAI/gpt-neox#1281",
        plan=_cut_sequences,
        breaks=partial(sums_over_the_world, layer="layers.0.attention.output"),
        expected=Expected(ACTIVATION, "layers.0.attention", ("other values",), ("F",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "MR05",
        "the input gradient of a column-parallel layer is summed in a contiguous copy, and the partial sum goes on",
        "NVIDIA/Megatron-LM#5338",
        plan=_whole_sequences,
        breaks=partial(keeps_its_partial_sum, layer="layers.1.attention.qkv"),
        expected=Expected(ACTIVATION_GRADIENT, "layers.1.attention.norm", ("missing",), ("B",), ranks=(0, 1)),
    ),
    Mutant(
        "MR05-b",
        "the output of a row-parallel layer is summed in a contiguous copy, and the partial sum goes on",
        "NVIDIA/Megatron-LM#5338",
        plan=_five_heads,
        breaks=partial(keeps_its_partial_sum, layer="layers.0.mlp.down"),
        expected=Expected(ACTIVATION, "layers.0.mlp", ("missing",), ("F",), ranks=tuple(range(5))),
    ),
    Mutant(
        "MR09",
        "the gradient of the head's input is taken for a replica and is a partial sum",
        "pytorch/torchtitan#3412",
        plan=_whole_sequences,
        breaks=partial(keeps_its_partial_sum, layer="head.output"),
        expected=Expected(ACTIVATION_GRADIENT, "layers.1.output", ("missing",), ("B",), ranks=(0, 1)),
    ),
    Mutant(
        "MR10",
        "a replicated bias is added on every rank before the sum over ranks",
        "pytorch/torchtitan#4245",
        plan=lambda: tiny(tp=2, dp=2, model={"bias": True}),
        breaks=partial(adds_bias_on_every_rank, layer="layers.0.mlp.down"),
        # the first forward with biases
        expected=Expected(HELD_OUT, "layers.0.mlp", ("doubled",), ("F",), ranks=(0, 1), step=1),
    ),
    Mutant(
        "MR12-b",
        "the input gradient of a column-parallel layer is added over ranks twice",
        "THUDM/slime#1748",
        plan=_five_heads,
        breaks=partial(sums_twice, layer="layers.1.mlp.up"),
        expected=Expected(ACTIVATION_GRADIENT, "layers.1.mlp.norm", ("scaled",), ("B",), ranks=tuple(range(5))),
    ),
    Mutant(
        "MR14",
        "a logarithm is taken of partial sums, before the pending sum over ranks",
        "pytorch/pytorch#165962",
        plan=_cut_sequences,
        breaks=takes_logarithms_first,
        expected=Expected(ACTIVATION, "head.losses", ("other values",), ("F",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "MR18",
        "recomputation gathers a saved input over another group of the same size",
        "NVIDIA/Megatron-LM#7452",
        plan=lambda: tiny(tp=2, dp=2, sections={"recompute": Recompute("full", layers=(1,), distribute=True)}),
        breaks=gathers_over_other_ranks,
        expected=Expected(RECOMPUTED, "layers.1.attention.norm", ("permuted",), ("B",), ranks=(0, 1)),
    ),
    Mutant(
        "XX80",
        "slopes of ALiBi go by a rank's own heads, counted from 0",
        "bigscience-workshop/Megatron-DeepSpeed#227",
        plan=lambda: tiny(tp=3, model={"position": "alibi"}),
        breaks=takes_the_first_slopes,
        # the first token sees itself alone
        expected=Expected(ACTIVATION, "layers.0.attention", ("other values",), ("F",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "MR23",
        "the router, which every tensor-parallel rank holds whole, starts from other weights on each",
        "NVIDIA/Megatron-LM#599",
        plan=lambda: tiny(model=EXPERTS, tp=2, dp=2, ep=2),
        breaks=partial(draws_routers_apart, tp=2),
        expected=Expected(WEIGHT, "layers.0.mlp.router.weight", ("other values",), ("STEP",), ranks=(1, 3), step=0),
    ),
)
