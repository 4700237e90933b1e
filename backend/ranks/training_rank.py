"""`TrainingRank`: everything one rank needs to train: its stages, the executor, the optimizer, the
data, and how a step ends."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from time import perf_counter

import torch
from torch import Tensor

from ...core.base.errors import DivergedError
from ...core.model.parameters import expert_biases
from ...core.plan.batch_sizes import sizes_of
from ...core.plan.plan import Plan
from ...core.program.buckets import sums_are_sharded
from ...core.schedule.timeline import Span
from ..base.host_copies import HostCopies
from ..base.loss_scale import LossScale
from ..base.microbatch import Microbatch
from ..base.observe import Observer
from ..base.shown_later import ShownLater
from ..base.step_result import StepResult
from ..data_parallel.base import DataParallel
from ..data_parallel.copies import open_copies
from ..data_parallel.early import EarlyReduction
from ..data_parallel.gather_memory import gather_in_place
from ..data_parallel.late import LateGather
from ..data_parallel.observed import observed
from ..data_parallel.replicated import ReplicatedStage
from ..data_parallel.sharded import ShardedStage
from ..gradients.parameter import Shard
from ..huggingface.load import load_weights
from ..model.block import BlockFactory
from ..model.router import Router
from ..model.transformer import Head, Stage
from ..numerics import Numerics, make_numerics
from ..optimizers.held import clip_coefficient
from ..optimizers.sharded import ShardedOptimizer
from ..pipeline.activations import ActivationMeter, MemoryMeter
from ..pipeline.executor import Trace
from ..pipeline.graphs import StepGraphs
from ..pipeline.messages import Clock
from ..pipeline.slots import places_of, slots_of
from ..tensor_parallel.exchange import ExpertGroups
from ..transport.base import Transport
from ..transport.baton import Baton
from ..transport.mesh import Mesh
from ..transport.overlap import CommunicationLane
from ..watch.halt import VALIDATION
from .batches import Batches
from .executors import Executors, own_schedule
from .gradient_sums import GradientSums
from .graphed import check_graphs
from .held_parts import held_by, send_masters
from .joined import Joined
from .layer_graphs import LayerGraphs, StageParts
from .live_memory import LiveMeter
from .observation import Observation
from .orthogonalised import open_muon
from .totals import Totals

NUM_TOTALS = 4
"""Loss, norm, what routers add to the loss, and multi-token prediction's loss."""


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
        joined: Joined | None = None,
    ):
        """`numerics` replaces the plan's own: that is where a verifier puts a fault. `joined` ties the plan's
        model to other modules."""
        self._run, self._joined = plan, joined
        # that of the steps which go on: of the largest batch until one begins
        self.plan = plan = plan.of_size(max(sizes_of(plan.batch)))
        self.transport = transport
        graphed = check_graphs(plan, transport)
        later = ShownLater(observer) if graphed and observer is not None else None
        self.observer = observer = observer if later is None else later
        dp_rank = plan.layout.coordinates(transport.global_rank)["dp"]
        schedule = own_schedule(plan, dp_rank)
        self.baton = baton = Baton() if plan.runtime.ep_comm_overlap else None
        self.mesh = Mesh(transport, plan.layout, schedule, experts=plan.model.is_moe, baton=baton)
        self.numerics = (
            make_numerics(plan, transport.device, global_rank=transport.global_rank) if numerics is None else numerics
        )
        self.copies = HostCopies(transport.device) if plan.offload.is_used else None
        self.stages = {
            stage: Stage(
                plan,
                plan.stages[stage],
                tp=self.mesh.tp,
                cp=self.mesh.cp,
                cp_levels=self.mesh.cp_levels,
                numerics=self.numerics,
                recorder=transport.recorder,
                block=model,
                experts=ExpertGroups(self.mesh.etp, self.mesh.ep) if plan.model.is_moe else None,
                observer=observer,
                copies=self.copies,
            )
            for stage in schedule.placement.stages_of(self.mesh.coordinates["pp"])
        }
        if plan.train.load is not None:
            load_weights(plan.model, plan.train.load, self.saved_shards)
        own_parts = plan.layout.zero > 0 and plan.data_parallel.library == "shardproof"
        self._copies = open_copies(transport, plan, self.mesh) if own_parts else {}
        overlaps, each = bool(plan.data_parallel.overlap_grad_reduce), sums_are_sharded(plan)
        self._backward_lane = CommunicationLane(transport.device, transport.recorder) if overlaps and each else None
        # with ZeRO 3 weights come before they are needed
        late = plan.data_parallel.overlap_param_gather and plan.layout.zero < 3
        self._gather_lane = CommunicationLane(transport.device, transport.recorder) if late else None
        own_lane = tuple(self.stages) if late and own_parts else ()
        self._observation = None if observer is None else Observation(observer, plan, self.stages, own_lane)
        self.data_parallel = {stage: self._data_parallel(stage) for stage in self.stages}
        if self.copies is not None and plan.offload.masters:
            send_masters(self.data_parallel, self.copies, plan.offload.optimizer)
        transport.register_rooms()
        self.sums = GradientSums(plan, transport, self.mesh, self.stages, self.data_parallel, self.numerics)
        held = held_by(plan, self.mesh, self.data_parallel)
        self.optimizer = ShardedOptimizer(
            held,
            plan.optimizer,
            plan.rates.learning_rate(0),
            copies=self.copies,
            offloaded=plan.offload.optimizer,
            muon=open_muon(transport, plan, self.mesh, self.numerics, held),
        )
        self.batches = Batches(self._run, self.mesh, transport)
        self.batches.begin_batches_of(plan)
        modules = None if joined is None else joined.world
        self.totals = Totals(
            plan, self.mesh, self.numerics, list(self.stages.values()), transport.recorder, modules=modules
        )
        self.clock = Clock(transport.device)
        warmup_steps = plan.runtime.cuda_graph_warmup_steps
        by_layer = graphed and plan.runtime.cuda_graph_scope == "layer"
        self.graphs = (
            StepGraphs(
                transport.device,
                warmup_steps,
                state=self.sums.state,
                recorder=transport.recorder,
                observer=later,
            )
            if graphed and not by_layer
            else None
        )
        self.layer_graphs = LayerGraphs(transport.device, warmup_steps, observer=later) if by_layer else None
        transport.before_end += [each.close for each in (self.graphs, self.layer_graphs) if each is not None]
        self._executors = Executors(
            transport,
            plan,
            schedule,
            self.mesh,
            self.stages,
            observed(self.data_parallel, self.stages, observer if own_parts else None),
            baton=baton,
            graphs=self.graphs,
            joined=joined,
        )
        self.executor = self._executors.of(plan)
        self._graphed_size = plan.batch.global_size
        self._parts: dict[int, StageParts] = {}
        if self.layer_graphs is not None:
            self._capture_layers(self.layer_graphs)
        self.loss_scale = LossScale.of(plan.precision)
        self.skips_not_finite = False
        """Whether a step whose numbers are not finite is skipped in any format: a proof shows what came
        before, and names the first."""
        # Reduces whole buckets during the last backward; None where that is done after every microbatch, or not at all.
        self._early = (
            EarlyReduction({stage: module.gradients for stage, module in self.stages.items()}, transport.device)
            if overlaps and not each
            else None
        )
        self.asks: Callable[[], Tensor] | None = None
        """Makes further numbers on the device, fp64 [n], in STEP: the host reads them with those of the step, and has
        them in `answers` afterwards."""
        self.answers: list[float] = []

    def _capture_layers(self, graphs: LayerGraphs) -> None:
        for stage, slots in slots_of(self.executor.row).items():
            context = self.stages[stage].context
            context.parts = self._parts[stage] = StageParts(graphs, context, slots)
        sharded = {stage: own for stage, own in self.data_parallel.items() if isinstance(own, ShardedStage)}
        if self.plan.layout.zero == 3:
            others = [self._executors.of(self._run.of_size(size)) for size in sizes_of(self._run.batch)]
            gather_in_place(sharded, places_of(*(row for each in others for row in (each.row, each.forward_row))))
            self.transport.watch.walks(self.executor.row)

    def _walk(self, name: str, step: int | None = None, *, replayed: bool = True) -> AbstractContextManager[None]:
        """Around what a rank does with its row, but for STEP of it in training."""
        return nullcontext() if self.layer_graphs is None else self.layer_graphs.walk(name, step, replayed=replayed)

    def step(self, step: int, *, meter: MemoryMeter | None = None) -> tuple[StepResult, list[Span]]:
        """One optimizer step on the global batch `step`, and the spans of this rank.

        Raises `DivergedError` when the loss or the gradient norm is not finite; the weights are
        then those before the step.
        """
        self.begin_batches_of(step)
        if self.observer is not None:
            self.observer.begin_step(step)
        self.transport.watch.phase = f"step {step + 1}"
        start_s, scale = perf_counter(), self.loss_scale.value
        numbers: list[float] = []
        measuring = meter.watch() if meter is not None else nullcontext()
        # who measures the memory of a step sees every operation of it: it is not replayed
        with measuring, self._walk("training", step, replayed=meter is None):
            trace = self.executor.train(
                self.batches.training(step, scale),
                reduce_gradients=self.sums.reduce,
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
            learning_rate=self.optimizer.learning_rate,
            num_microbatches=self.plan.num_microbatches,
        )
        return result, trace.spans

    def evaluate(self) -> float:
        """Mean loss per token of the first held-out global batch, by the forwards of the same pipeline."""
        self.begin_batches_of(None)
        trace = self.forwards(self.batches.validation())
        loss = float(self.totals.mean_loss(trace.token_losses, self.batches.num_counted))
        if not math.isfinite(loss) and not self.skips_not_finite:
            raise DivergedError(
                f"the validation loss is {loss}, which is no finite number. Lower "
                f"train.learning_rate={self.plan.train.learning_rate}."
            )
        if self.observer is not None:
            self.observer.scalar("validation_loss", loss)
        return loss

    def begin_batches_of(self, step: int | None) -> None:
        """From here on global batches have the size of those of a step, or of held-out data (None): what depends on it
        is made anew, and nothing else."""
        run = self._run
        plan = run.of_size(run.batch.global_size) if step is None else run.of_step(step)
        if step is not None and self.graphs is not None and plan.batch.global_size != self._graphed_size:
            self.graphs.forget("training")  # equally many microbatches here may be other samples of the batch
            self._graphed_size = plan.batch.global_size
        if plan.batch.global_size == self.plan.batch.global_size:
            return
        self.plan = plan
        num_microbatches = plan.microbatches_of(self.mesh.coordinates["dp"])
        self.batches.begin_batches_of(plan)
        self.totals.begin_batches_of(plan)
        self.sums.begin_batches_of(plan)
        for stage, module in self.stages.items():
            module.begin_batches_of(plan)
            self.data_parallel[stage].begin_batches_of(num_microbatches)
        if self._joined is not None:
            self._joined.begin_batches_of(plan.batch.global_size)
        self.executor = self._executors.of(plan)
        if self.layer_graphs is not None:
            for stage, slots in slots_of(self.executor.row).items():
                self._parts[stage].begin_slots(slots)
        self.transport.watch.walks(self.executor.row)

    def forwards(self, batch: Sequence[Microbatch]) -> Trace:
        """What the forwards of the pipeline make of a batch, without gradients."""
        self.transport.watch.phase = VALIDATION
        with self._evaluating(), self._walk("validation"):
            return self.executor.evaluate(batch, clock=self.clock)

    @property
    def head(self) -> Head | None:
        """The head, on ranks that have the last stage."""
        return next((stage.head for stage in self.stages.values() if stage.head is not None), None)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Inside, the stages are in `eval()` mode: no dropout of a user's own block, and losses
        as they are compared."""
        for stage in self.stages.values():
            stage.eval()
        try:
            yield
        finally:
            for stage in self.stages.values():
                stage.train()

    def live_meter(self) -> LiveMeter:
        """A meter for `step` that counts every tensor storage of this rank while it lives; it costs some
        microseconds an operation."""
        elsewhere = () if self.copies is None else (self.copies.owns,)
        meter = LiveMeter(self.transport.global_rank, *elsewhere)
        meter.hold(self._weights)
        meter.hold(self.optimizer.state_tensors)
        return meter

    def meter(self) -> ActivationMeter:
        """A meter for `step` that counts weights and optimizer state as always there, and weights that are gathered and
        sums of gradients as they come and go, finished ones until STEP."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in self._weights}
        base_bytes = sum(storages.values()) + self.optimizer.state_bytes
        constants = [tensor for stage in self.stages.values() for tensor in stage.context.constants]
        return ActivationMeter(
            self.transport.global_rank, [*self._weights, *constants], base_bytes, self._lasting_bytes
        )

    @property
    def shards(self) -> list[Shard]:
        """This rank's parts of the parameters of all its stages."""
        return [shard for stage in self.stages.values() for shard in stage.shards.values()]

    @property
    def saved_shards(self) -> list[Shard]:
        """What this rank has of a saved model: `shards`, and the biases of experts, which training changes without a
        gradient and every rank holds whole."""
        known = {parameter.name: parameter for parameter in expert_biases(self.plan.model)}
        whole = (slice(0, self.plan.model.num_experts),)
        routers = [router for stage in self.stages.values() for router in stage.routers]
        biases = [(router.bias_name, router.expert_bias) for router in routers if router.expert_bias is not None]
        return self.shards + [Shard(known[name], whole, bias, bias) for name, bias in biases]

    def refresh(self) -> None:
        """Brings the weights, after they have changed, into what layers compute with; with ZeRO, those
        of all copies together."""
        for each in self.data_parallel.values():
            each.round_masters()
        self._share()

    def _share(self) -> None:
        """`refresh`, of weights that the optimizer has rounded where they rest in host memory."""
        if self._observation is not None:
            self._observation.coming()
        for each in self.data_parallel.values():
            each.share()
        for stage in self.stages.values():
            for name in stage.shards.keys() - stage.trained.keys():
                stage.shards[name].refresh()

    def settle(self) -> None:
        """Returns when weights that are gathered during the next forward are there, and shows them to the observer."""
        for each in self.data_parallel.values():
            each.settle()
        if self._observation is not None:
            self._observation.settled()

    @contextmanager
    def whole_masters(self) -> Iterator[None]:
        """Inside, `saved_shards` have their fp32 weights on the device, which ZeRO spreads over the copies of a stage.
        All ranks come together."""
        self.optimizer.settle()
        with ExitStack() as stack:
            for each in self.data_parallel.values():
                stack.enter_context(each.whole_masters())
            yield

    @property
    def _weights(self) -> list[Tensor]:
        """The fp32 weights, the copies that layers compute with, and the parts of both that ZeRO leaves this rank;
        those on the device."""
        whole = [tensor for shard in self.shards for tensor in (shard.storage, shard.operand)]
        parts = [part for one in self.optimizer.held for part in (one.tensor, one.rounded) if part is not None]
        return [each for each in whole + parts if self.copies is None or not self.copies.owns(each.untyped_storage())]

    def _lasting_bytes(self) -> int:
        gathered = sum(own.gathered_bytes for own in self.data_parallel.values())
        return gathered + self.sums.num_bytes + sum(stage.gradients.num_bytes for stage in self.stages.values())

    def _data_parallel(self, stage: int) -> DataParallel:
        module, copies = self.stages[stage], self.mesh.copies(stage)
        if self.plan.data_parallel.library == "torch":
            # a second of torch's modules that others need not wait for
            from ..data_parallel.torch_fsdp import TorchShardedStage

            return TorchShardedStage(
                self.plan, module, self.transport, copies, self.plan.microbatches_of(self.mesh.coordinates["dp"])
            )
        if not self.plan.layout.zero:
            experts = self.mesh.expert_copies(stage) if self.plan.model.is_moe else None
            return ReplicatedStage.of(self.plan, stage, module.trained, module.gradients, copies, experts)
        used = None if self._observation is None else functools.partial(self._observation.used, stage)
        late = None if self._gather_lane is None else LateGather(module.context, self._gather_lane, used)
        held = module.trained, module.gradients
        return ShardedStage(
            self.plan, stage, *held, self._copies[stage], numerics=self.numerics, lane=self._backward_lane, late=late
        )

    def _optimizer_step(self, step: int, token_losses: Mapping[int, Tensor]) -> tuple[float, float, float, float]:
        """STEP: the loss and the gradient norm of the global batch, what routers add to the loss, and the update. The
        host reads these numbers once the update is given to the device: that is the device's to leave out."""
        num_counted = self.batches.num_counted
        divisor = num_counted * self.loss_scale.value
        gradients, share = self.sums.finished(), 1 / divisor
        # fast numerics divide where they clip; by a power of two that rounds nothing, so exact ones do too
        if self.numerics.mode == "exact" and math.frexp(divisor)[0] != 0.5:
            gradients, share = [gradient.div_(divisor) for gradient in gradients], 1.0
        norm = self.totals.norm(self.optimizer.held, gradients) * share
        loss = self.totals.mean_loss(token_losses, num_counted)
        totals = torch.stack([loss, norm, self.totals.mean_aux_loss(), self.totals.mean_mtp_loss(num_counted)])
        if self.asks is not None:
            totals = torch.cat([totals, self.asks()])
        skip = ~norm.isfinite() if self.skips_not_finite else ~(norm.isfinite() & loss.isfinite())
        observed = self._observation
        if observed is not None:
            numbers = self._read(step, totals, gradients)
            observed.computed(self.optimizer, gradients, share, numbers, skipped=self._is_borne(numbers))
        rates = self._run.rates
        self.optimizer.learning_rate, self.optimizer.weight_decay = rates.learning_rate(step), rates.weight_decay(step)
        self.optimizer.step(gradients, share * clip_coefficient(norm, self.plan.optimizer.clip_grad_norm), skip)
        updated = observed is not None and math.isfinite(numbers[1])
        if observed is not None:
            observed.changed(step, self.optimizer, updated=updated)
        self._share()
        rate = torch.full_like(norm, self.plan.train.expert_bias_rate, dtype=torch.float32).masked_fill(skip, 0.0)
        for router in self._routers:
            router.update_bias(rate)
        if observed is not None:
            observed.refreshed(self.optimizer, numbers, updated=updated)
        loss_value, norm_value, aux_loss, mtp_loss = self._read(step, totals, gradients)
        self.sums.end_step()
        self.loss_scale = self.loss_scale.after(overflow=not math.isfinite(norm_value))
        return loss_value, norm_value, aux_loss, mtp_loss

    def _read(self, step: int, totals: Tensor, gradients: Sequence[Tensor]) -> Sequence[float]:
        """Loss, norm, and what is added to the loss, which the host waits for, and with them for `answers`. Raises
        `DivergedError`."""
        read = totals.tolist()
        loss, norm, *_ = numbers = read[:NUM_TOTALS]
        self.answers = read[NUM_TOTALS:]
        if not ((math.isfinite(loss) and math.isfinite(norm)) or self._is_borne(numbers) or self.skips_not_finite):
            raise DivergedError(self._diverged(step, loss, norm, gradients))
        return numbers

    def _is_borne(self, numbers: Sequence[float]) -> bool:
        """Whether the loss scale bears it, on all ranks: what is no number has no bits to compare."""
        loss, norm, *_ = numbers
        return math.isfinite(loss) and not math.isfinite(norm) and self.loss_scale.bears_overflow

    def _diverged(self, step: int, loss: float, norm: float, gradients: Sequence[Tensor]) -> str:
        """What is said when a loss or a gradient is not finite, the same on all ranks, which come here together."""
        named = self.sums.first_not_finite(gradients) if math.isfinite(loss) else ""
        scale = f" with losses scaled by {self.loss_scale.value:g}" if self.loss_scale.value != 1.0 else ""
        return (
            f"step {step}: the loss is {loss} and the gradient norm {norm}{scale}, which are no finite numbers. "
            f"{named}{' ' * bool(named)}"
            f"Lower train.learning_rate={self.plan.train.learning_rate} or set optimizer.clip_grad_norm."
        )

    @property
    def _routers(self) -> list[Router]:
        return [router for stage in self.stages.values() for router in stage.routers]

    def show_state(self, step: int) -> None:
        """Shows the observer, if there is one, the weights that training goes on from, and the moments if there are
        any, as those that `step` left; of a new start that is step -1."""
        if self._observation is not None:
            self._observation.state(step, self.optimizer)
