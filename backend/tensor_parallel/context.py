"""`LayerContext`: what every layer of a stage needs from outside, passed in instead of looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...core.errors import UnknownNameError
from ...core.parameters import Parameter, Usage, parameters
from ...core.plan import Plan
from ...core.program import recomputed_modules
from ...core.program.holdings import knows_own_tokens
from ..numerics import Contribution, Numerics, OwnedLeaves
from ..numerics.tokens import owned_tokens
from ..observe import Observer
from ..recorder import Recorder
from ..transport.base import Group
from .gradients import Gradients, WeightWork
from .parameter import Shard, initial_shard

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""`precision.dtype` -> the format of hidden states and of the weights that layers compute with."""


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of one data-parallel rank.

    `index` counts on this rank, `first_sample` is the position of its first sample in the step's global batch. `tokens` and `targets`
    are int64 [b, s]. `step` counts optimizer steps; None is no training, where nothing is dropped.
    """

    index: int
    first_sample: int
    tokens: Tensor
    targets: Tensor
    step: int | None = None


class LayerContext:
    """One stage's tensor-parallel group, numerics, recorder, shards and gradients; `microbatch` is the one being run forward.

    `dtype` is the format of hidden states; `tokens` says which tokens of each sequence the ranks hold between the cut layers, and None
    means all (no sequence parallelism).
    """

    def __init__(self, plan: Plan, *, tp: Group, numerics: Numerics, recorder: Recorder, observer: Observer | None = None):
        self.plan = plan
        self.model = plan.model
        self.tp = tp
        self.tokens = owned_tokens(plan, tp)
        self.numerics = numerics
        self.recorder = recorder
        self.observer = observer
        self.shards: dict[str, Shard] = {}
        self.gradients = Gradients(numerics, plan.batch.global_size, self.tokens)
        self.weight_work = WeightWork()
        self.microbatch: Microbatch | None = None
        self.dtype = DTYPES[plan.precision.dtype]
        self.recomputed_modules = recomputed_modules(plan)
        self._sources: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._known = {parameter.name: parameter for parameter in parameters(plan.model)}

    def has(self, name: str) -> bool:
        """Whether the model has a parameter of this name (biases are optional)."""
        return name in self._known

    def shard(self, name: str, role: Literal["", "embedding", "output"] = "") -> tuple[Shard, Usage]:
        """This rank's part of a parameter of the model, and the use whose gradient sum is registered. A tied table is made once.

        Raises `UnknownNameError` for a name the model does not have.
        """
        parameter = self._parameter(name)
        if name not in self.shards:
            slices = self.plan.leaf_sizes.local_slices(parameter, self.tp.size, self.tp.rank)
            self.shards[name] = initial_shard(parameter, slices, self.plan.train.seed, self.numerics.device, self.dtype)
        usage = Usage(parameter, role)
        own_tokens = self.tokens is not None and knows_own_tokens(parameter, sequence_parallel=True)
        self.gradients.register(usage, own_tokens=own_tokens)
        return self.shards[name], usage

    def owned_leaves(self, name: str) -> OwnedLeaves:
        """The feature leaves of a cut parameter on this rank. Raises `UnknownNameError` for a name the model does not have."""
        parameter = self._parameter(name)
        assert parameter.cut is not None, f"{name} is not cut"
        return OwnedLeaves(self.plan.leaf_sizes.feature(parameter.cut[1]), parameter.unit, self.tp.size, self.tp.rank)

    def _parameter(self, name: str) -> Parameter:
        if name not in self._known:
            raise UnknownNameError("parameter", name, self._known)
        return self._known[name]

    def submit(self, layer: str, contributions: Sequence[tuple[Usage, Callable[[], Contribution]]], microbatch: Microbatch) -> None:
        """Leaves weight gradients to `weight_work`: pairs of a use and a function that computes its contribution."""

        def work() -> None:
            with self.recorder.layer(layer):
                for usage, contribution in contributions:
                    self.gradients.add(usage, microbatch.first_sample, contribution())

        self.weight_work.submit(microbatch.index, work)

    def gather(self, x_BSH: Tensor) -> Tensor:
        """Hidden states of all tokens, from those that this rank holds."""
        return x_BSH if self.tokens is None else self.tokens.gather(x_BSH, self.tp)

    def can_repeat(self, tensor: Tensor, source: Callable[[], Tensor]) -> Tensor:
        """`tensor`, of which whoever would keep it for a backward keeps `source` instead, which computes it again."""
        self._sources[tensor] = source
        return tensor

    def source_of(self, tensor: Tensor) -> Callable[[], Tensor] | None:
        """What computes a tensor again; None for one that has to be kept."""
        return self._sources.get(tensor)

    def observe(self, name: str, tensor: Tensor) -> None:
        """Shows an activation to the observer, if there is one; in the graph, so that the observer can ask for its gradient too."""
        if self.observer is not None:
            assert self.microbatch is not None
            whole = self.tokens is None or tensor.shape[1] == self.microbatch.tokens.shape[1]  # losses are those of all tokens
            lo, hi = (0, tensor.shape[1]) if whole else self.tokens.own
            self.observer.activation(name, self.microbatch, slice(lo, hi), tensor)

    @contextmanager
    def running(self, microbatch: Microbatch) -> Iterator[None]:
        """Inside, layers run forward for `microbatch`."""
        self.microbatch = microbatch
        try:
            yield
        finally:
            self.microbatch = None

    def anchor(self) -> Tensor:
        """An empty tensor that requires a gradient, so that autograd reaches layers whose inputs are integers."""
        return torch.empty(0, device=self.numerics.device, requires_grad=True)
