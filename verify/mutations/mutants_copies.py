"""Copies of a stage, or of a tied table, that do not come together, or come together wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backend.data_parallel.buckets import FlatBucket
from ...backend.numerics.context_gradients import ContextGradients
from ...backend.numerics.open_sums import OpenSums
from ...backend.ranks import gradient_sums
from ...core.model.parameters import TOKEN_TABLE
from ...core.plan.plan import Plan
from ..ledger.ledger import GRADIENT, WEIGHT
from .mutant import Expected, Mutant
from .mutants_scale import zero_buckets_plan
from .patches import Function, Patches
from .plans import tiny

if TYPE_CHECKING:
    from ...backend.base.recorder import Recorder
    from ...backend.transport.mesh import Mesh

OF_THE_TABLE = Expected(GRADIENT, TOKEN_TABLE, ("missing",), ("REDUCE_GRAD",), ranks=(0, 1))


def reduces_over_data_parallel_ranks_only(patches: Patches) -> None:
    """Ranks that have other tokens of the same sequences are left out of the group over which gradients are added."""
    own: dict[int, dict[str, Tensor]] = {}

    def of_sample(given: Any, sample: int) -> Tensor:
        values = given.samples[sample] if isinstance(given, OpenSums) else [given[sample]]
        return torch.stack(list(values)).sum(0)

    def finish(original: Function) -> Function:
        def finished(self: ContextGradients, first_sample: int, *given: object) -> None:
            sums = own.setdefault(id(self), {})
            for key, uses in self._given.get(first_sample, {}).items():
                for each in uses.values():
                    for sample in range(len(each.samples if isinstance(each, OpenSums) else each)):
                        value = of_sample(each, sample)
                        sums[key] = sums[key] + value if key in sums else value
            original(self, first_sample, *given)

        return finished

    def reduce(original: Function) -> Function:
        def reduced(self: ContextGradients, copies: Any, *given: object) -> dict[str, Tensor]:
            whole, sums = original(self, copies, *given), own.pop(id(self))
            same_tokens = slice(
                self.cp.rank, None, self.cp.size
            )  # the copies that have the same tokens of their sequences
            return {
                **whole,
                **{key: torch.stack(copies.all_gather(value)[same_tokens]).sum(0) for key, value in sums.items()},
            }

        return reduced

    patches.replace(ContextGradients, "finish", finish)
    patches.replace(ContextGradients, "reduce", reduce)


def brings_weights_to_other_places(patches: Patches) -> None:
    """Updated parts of the output projection are put where those of the rank before belong."""

    def bring(original: Function) -> Function:
        def brought(self: FlatBucket) -> None:
            owned = self.owned
            if "head.output.weight" in self.keys:
                self.owned = [*owned[1:], owned[0]]
            original(self)
            self.owned = owned

        return brought

    patches.replace(FlatBucket, "_bring", bring)


def leaves_tables_apart(patches: Patches) -> None:
    """Both ends of a tied table go on with the gradient of their own use."""

    def tied(original: Function) -> Function:
        def own(plan: Plan, mesh: Mesh, reduced: Any, recorder: Recorder) -> dict[int, Tensor]:
            found = original(plan, mesh, reduced, recorder)
            return {
                stage: next(total for key, total in reduced[stage].items() if key.startswith(TOKEN_TABLE))
                for stage in found
            }

        return own

    patches.replace(gradient_sums, "tied_gradients", tied)


def adds_other_parts_of_tables(patches: Patches) -> None:
    """Both ends of a tied table are cut over their copies first, and on the last stage another rank keeps each
    part than on the first."""

    def tied(original: Function) -> Function:
        def crossed(plan: Plan, mesh: Mesh, reduced: Any, recorder: Recorder) -> dict[int, Tensor]:
            given = {stage: dict(sums) for stage, sums in reduced.items()}
            for sums in given.values():
                for key in [key for key in sums if key == f"{TOKEN_TABLE}@output"]:
                    sums[key] = mesh.dp.all_gather(sums[key])[mesh.dp.rank - 1]
            return original(plan, mesh, given, recorder)

        return crossed

    patches.replace(gradient_sums, "tied_gradients", tied)


MUTANTS = (
    Mutant(
        "MR22",
        "gradients are added over data-parallel ranks and not over those that have other tokens of the same sequences",
        "hpcaitech/ColossalAI#6184",
        plan=lambda: tiny(dp=2, cp=2, samples=4),
        breaks=reduces_over_data_parallel_ranks_only,
        expected=Expected(GRADIENT, "head.output.weight", ("missing",), ("REDUCE_GRAD",), ranks=(0, 1, 2, 3)),
    ),
    Mutant(
        "AL11",
        "updated weights are written into the part of another rank",
        "deepspeedai/DeepSpeed#2059",
        plan=zero_buckets_plan,
        breaks=brings_weights_to_other_places,
        expected=Expected(WEIGHT, "head.output.weight", ("permuted",), ("STEP",), ranks=(0, 1, 2)),
    ),
    Mutant(
        "TI01",
        "the gradients of a tied table are cut over copies before both ends are added, and the parts do not match",
        "NVIDIA/Megatron-LM#844",
        plan=lambda: tiny(pp=2, dp=2, samples=4, zero=1, model={"tied_embeddings": True}),
        breaks=adds_other_parts_of_tables,
        expected=Expected(GRADIENT, TOKEN_TABLE, ("permuted",), ("REDUCE_GRAD",)),
    ),
    Mutant(
        "TI02",
        "the ends of a tied table do not add their gradients",
        "NVIDIA/Megatron-LM#656",
        plan=lambda: tiny(pp=2, samples=3, model={"tied_embeddings": True}),
        breaks=leaves_tables_apart,
        expected=OF_THE_TABLE,
    ),
)
