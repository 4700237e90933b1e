"""`Recorder`: writes the ledger of a training loop that is not ours, from hooks on its modules, gradients
and optimizer. Needs torch.

Nothing of the loop changes: a call of the model begins a microbatch, and the first call after a step of the
optimizer the next step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.base.errors import PlanError
from ..ledger.file import FileLedger
from ..ledger.ledger import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GRADIENT,
    NO_STEP,
    OPTIMIZER,
    SCALAR,
    SQUARE,
    WEIGHT,
    Key,
    Piece,
    summary_of_scalar,
)
from ..ledger.summary import summarize
from .places import Cuts, Placed, cuts_of, is_dtensor, is_partial, place, place_as
from .stages import StageHook, is_stage
from .tolerances import ROUNDOFF

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

WRAPPERS = frozenset({"module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""What DDP, activation checkpoints and FSDP put into names."""

Names = Callable[[str], str | None]


@dataclass
class _Root:
    """A model, or one part of it: `microbatches` of this step, each (first sample, number of samples), and the calls of
    its modules in the last one; `trains` while it is called to train."""

    module: Module
    next_sample: int
    stage: StageHook | None = None
    trains: bool = False
    microbatches: list[tuple[int, int]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    recomputed: Counter[str] = field(default_factory=Counter)


class Recorder:
    """Writes one rank's file of a ledger into `folder`, which `shardproof verify RUN --against RIGHT`
    reads. A context manager.

    `model` is a module, a `PipelineStage` of torch, or the several of them that this rank holds; make the recorder
    after they are sharded and after the optimizer. Each module's floating-point outputs are seen by sample, and their
    gradients; parameters' gradients as the optimizer gets them (or as they are when `gradients()` is called: call it
    before you clip); the learning rates, the optimizer's state, and the weights it finds and leaves. Calls of the model
    in evaluation mode or without gradients are not.

    `first_sample` is the place of this rank's first sample in the global batch: each call of the model has those that
    follow the call before (`samples` says otherwise). `sample_dim` is the dimension of samples. `loss_scale` is what
    multiple of the mean over the global batch the loss is that backward starts from, as that over a rank's or a
    microbatch's samples often is: gradients of activations are divided by it. `names` turns a name here into the name
    that both runs share, or None to leave it out. `cuts` says of plain tensors what part of them this rank holds, by
    pattern of such names; DTensors say it themselves. `exact=True` claims that the run has the bits of every other run
    that claims it, on one kind of machine.
    """

    def __init__(
        self,
        folder: str | Path,
        model: Any,
        optimizer: Optimizer | None = None,
        *,
        first_sample: int = 0,
        sample_dim: int = 0,
        loss_scale: float = 1.0,
        names: Names = lambda name: name,
        cuts: Cuts | None = None,
        exact: bool = False,
    ):
        modules = list(model) if isinstance(model, Sequence) else [model]
        optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        self._first_sample, self._sample_dim = first_sample, sample_dim
        self._loss_scale, self._names, self._cuts = loss_scale, names, dict(cuts or {})
        # The step now; whether the optimizer has run in it, after which the next forward begins a new one; and the step
        # whose gradients have been written, so that they are written once.
        self._step, self._stepped, self._gradients_of = 0, False, -1
        # Whether the first step has begun (the weights before it are written then), and the largest rounding error of
        # the formats that were seen.
        self._has_begun, self._roundoff = False, 0.0
        # The models, their parameters by shared name, and the shared name by `id` of a parameter.
        self._roots = [_root(module, first_sample) for module in modules]
        self._parameters = {
            name: held for root in self._roots for name, held in self._named(root.module.named_parameters())
        }
        self._name_of = {id(held): name for name, held in self._parameters.items()}
        self._file = _new_file(Path(folder), self._parameters, exact)
        # What is undone at the end of the `with` block.
        self._hooks = [hook for root in self._roots for hook in self._watch(root)]
        self._hooks += [root.stage for root in self._roots if root.stage is not None]
        for each in optimizers:
            self._hooks += [
                each.register_step_pre_hook(self._before_step),
                each.register_step_post_hook(self._after_step),
            ]

    # what a loop may say

    def samples(self, first: int) -> None:
        """The next call of the model begins with sample `first` of the global batch."""
        self._begin()
        for root in self._roots:
            root.next_sample = first

    def scalar(self, name: str, value: Any) -> None:
        """A number of this step that is the same on every rank that gives it, such as `loss` over the global
        batch, or `grad_norm`."""
        self._keep_scalar(name, float(getattr(value, "detach", lambda: value)()))

    def activation(self, name: str, tensor: Tensor) -> None:
        """A tensor [samples, ...] of the microbatch of the last call, and its gradient: for
        what no module gives back."""
        root = next((root for root in self._roots if root.microbatches), None)
        if root is None:
            raise PlanError(
                f"activation {name!r} belongs to no microbatch: the model was not called in this step. Call it before."
            )
        self._see(name, root.microbatches[-1], tensor, partial(place, name=name, slices=cuts_of(name, self._cuts)))

    def gradients(self) -> None:
        """Records the gradients as they are now, last parameter first. Without this call: as
        the optimizer gets them."""
        if self._gradients_of == self._step:
            return
        self._gradients_of = self._step
        for name, held in reversed(self._parameters.items()):
            gradient = held.grad
            if gradient is not None:
                if is_partial(gradient):
                    gradient = gradient.full_tensor()  # as the update will take it
                placed = self._place(gradient, name)
                self._keep(Key(self._step, GRADIENT, name), placed)
                if placed is not None:
                    square = summary_of_scalar(float(placed.local.detach().double().square().sum()))
                    self._file.keep(
                        Key(self._step, SQUARE, name),
                        Piece(self._file.global_rank, placed.shape, placed.region, square),
                    )

    def close(self) -> None:
        """Takes the hooks away and ends the file."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # microbatches and steps

    def _begin(self) -> None:
        if self._stepped:
            self._step, self._stepped = self._step + 1, False
            for root in self._roots:
                root.next_sample = self._first_sample
                root.microbatches.clear()
                root.recomputed.clear()

    def _begin_microbatch(self, root: _Root, _: Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        if _in_backward():
            return
        place = 0 if root.stage is None else root.stage.microbatch
        root.trains = _trains(root.module) and place is not None
        if not root.trains or place is None:
            return
        self._begin()
        given = next((value for _, value in _tensors((*args, *kwargs.values())) if value.ndim > self._sample_dim), None)
        num_samples = 1 if given is None else given.shape[self._sample_dim]
        if not self._has_begun:
            self._has_begun = True
            for name, held in self._parameters.items():
                self._keep(Key(NO_STEP, WEIGHT, name), self._place(held, name))
        if root.stage is None:
            root.microbatches.append((root.next_sample, num_samples))
            root.next_sample += num_samples
        else:  # the last may be smaller
            usual = max([num_samples, *(size for _, size in root.microbatches)])
            root.microbatches.append((root.next_sample + place * usual, num_samples))
        root.calls.clear()

    def _watch(self, root: _Root) -> Iterator[Any]:
        yield root.module.register_forward_pre_hook(
            partial(self._begin_microbatch, root), prepend=True, with_kwargs=True
        )
        for name, module in self._named(root.module.named_modules()):
            if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
                raise PlanError(
                    f"module {name} is compiled, and hooks see nothing in compiled modules. Record it "
                    "without torch.compile."
                )
            raw: list[object] = []
            yield module.register_forward_hook(partial(_remember, raw), prepend=True)
            yield module.register_forward_hook(partial(self._after_module, root, name, raw))

    def _after_module(self, root: _Root, name: str, raw: list[object], _: Module, __: object, output: object) -> None:
        before, raw[:] = list(raw), []
        if not root.trains or not root.microbatches:
            return
        if _in_backward():  # an activation checkpoint: what it computes again must be what it was
            if root.calls[name] > 1:  # and cannot be distinguished from another call of the same module
                return
            microbatch = root.microbatches[min(root.recomputed[name], len(root.microbatches) - 1)]
            root.recomputed[name] += 1
        else:
            microbatch = root.microbatches[-1]
            root.calls[name] += 1
            name = name if root.calls[name] == 1 else f"{name}#{root.calls[name]}"
        dtensor = before[0] if before and not is_dtensor(output) else None
        for suffix, tensor in _tensors(output):
            whole = f"{name}{suffix}"
            slices = cuts_of(whole, self._cuts)
            if dtensor is not None and not slices:
                self._see(whole, microbatch, tensor, partial(place_as, raw=dtensor))
            else:
                self._see(whole, microbatch, tensor, partial(place, name=whole, slices=slices))

    def _see(
        self, name: str, microbatch: tuple[int, int], tensor: Tensor, where: Callable[[Tensor], Placed | None]
    ) -> None:
        if not tensor.is_floating_point():
            return
        self._samples(ACTIVATION, name, microbatch, where(tensor))
        if tensor.requires_grad:
            unscaled = 1.0 / self._loss_scale
            tensor.register_hook(
                lambda gradient: self._samples(ACTIVATION_GRADIENT, name, microbatch, where(gradient * unscaled))
            )

    def _samples(self, phase: str, name: str, microbatch: tuple[int, int], placed: Placed | None) -> None:
        """Each sample of a tensor; a tensor that has no samples, such as a loss, in whole, under
        the microbatch's first."""
        if placed is None:
            return
        (first, num_samples), dim = microbatch, self._sample_dim
        if len(placed.shape) <= dim or placed.shape[dim] != num_samples:
            self._keep(Key(self._step, phase, name, first), placed)
            return
        shape, region = _without(placed.shape, dim), _without(placed.region, dim)
        for sample, part in zip(range(*placed.region[dim]), placed.local.unbind(dim), strict=True):
            self._keep(Key(self._step, phase, name, first + sample), Placed(part, shape, region))

    # the optimizer

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        self.gradients()
        for index, group in enumerate(optimizer.param_groups):
            if "lr" in group:
                self._keep_scalar("learning_rate" if not index else f"learning_rate.{index}", float(group["lr"]))

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        held = [each for group in optimizer.param_groups for each in group["params"] if id(each) in self._name_of]
        for parameter in held:
            name = self._name_of[id(parameter)]
            for state, value in optimizer.state.get(parameter, {}).items():
                if getattr(value, "shape", None) == parameter.shape:
                    self._keep(Key(self._step, OPTIMIZER, f"{name}.{state}"), self._place(value, name))
        for parameter in held:
            name = self._name_of[id(parameter)]
            self._keep(Key(self._step, WEIGHT, name), self._place(parameter, name))
        self._stepped = True

    # entries

    def _named(self, pairs: Any) -> Iterator[tuple[str, Any]]:
        """Modules or parameters by common names; of a wrapper and the module in it the wrapper."""
        seen: set[str] = set()
        for name, value in pairs:
            shared = self._names(".".join(part for part in name.split(".") if part not in WRAPPERS) or "model")
            if shared is None:
                continue
            if shared not in seen:
                seen.add(shared)
                yield shared, value
            elif not hasattr(value, "forward"):
                raise PlanError(
                    f"{name} and another parameter are both called {shared!r}. Give them different names with `names`."
                )

    def _place(self, tensor: Tensor, name: str) -> Placed | None:
        return place(tensor, name, cuts_of(name, self._cuts))

    def _keep_scalar(self, name: str, value: float) -> None:
        self._file.keep(
            Key(self._step, SCALAR, name), Piece(self._file.global_rank, (), (), summary_of_scalar(value), value)
        )

    def _keep(self, key: Key, placed: Placed | None) -> None:
        if placed is None:
            return
        self._notice_precision(placed.local.dtype)
        values = placed.local.detach().cpu().float().numpy()
        summary = summarize(np.atleast_1d(values), placed.shape or (1,), placed.region or ((0, 1),))
        self._file.keep(key, Piece(self._file.global_rank, placed.shape, placed.region, summary))

    def _notice_precision(self, dtype: torch.dtype) -> None:
        import torch

        roundoff = torch.finfo(dtype).eps / 2
        if roundoff > self._roundoff:
            self._roundoff = roundoff
            self._file.keep(ROUNDOFF, Piece(self._file.global_rank, (), (), summary_of_scalar(roundoff), roundoff))


def _new_file(folder: Path, parameters: Mapping[str, Tensor], exact: bool) -> FileLedger:
    """This rank's file, not yet open. Raises `PlanError` where the folder has a ledger."""
    import torch
    import torch.distributed as dist

    from ...backend.base.environment import environment

    apart = not (dist.is_available() and dist.is_initialized())
    global_rank, world_size = (0, 1) if apart else (dist.get_rank(), dist.get_world_size())
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("rank-*.jsonl"):
        number = int(path.stem.partition("-")[2])
        if number == global_rank or number >= world_size:
            raise PlanError(f"{folder} has a ledger already: {path.name}. Give a new folder, or remove this one.")
    device = next((held.device for held in parameters.values()), torch.device("cpu"))
    header = {"world_size": world_size, "environment": environment(device), "exact": exact}
    return FileLedger(global_rank, {}, target=folder, header=header)


def _root(model: Any, first_sample: int) -> _Root:
    return _Root(model.submod, first_sample, StageHook(model)) if is_stage(model) else _Root(model, first_sample)


def _remember(raw: list[object], _: Module, __: object, output: object) -> None:
    """Keeps what a module gave before a parallel style turned it into a plain tensor."""
    raw[:] = [output] if is_dtensor(output) else []


def _trains(module: Module) -> bool:
    """False where a call only looks: an evaluation, or a pipeline that asks for shapes."""
    import torch

    return bool(module.training) and torch.is_grad_enabled()


def _in_backward() -> bool:
    import torch

    return torch._C._current_graph_task_id() != -1


def _tensors(value: object) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a module's output, with what distinguishes them: nothing for a tensor alone, `.0`,
    `.1` or a key in others."""
    import torch

    if isinstance(value, torch.Tensor):
        yield "", value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from ((f".{key}{suffix}", tensor) for suffix, tensor in _tensors(part))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from ((f".{index}{suffix}", tensor) for suffix, tensor in _tensors(part))


def _without(sizes: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return (*sizes[:dim], *sizes[dim + 1 :])
