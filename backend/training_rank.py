"""`TrainingRank`: everything one rank needs to train: its stages, the executor, the optimizer, the data, and how a step ends."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter

from torch import Tensor

from ..core.errors import DivergedError
from ..core.expert_tokens import expert_nodes
from ..core.parameters import TOKEN_TABLE, Parameter, expert_biases, parameters, stage_usages
from ..core.plan import Plan
from ..core.program import EXPERT_BIAS
from ..core.program.buckets import are_bucketed
from ..core.schedules import lower, schedule_for
from ..core.timeline import Span
from . import not_finite
from .batches import Batches
from .data_parallel.early import EarlyReduction
from .data_parallel.sharded import ShardedStage, trained_buckets
from .huggingface.load import load_weights
from .live_memory import LiveMeter
from .loss_scale import LossScale
from .mesh import Mesh
from .model.block import BlockFactory
from .model.router import Router, reduce_counts
from .model.transformer import Stage, finish_tied
from .not_finite import NotFinite
from .numerics import Numerics, make_numerics
from .observe import Observer
from .optimizer import Held, ShardedAdamW, clip_coefficient
from .pipeline.activations import ActivationMeter, MemoryMeter
from .pipeline.executor import Executor
from .pipeline.halt import VALIDATION
from .pipeline.messages import Clock
from .tensor_parallel.context import DTYPES
from .tensor_parallel.exchange import ExpertGroups
from .tensor_parallel.gradients import ExpertCopies
from .tensor_parallel.parameter import Shard
from .totals import Totals
from .transport.base import Transport


@dataclass(frozen=True)
class StepResult:
    """One optimizer step as every rank knows it.

    `loss` is the mean per token before the update, `grad_norm` the norm before clipping, `elapsed_s` the seconds on this rank;
    `validation_loss` is the held-out loss after the update, where it was taken; `aux_loss` what routers add to the loss that is minimised
    (load balance and z-losses times their factors, over all layers), which `loss` does not contain; `mtp_loss` the mean over the modules of
    multi-token prediction, per token of the batch too, which neither contains. With fp16 `loss_scale` is what losses were multiplied by;
    where that was too much `grad_norm` is not finite and all ranks `skipped` the update.
    """

    step: int
    loss: float
    grad_norm: float
    elapsed_s: float
    num_tokens: int
    validation_loss: float | None = None
    aux_loss: float = 0.0
    mtp_loss: float = 0.0
    loss_scale: float = 1.0
    skipped: bool = False


class TrainingRank:
    """One rank of a training run. All ranks of the plan's world make the same calls in the same order."""

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        *,
        model: BlockFactory | None = None,
        observer: Observer | None = None,
        numerics: Numerics | None = None,
    ):
        """`numerics` replaces the plan's own: that is where a verifier puts a fault."""
        self.plan = plan
        self.transport = transport
        self.observer = observer
        dp_rank = plan.layout.coordinates(transport.global_rank)["dp"]
        schedule = lower(schedule_for(plan, plan.microbatches_of(dp_rank)))
        self.mesh = Mesh(transport, plan.layout, schedule, experts=plan.model.is_moe)
        self.numerics = make_numerics(plan, transport.device, global_rank=transport.global_rank) if numerics is None else numerics
        pp_rank, (first, last) = self.mesh.coordinates["pp"], plan.tokens_of(self.mesh.coordinates["tp"])
        self.stages = {
            stage: Stage(
                plan,
                plan.stages[stage],
                tp=self.mesh.tp,
                cp=self.mesh.cp,
                numerics=self.numerics,
                recorder=transport.recorder,
                block=model,
                experts=ExpertGroups(self.mesh.etp, self.mesh.ep) if plan.model.is_moe else None,
                observer=observer,
            )
            for stage in schedule.placement.stages_of(pp_rank)
        }
        if plan.train.load is not None:
            load_weights(plan.model, plan.train.load, self.saved_shards)
        self.sharded = {stage: self._sharded(stage) for stage in self.stages} if plan.layout.zero else {}
        if are_bucketed(plan) and not self.sharded:
            for number, module in self.stages.items():
                module.gradients.reduce_in(trained_buckets(plan, number, module.trained))
        self.optimizer = ShardedAdamW(self._held(), plan.optimizer, plan.train.learning_rate)
        self.batches = Batches(plan, self.mesh, transport)
        self.totals = Totals(plan, self.mesh, self.numerics, list(self.stages.values()), transport.recorder)
        self.clock = Clock(transport.device)
        self.executor = Executor(
            schedule,
            pp_rank,
            self.stages,
            channel=lambda direction, peer, sending: self.mesh.channel(direction, *((pp_rank, peer) if sending else (peer, pp_rank))),
            message_shape=(plan.batch.micro_size, last - first, plan.model.hidden_size),
            dtype=DTYPES[plan.precision.dtype],
            global_rank=transport.global_rank,
            recorder=transport.recorder,
            watch=transport.watch,
            global_rank_of=lambda pp: plan.layout.global_rank(**{**self.mesh.coordinates, "pp": pp}),
        )
        self.loss_scale = LossScale.of(plan.precision)
        self._not_finite: dict[int, NotFinite] = {}
        overlaps = bool(plan.data_parallel.overlap_grad_reduce)
        self._early = EarlyReduction({stage: module.gradients for stage, module in self.stages.items()}) if overlaps else None
        self._reduced: dict[int, Mapping[str, Tensor]] = {}

    def step(self, step: int, *, meter: MemoryMeter | None = None) -> tuple[StepResult, list[Span]]:
        """One optimizer step on the global batch `step`, and the spans of this rank.

        Raises `DivergedError` when the loss or the gradient norm is not finite; the weights are then those before the step.
        """
        if self.observer is not None:
            self.observer.begin_step(step)
        self.transport.watch.phase = f"step {step + 1}"
        start_s, scale = perf_counter(), self.loss_scale.value
        numbers: list[float] = []
        with meter.watch() if meter is not None else nullcontext():
            trace = self.executor.train(
                self.batches.training(step, scale),
                reduce_gradients=self._reduce_gradients,
                step=lambda token_losses: numbers.extend(self._optimizer_step(step, token_losses)),
                clock=self.clock,
                meter=meter,
                early=self._early,
            )
        loss, norm, aux_loss, mtp_loss = numbers
        result = StepResult(
            step,
            loss,
            norm,
            perf_counter() - start_s,
            self.batches.num_tokens,
            aux_loss=aux_loss,
            mtp_loss=mtp_loss,
            loss_scale=scale,
            skipped=not math.isfinite(norm),
        )
        return result, trace.spans

    def evaluate(self) -> float:
        """Mean loss per token of the first held-out global batch, by the forwards of the same pipeline."""
        batch = self.batches.validation()
        self.transport.watch.phase = VALIDATION
        with self._evaluating():
            trace = self.executor.evaluate(batch, clock=self.clock)
        loss = self.totals.mean_loss(trace.token_losses, self.batches.num_counted)
        if not math.isfinite(loss):
            raise DivergedError(
                f"the validation loss is {loss}, which is no finite number. Lower train.learning_rate={self.plan.train.learning_rate}."
            )
        return loss

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Inside, the stages are in `eval()` mode: no dropout of a user's own block, and losses as they are compared."""
        for stage in self.stages.values():
            stage.eval()
        try:
            yield
        finally:
            for stage in self.stages.values():
                stage.train()

    def live_meter(self) -> LiveMeter:
        """A meter for `step` that counts every tensor storage of this rank while it lives; it costs some microseconds an operation."""
        meter = LiveMeter(self.transport.global_rank)
        meter.hold(self._weights)
        meter.hold(self.optimizer.state_tensors)
        return meter

    def meter(self) -> ActivationMeter:
        """A meter for `step` that counts weights and optimizer state as always there, and partial sums of gradients as they grow."""
        base_bytes = sum(tensor.nbytes for tensor in self._weights) + self.optimizer.state_bytes
        return ActivationMeter(self.transport.global_rank, self._weights, base_bytes, self._gradient_bytes)

    @property
    def shards(self) -> list[Shard]:
        """This rank's parts of the parameters of all its stages."""
        return [shard for stage in self.stages.values() for shard in stage.shards.values()]

    @property
    def saved_shards(self) -> list[Shard]:
        """What this rank has of a saved model: `shards`, and the biases of experts, which training changes without a gradient and every
        rank holds whole."""
        known = {parameter.name: parameter for parameter in expert_biases(self.plan.model)}
        whole = (slice(0, self.plan.model.num_experts),)
        routers = [router for stage in self.stages.values() for router in stage.routers]
        biases = [(router.bias_name, router.expert_bias) for router in routers if router.expert_bias is not None]
        return self.shards + [Shard(known[name], whole, bias, bias) for name, bias in biases]

    def refresh(self) -> None:
        """Rounds the weights into what layers compute with, after they have changed; with ZeRO, of all copies together."""
        for sharded in self.sharded.values():
            sharded.share()
        for stage in self.stages.values():
            for name, shard in stage.shards.items():
                if not self.sharded or name not in stage.trained:
                    shard.refresh()

    @contextmanager
    def whole_masters(self) -> Iterator[None]:
        """Inside, `saved_shards` have their fp32 weights, which ZeRO spreads over the copies of a stage. All ranks come together."""
        buckets = [each for sharded in self.sharded.values() for each in sharded.weights]
        for each in buckets:
            each.restore_masters()
        try:
            yield
        finally:
            for each in buckets:
                each.give_up_masters()

    @property
    def _weights(self) -> list[Tensor]:
        """The fp32 weights, and the copies that layers compute with."""
        copies = [shard.operand for shard in self.shards if shard.operand is not shard.storage]
        return [shard.storage for shard in self.shards] + copies

    def _gradient_bytes(self) -> int:
        return sum(stage.gradients.num_bytes for stage in self.stages.values())

    def _held(self) -> list[Held]:
        """What this rank holds, stage by stage, and which of it enters the norm: replicas over tp, second replicas of stages, and the
        second tied table do not. With ZeRO it holds pieces, each of which is on no other copy."""
        here, placement = self.mesh.coordinates, self.plan.placement
        if self.sharded:
            pieces = [(stage, piece) for stage, sharded in self.sharded.items() for _, piece in sharded.pieces]
            return [Held(each.parameter, each.slices, each.tensor, self._counts(stage, each.parameter)) for stage, each in pieces]
        return [
            Held(
                shard.parameter,
                shard.slices,
                shard.tensor,
                counts=self._counts(stage, shard.parameter) and placement.replica_of(stage, here["pp"]) == 0,
            )
            for stage, module in self.stages.items()
            for shard in module.trained.values()
        ]

    def _counts(self, stage: int, parameter: Parameter) -> bool:
        own_tp = self.mesh.etp.rank if parameter.expert else self.mesh.coordinates["tp"]
        return (parameter.cut is not None or own_tp == 0) and not self._is_second_table(stage, parameter.name)

    def _sharded(self, stage: int) -> ShardedStage:
        experts = self.mesh.expert_copies(stage) if self.plan.model.is_moe else None
        sharded = ShardedStage(self.plan, stage, self.stages[stage].trained, self.mesh.copies(stage), experts)
        self.stages[stage].gradients.reduce_in(sharded.gradients)
        return sharded

    def _is_second_table(self, stage: int, name: str) -> bool:
        return self.plan.model.shares_table and name == TOKEN_TABLE and not self.plan.stages[stage].embedding

    def _reduce_gradients(self, stage: int) -> None:
        """REDUCE_GRAD: sums over the global batch; runs on the executor's `dp` lane."""
        samples_of = functools.partial(self.plan.copy_samples, stage)
        parts = self.mesh.tp_cp_gradients if self.numerics.mode == "exact" else self.mesh.tp_gradients
        gradients, experts = self.stages[stage].gradients, self._expert_copies(stage)
        if (found := not_finite.find(gradients.held)) is not None:
            self._not_finite[stage] = found
        if self.sharded:
            self._reduced[stage] = self.sharded[stage].reduce(gradients, samples_of, parts, experts)
        else:
            self._reduced[stage] = gradients.reduce(self.mesh.copies(stage), samples_of, parts, experts)
        if self.plan.precision.gradient_dtype == "bf16":  # finished sums are rounded once, whatever they were added up in
            self._reduced[stage] = {key: total.bfloat16().float() for key, total in self._reduced[stage].items()}
        own_tokens = [self.mesh.tp_gradients] if self.mesh.tp_gradients and self.plan.layout.sequence_parallel else []
        with self.transport.recorder.layer(EXPERT_BIAS):
            reduce_counts(self.stages[stage].routers, [*own_tokens, self.mesh.copies(stage)])

    def _expert_copies(self, stage: int) -> ExpertCopies | None:
        if not self.plan.model.is_moe:
            return None
        group = self.mesh.expert_copies(stage)
        return ExpertCopies(group, tuple(expert_nodes(self.plan, stage, rank) for rank in group.ranks))

    def _optimizer_step(self, step: int, token_losses: Mapping[int, Tensor]) -> tuple[float, float, float, float]:
        """STEP: the loss and the gradient norm of the global batch, what routers add to the loss, and the update."""
        scale = self.loss_scale
        num_counted = self.batches.num_counted
        gradients = [gradient / (num_counted * scale.value) for gradient in self._finished_gradients()]
        norm = self.totals.norm(self.optimizer.held, gradients)
        loss = self.totals.mean_loss(token_losses, num_counted)
        aux_loss, mtp_loss = self.totals.mean_aux_loss(), self.totals.mean_mtp_loss(num_counted)
        overflow = not math.isfinite(norm)
        if not math.isfinite(loss) or (overflow and not scale.bears_overflow):
            raise DivergedError(self._diverged(step, loss, norm))
        self._not_finite.clear()
        self.loss_scale = scale.after(overflow=overflow)
        if not overflow:
            self.optimizer.step(gradients, clip_coefficient(norm, self.plan.optimizer.clip_grad_norm))
            self.refresh()
        for router in self._routers:
            router.update_bias(0.0 if overflow else self.plan.train.expert_bias_rate)
        if overflow:  # what is no number has no bits to compare
            if self.observer is not None:
                self.observer.scalar("loss", loss)
                self._show_weights(self.observer)
            return loss, norm, aux_loss, mtp_loss
        if self.observer is not None:
            self._show(self.observer, gradients, loss, norm)
            if self.plan.train.adds_router_losses:
                self.observer.scalar("aux_loss", aux_loss)
            if self.plan.model.num_mtp_layers:
                self.observer.scalar("mtp_loss", mtp_loss)
        return loss, norm, aux_loss, mtp_loss

    def _diverged(self, step: int, loss: float, norm: float) -> str:
        """What is said when a loss or a gradient is not finite, the same on all ranks, which come here together."""
        names = [parameter.name for parameter in parameters(self.plan.model)]
        last = max(self._not_finite, default=None)
        found = None if last is None else self._not_finite[last]
        own = None if found is None else replace(found, name=found.name.partition("@")[0])
        named = not_finite.tell(own, names, self.mesh, self.transport.device) if math.isfinite(loss) else ""
        scale = f" with losses scaled by {self.loss_scale.value:g}" if self.loss_scale.value != 1.0 else ""
        return (
            f"step {step}: the loss is {loss} and the gradient norm {norm}{scale}, which are no finite numbers. {named}{' ' * bool(named)}"
            f"Lower train.learning_rate={self.plan.train.learning_rate} or set optimizer.clip_grad_norm."
        )

    def _finished_gradients(self) -> list[Tensor]:
        """Gradients summed over the global batch, in the order of the optimizer's `held`. A tied table's two sums are added here."""
        table = self._tied_gradient()
        if self.sharded:
            gradients = [each for stage, sharded in self.sharded.items() for each in sharded.finished(self._reduced[stage], table)]
            self._reduced.clear()
            return gradients
        gradients = [
            table if table is not None and name == TOKEN_TABLE else self._reduced[stage][name]
            for stage, module in self.stages.items()
            for name in module.trained
        ]
        self._reduced.clear()
        return gradients

    def _tied_gradient(self) -> Tensor | None:
        """The gradient of a tied token table, its two ends' sums added; None on ranks without an end and where nothing is tied."""
        usages = [(stage, usage) for stage in self.stages for usage in stage_usages(self.plan.model, self.plan.stages[stage])]
        sums = {usage.role: self._reduced[stage][usage.key] for stage, usage in usages if usage.role}
        if not sums:
            return None
        if self.mesh.embedding is None:
            return finish_tied(sums["embedding"], sums["output"])
        (own,) = sums.values()
        with self.transport.recorder.layer(TOKEN_TABLE.removesuffix(".weight")):
            return finish_tied(*self.mesh.embedding.all_gather(own))

    @property
    def _routers(self) -> list[Router]:
        return [router for stage in self.stages.values() for router in stage.routers]

    def _show(self, observer: Observer, gradients: list[Tensor], loss: float, norm: float) -> None:
        """Everything STEP computed, to the observer: gradients as backward finishes them, last layer first."""
        held = self.optimizer.held
        observer.scalar("loss", loss)
        for one, gradient in reversed(list(zip(held, gradients, strict=True))):
            observer.gradient(one.name, one.slices, gradient)
        observer.scalar("grad_norm", norm)
        for one in held:
            observer.optimizer_state(one.name, one.slices, *self.optimizer.moments(one))
        self._show_weights(observer)

    def _show_weights(self, observer: Observer) -> None:
        """The weights, and the biases of experts, as they are now."""
        held = self.optimizer.held
        whole = [shard for stage in self.stages.values() for shard in stage.trained.values()]
        for each in whole if self.plan.precision.dtype == "fp32" else held:
            observer.weight(each.parameter.name, each.slices, each.tensor)
        for router in self._routers:
            if router.expert_bias is not None:
                observer.weight(router.bias_name, (slice(0, len(router.expert_bias)),), router.expert_bias)
