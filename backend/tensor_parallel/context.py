"""`LayerContext`: what every layer of a stage needs from outside, passed in instead of looked up."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...core.base.errors import UnknownNameError
from ...core.layout.chunks import Chunks
from ...core.layout.stage_parameters import Usage
from ...core.model.parameters import Parameter, parameters
from ...core.plan.plan import Plan
from ...core.program import recomputed_modules
from ...core.program.expert_tokens import num_token_blocks
from ...core.program.holdings import known_part
from ..base.microbatch import Microbatch
from ..base.observe import Observer
from ..base.offload import Retained, Saved
from ..base.recorder import Recorder
from ..base.streams import to_device
from ..gradients.gradients import Gradients, WeightWork
from ..gradients.parameter import Shard, initial_shard
from ..numerics import Contribution, Numerics, OwnedLeaves
from ..numerics.heads import owned_heads
from ..numerics.tokens import owned_tokens
from ..transport.base import Group, SoloGroup
from ..transport.overlap import CommunicationLane
from .data import context_positions, context_whole
from .exchange import ExpertGroups, solo_experts
from .mappings import all_parts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""`precision.dtype` -> the format of hidden states and of the weights that layers compute with."""


Collect = Callable[[str, Sequence[tuple[Usage, Callable[[], Contribution]]]], None]
"""Takes a layer's name, and uses of parameters with what computes one microbatch's gradient of each."""


class Parts(Protocol):
    """Runs the parts of a stage's layers; `backend.ranks.layer_graphs` has one."""

    def run(self, name: str, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """`function(*tensors)`."""

    def enter(self, x_BSH: Tensor) -> Tensor:
        """What comes into a stage, whose gradient leaves it."""

    def leave(self, x_BSH: Tensor) -> Tensor:
        """What leaves a stage."""


class _Running(threading.local):
    """What the current thread runs forward."""

    collect: Collect | None = None

    microbatch: Microbatch | None = None
    again: bool = False
    retained: Retained | None = None


class LayerContext:
    """One stage's tensor- and context-parallel groups, numerics, recorder, shards and gradients; `microbatch` is
    the one being run forward.

    `dtype` is the format of hidden states. `chunks` are the tokens of each sequence that this context-parallel rank
    has, `query_chunks` those whose queries it attends from: the tokens of all its neighbours of `cp_inner`. `tokens`
    says which of `chunks` the ranks hold between the cut layers, and None means all (no sequence parallelism). `lane`
    overlaps collectives with products, where the plan overlaps them (`runtime.tp_comm_overlap`).
    `comes_to` hears of each part of the stage (`embedding`, `layers.3`, `head`) before it runs forward.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        tp: Group,
        numerics: Numerics,
        recorder: Recorder,
        observer: Observer | None = None,
        cp: Group | None = None,
        cp_levels: tuple[Group, Group] | None = None,
        experts: ExpertGroups | None = None,
    ):
        """Without `cp` the sequences are whole, without `experts` all experts. `cp_levels` are the ranks of `cp` that
        exchange heads for tokens with this one, and those that exchange keys and values, by default all."""
        self.plan = plan
        self.model = plan.model
        self.tp = tp
        self.cp = SoloGroup("cp", tp.ranks[tp.rank], recorder) if cp is None else cp
        alone = SoloGroup("cp_inner", tp.ranks[tp.rank], recorder)
        self.cp_inner, self.cp_outer = (alone, self.cp) if cp_levels is None else cp_levels
        self.experts = solo_experts(tp.ranks[tp.rank], recorder) if experts is None else experts
        self.chunks = Chunks(plan.batch.sequence, self.cp.size, self.cp.rank)
        self.query_chunks = Chunks(plan.batch.sequence, self.cp_outer.size, self.cp_outer.rank)
        self.tokens = owned_tokens(plan, tp, self.cp)
        self.numerics = numerics
        self.recorder = recorder
        self.observer = observer
        self.shards: dict[str, Shard] = {}
        self.frozen: set[str] = set()
        self.lane = (
            CommunicationLane(numerics.device, recorder, tp.waiting)
            if plan.runtime.tp_comm_overlap and tp.size > 1
            else None
        )
        self.heads = owned_heads(plan, tp, self.cp)
        self.gradients = Gradients(
            numerics, plan.batch.global_size, num_token_blocks(plan), self.cp, plan.batch.micro_size
        )
        self.weight_work = WeightWork()
        # Per thread the microbatch that runs: pairs run a forward and a backward at once.
        self._running = _Running()
        self.dtype = DTYPES[plan.precision.dtype]
        self.recomputed_modules = recomputed_modules(plan)
        # Tables of rotary positions by name, made once.
        self._constants: dict[str, tuple[Tensor, Tensor]] = {}
        self._places: Tensor | None = None
        # By tensor the cheap way to compute it again; None until a layer names one.
        self._sources: WeakIdKeyDictionary | None = None
        # How often a name was shown in the microbatch that runs: a module that is called twice shows two tensors.
        self._shown_names: tuple[Microbatch | None, Counter[str]] = None, Counter()
        self.comes_to: Callable[[str], None] = lambda part: None
        self.parts: Parts | None = None
        self._known = {parameter.name: parameter for parameter in parameters(plan.model)}

    def has(self, name: str) -> bool:
        """Whether the model has a parameter of this name (biases are optional)."""
        return name in self._known

    def shard(
        self, name: str, role: Literal["", "embedding", "output"] = "", *, frozen: bool = False, fp32: bool = False
    ) -> tuple[Shard, Usage]:
        """This rank's part of a parameter of the model, and the use whose gradient sum is registered. A
        tied table is made once.

        A `frozen` one has no gradient and is never updated, nor one that `optimizer.groups` freezes; layers compute
        with an `fp32` one in fp32, whatever the plan's precision. Raises `UnknownNameError` for a name the model does
        not have.
        """
        parameter = self._parameter(name)
        if name not in self.shards:
            slices = self._slices(parameter)
            seed = self.plan.train.seed if self.plan.train.load is None else None
            dtype, drawn_as = torch.float32 if fp32 else self.dtype, self.plan.name_in_run(name)
            self.shards[name] = initial_shard(parameter, slices, seed, self.numerics.device, dtype, drawn_as=drawn_as)
        usage = Usage(parameter, role)
        usage = replace(usage, use=self.gradients.num_uses(usage))
        if frozen or self.plan.optimizer.update_of(parameter).is_frozen:
            self.frozen.add(name)
            return self.shards[name], usage
        known = known_part(parameter, sequence_parallel=self.tokens is not None, exact=self.numerics.mode == "exact")
        owned = self.heads if known == "heads" else self.tokens if known == "tokens" else None
        self.gradients.register(usage, self.shards[name].storage.shape, owned)
        return self.shards[name], usage

    def owned_leaves(self, name: str) -> OwnedLeaves:
        """The feature leaves of a cut parameter on this rank. Raises `UnknownNameError` for a name
        the model does not have."""
        parameter = self._parameter(name)
        assert parameter.cut is not None, f"{name} is not cut"
        group = self.experts.etp if parameter.expert else self.tp
        return OwnedLeaves(self.plan.leaf_sizes.feature(parameter.cut[1]), parameter.unit, group.size, group.rank)

    def _slices(self, parameter: Parameter) -> tuple[slice, ...]:
        if not parameter.expert:
            return self.plan.leaf_sizes.local_slices(parameter, self.tp.size, self.tp.rank)
        ep, etp = self.experts.ep, self.experts.etp
        return self.plan.leaf_sizes.expert_slices(
            parameter, ep=ep.size, ep_rank=ep.rank, etp=etp.size, etp_rank=etp.rank
        )

    def _parameter(self, name: str) -> Parameter:
        if name not in self._known:
            raise UnknownNameError("parameter", name, self._known)
        return self._known[name]

    def submit(
        self, layer: str, contributions: Sequence[tuple[Usage, Callable[[], Contribution]]], microbatch: Microbatch
    ) -> None:
        """Leaves weight gradients to `weight_work`: pairs of a use and a function that computes its contribution."""
        contributions = [pair for pair in contributions if pair[0].parameter.name not in self.frozen]
        if (collect := self._running.collect) is not None:
            collect(layer, contributions)
            return

        def work() -> None:
            with self.recorder.layer(layer):
                for usage, contribution in contributions:
                    self.gradients.add(usage, microbatch.first_sample, contribution())

        self.weight_work.submit(microbatch.index, work)

    @contextmanager
    def collecting(self, collect: Collect) -> Iterator[None]:
        """Inside, what this thread submits goes to `collect`, and is added to nothing."""
        self._running.collect = collect
        try:
            yield
        finally:
            self._running.collect = None

    def part(self, name: str, function: Callable[..., Any], *tensors: Tensor) -> Any:
        """`function(*tensors)`, of which the host asks nothing: what may be given to a GPU as one. `name` is its own
        among all parts of the stage."""
        return function(*tensors) if self.parts is None else self.parts.run(name, function, *tensors)

    @property
    def microbatch(self) -> Microbatch | None:
        """The microbatch that the calling thread runs forward: that of a forward, or that a backward
        recomputes at the same time."""
        return self._running.microbatch

    @property
    def running_microbatch(self) -> Microbatch:
        """The microbatch that is being run forward."""
        assert self.microbatch is not None, "no microbatch is run forward"
        return self.microbatch

    def chunks_of(self, microbatch: Microbatch) -> Chunks:
        """The tokens that this rank has of each sequence of a microbatch: `chunks`, or fewer where
        its padding is left out."""
        whole = self.cp.size > 1 or microbatch.tokens.shape[1] == self.chunks.num_items
        return self.chunks if whole else Chunks(microbatch.tokens.shape[1])

    def query_chunks_of(self, microbatch: Microbatch) -> Chunks:
        """The tokens of each sequence of a microbatch that this rank's heads attend from."""
        return self.chunks_of(microbatch) if self.cp.size == 1 else self.query_chunks

    def places(self) -> Tensor:
        """int64 [s]: where in the sequence the tokens of this context-parallel rank lie."""
        if self._places is None:  # once: the host makes it
            places = context_positions(self.chunks.num_items, self.cp.size, self.cp.rank)
            self._places = to_device(places, self.numerics.device)
        return self._places

    def own_places(self) -> Tensor:
        """Those of `places` that this rank holds between the cut layers."""
        return self.places() if self.tokens is None else self.places()[slice(*self.tokens.own)]

    def positions(self, microbatch: Microbatch) -> Tensor:
        """int64 [b, s] of a microbatch (or [1, s], the same for all samples): the positions of this context-parallel
        rank's tokens in their documents, which learned and rotary positions go by."""
        places = self.places()[: microbatch.tokens.shape[1]].unsqueeze(0)
        return places if microbatch.documents is None else places - microbatch.documents

    def gather(self, x_BSH: Tensor) -> Tensor:
        """Hidden states of all tokens of this context-parallel rank, from those that this rank holds."""
        return x_BSH if self.tokens is None else all_parts(x_BSH, self.tp, 1, self.tokens.sizes)

    def gather_sequence(self, x: Tensor) -> Tensor:
        """[b, s, ...] of the whole sequence, from what every context-parallel rank has of it."""
        return x if self.cp.size == 1 else context_whole(self.cp.all_gather(x))

    def constant(self, name: str, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """What `make` makes the first time: tensors that are the same for every microbatch,
        under a `name` of their own."""
        if name not in self._constants:
            self._constants[name] = make()
        return self._constants[name]

    @property
    def constants(self) -> list[Tensor]:
        """The tensors that `constant` and `places` have made so far."""
        own = [] if self._places is None else [self._places]
        return own + [tensor for pair in self._constants.values() for tensor in pair]

    @contextmanager
    def keeping(self, retained: Retained) -> Iterator[None]:
        """Inside, what `keep` is given rests in host memory."""
        self._running.retained = retained
        try:
            yield
        finally:
            self._running.retained = None

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """What gives a tensor back that a source of `can_repeat` needs: autograd does not see it."""
        retained = self._running.retained
        if retained is None or not torch.is_grad_enabled():  # in a forward without a graph nobody asks for it again
            detached = tensor.detach()
            return lambda: detached
        saved = retained.pack(tensor)
        return saved if isinstance(saved, Saved) else lambda: saved

    def can_repeat(self, tensor: Tensor, source: Callable[[], Tensor], name: str = "") -> Tensor:
        """`tensor`, of which whoever would keep it for a backward keeps `source` instead, which computes it again.
        Under `name` the observer sees both; a source that has been given a name before has none here."""
        if self._sources is None:
            self._sources = WeakIdKeyDictionary()
        self._sources[tensor] = self._shown(name, tensor, source) if name and torch.is_grad_enabled() else source
        return tensor

    def _shown(self, name: str, tensor: Tensor, source: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if (show := self.shown_inside(name)) is None:
            return source
        show(tensor)

        def again() -> Tensor:
            made = source()
            show(made)
            return made

        return again

    def source_of(self, tensor: Tensor) -> Callable[[], Tensor] | None:
        """What computes a tensor again; None for one that has to be kept."""
        return None if self._sources is None else self._sources.get(tensor)

    def shown_inside(self, name: str) -> Callable[[Tensor], None] | None:
        """What shows the observer a tensor inside of a layer: forward, and when a backward has computed it again. None
        without an observer, and inside of what is computed again itself. Where layers share a name, the second tensor
        of a microbatch is `name#2`."""
        microbatch = self.microbatch
        if self.observer is None or microbatch is None or self._running.again:
            return None
        if self._shown_names[0] is not microbatch:
            self._shown_names = microbatch, Counter()
        self._shown_names[1][name] += 1
        number = self._shown_names[1][name]
        observer, own = self.observer, name if number == 1 else f"{name}#{number}"
        return lambda tensor: observer.recomputed(own, microbatch, None, tensor)

    def observe(self, name: str, tensor: Tensor) -> None:
        """Shows an activation to the observer, if there is one; in the graph, so that the observer can ask
        for its gradient too."""
        if self.observer is not None:
            assert self.microbatch is not None
            run = 0, tensor.shape[1]
            # losses are those of all tokens
            if self.tokens is not None and tensor.shape[1] != self.microbatch.tokens.shape[1]:
                run = self.tokens.own
            places = self.chunks.places(*run)
            show = self.observer.recomputed if self._running.again else self.observer.activation
            show(name, self.microbatch, tuple(slice(*place) for place in places), tensor)

    @property
    def again(self) -> bool:
        """Whether the calling thread runs forward what its backward needs again."""
        return self._running.again

    @contextmanager
    def running(self, microbatch: Microbatch, *, again: bool = False) -> Iterator[None]:
        """Inside, layers run forward for `microbatch`, or `again` for its backward."""
        before = self._running.microbatch, self._running.again
        self._running.microbatch, self._running.again = microbatch, again
        try:
            yield
        finally:
            self._running.microbatch, self._running.again = before

    def anchor(self) -> Tensor:
        """An empty tensor that requires a gradient, so that autograd reaches layers whose inputs are integers."""
        return torch.empty(0, device=self.numerics.device, requires_grad=True)
