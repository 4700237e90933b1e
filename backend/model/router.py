"""`Router`: which experts each token goes to, and with what weights. Everything here is fp32 and per token,
so no cut changes a bit.

Scores are a softmax over the experts (Shazeer et al. 2017; Fedus et al. 2022, Switch Transformers) or a sigmoid of
each (DeepSeek-V3, arXiv 2412.19437, equation 15). What needs more than one token (capacity, auxiliary loss, the
bias of experts) is defined per sequence, or per step from integer counts, so that it is the same however sequences
lie on ranks and in microbatches.

Shape suffixes: B samples, S tokens that this rank holds, H hidden, E experts, K experts of a
token, G groups of experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.model.blocks import layer_prefix
from ...core.model.model import ModelSpec
from ...core.model.parameters import expert_bias_name
from ..base.microbatch import Microbatch
from ..base.streams import used_here
from ..numerics import Numerics
from ..numerics.base import Scalar
from ..numerics.dropout import uniform
from ..numerics.tree import fold
from ..tensor_parallel import LayerContext
from ..tensor_parallel.whole_linear import WholeLinear
from ..transport.base import Group

DROPPED = -1
"""The expert of a choice that found no room."""

SMALLEST_SUM = 1e-20
"""Added to the sum that weights are divided by, as DeepSeek-V3 does: all chosen sigmoids may be zero."""


@dataclass(frozen=True)
class Routing:
    """Where the tokens [b, s] that a rank holds go. `experts_BSK` is int64, ascending for each token, `DROPPED` where
    an expert had no room; `weights_BSK` is fp32, zero there, and differentiable.

    Ranks that hold the same tokens have the same routing, and each must be given the whole gradient of the weights.
    """

    experts_BSK: Tensor
    weights_BSK: Tensor


class Router(nn.Module):
    """Normed hidden states [b, s, h] of this rank's tokens -> `Routing`.

    While training it keeps, per microbatch, how many tokens chose each expert and what the router adds to the loss; a
    forward that recomputation repeats finds the same and changes nothing. `take_losses` and `reduce_counts` empty these
    books. Noise and losses belong to training alone, capacity to the model.
    """

    expert_bias: Tensor | None

    def __init__(self, context: LayerContext, layer: int):
        super().__init__()
        model, train = context.model, context.plan.train
        self.name = f"{layer_prefix(layer)}.mlp.router"
        self.context = context
        self.model = model
        self.scores = WholeLinear(context, self.name, fp32=True)
        zeros = torch.zeros(model.num_experts, device=context.numerics.device) if model.expert_bias else None
        self.register_buffer("expert_bias", zeros)
        self.adds_losses = train.adds_router_losses
        self.jitter = train.router_jitter
        self.counts: dict[int, Tensor] = {}
        self.losses: dict[int, Scalar] = {}
        self.step_counts: Tensor | None = None
        # logits [b, s, E] of others that decide in the place of its own
        self.chooses_by: Callable[[Microbatch], Tensor] | None = None
        self.bias_name = expert_bias_name(layer)

    def forward(self, x_BSH: Tensor) -> Routing:
        microbatch = self.context.microbatch
        assert microbatch is not None
        training = microbatch.step is not None
        if training and self.jitter:
            x_BSH = self._jittered(x_BSH, microbatch)
        logits_BSE = self.scores(x_BSH)
        self.context.observe(self.name, logits_BSE)
        scores_BSE, log_sum_BS = _scores(logits_BSE, self.model, self.context.numerics)
        deciding_BSE = scores_BSE.detach()
        if self.chooses_by is not None:
            deciding_BSE, _ = _scores(self.chooses_by(microbatch), self.model, self.context.numerics)
        experts_BSK = choose(deciding_BSE, self.model, self.expert_bias)
        weights_BSK = _weights(scores_BSE, experts_BSK, self.model)
        with self.context.recorder.layer(self.name):
            if training and self.expert_bias is not None:
                chosen, counts = experts_BSK.flatten(), experts_BSK.new_zeros(self.model.num_experts)
                self.counts[microbatch.index] = counts.index_add_(0, chosen, torch.ones_like(chosen))
            if training and self.adds_losses:
                losses_BS = self._losses(scores_BSE, log_sum_BS, deciding_BSE)
                self.losses[microbatch.index] = self.context.numerics.sum([losses_BS])
                weights_BSK = _WithLosses.apply(
                    weights_BSK, losses_BS, microbatch.counted_share * microbatch.loss_scale
                )
            if self.model.expert_capacity_factor is not None:
                chosen_BSK = self._within_capacity(experts_BSK, _weights(deciding_BSE, experts_BSK, self.model))
                experts_BSK, weights_BSK = (
                    experts_BSK.masked_fill(~chosen_BSK, DROPPED),
                    weights_BSK.masked_fill(~chosen_BSK, 0.0),
                )
        return Routing(experts_BSK, weights_BSK)

    def take_losses(self) -> list[Scalar]:
        """What the router added to the loss of each microbatch of the step, summed over this rank's
        tokens; they are forgotten."""
        losses, self.losses = list(self.losses.values()), {}
        return losses

    def take_counts(self) -> Tensor:
        """int64 [experts]: how many of this rank's tokens of the step chose each, whether it had room or
        not; they are forgotten."""
        counts, self.counts = list(self.counts.values()), {}
        used_here(counts)
        return torch.stack(counts).sum(0)

    def update_bias(self, rate: Tensor) -> None:
        """Aux-loss-free balancing (Wang et al. 2024, arXiv 2408.15664, algorithm 1): `rate`, fp32 [], more for an
        expert that had less than the mean of `step_counts`, `rate` less for one that had more. Counts are integers, so
        this has no rounding to differ in."""
        if self.expert_bias is None:
            return
        assert self.step_counts is not None
        used_here([self.step_counts])
        missing = self.step_counts.sum() - self.step_counts * len(self.step_counts)
        self.expert_bias += torch.sign(missing).to(torch.float32) * rate
        self.step_counts = None

    def _jittered(self, x_BSH: Tensor, microbatch: Microbatch) -> Tensor:
        """The input with every element scaled by 1 - jitter to 1 + jitter (Fedus et al. 2022, section 2.4);
        made again, not kept."""
        context, shape, places_S = self.context, x_BSH.shape, self.context.own_places()

        def noise() -> Tensor:
            assert microbatch.step is not None
            sample, feature = (torch.arange(size, device=places_S.device) for size in (shape[0], shape[2]))
            rows = (microbatch.first_sample + sample[:, None]) * context.plan.batch.sequence + places_S
            seed, operation = context.plan.train.seed, context.plan.name_in_run(self.name)
            drawn = uniform(seed, operation, microbatch.step, rows[..., None] * shape[2] + feature)
            return drawn.mul_(2).sub_(1).mul_(self.jitter).add_(1)

        source = context.source_of(x_BSH) or _source(x_BSH.detach())
        return context.can_repeat(_Scaled.apply(x_BSH, noise), lambda: source().float() * noise(), f"{self.name}.input")

    def _losses(self, scores_BSE: Tensor, log_sum_BS: Tensor, deciding_BSE: Tensor) -> Tensor:
        """[b, s]: each token's part of what this router adds to the loss; the mean over all tokens is added. Experts
        are chosen by the scores `deciding_BSE`.

        Auxiliary loss: sum over experts of f_e p_e, with p the mean of a sequence's scores (of a sigmoid's divided by
        their sum), and f the share of its tokens' choices that scores alone would give the expert, over an even share
        (DeepSeek-V3, equations 17-20; for a softmax it is that of Switch Transformers, equation 4). z-loss: the mean of
        (log sum exp logits)^2 (Zoph et al. 2022, ST-MoE, equation 5).
        """
        train = self.context.plan.train
        aux, z = train.router_aux_loss, train.router_z_loss
        losses_BS = log_sum_BS.square() * z
        if aux:
            model = self.model
            plain = choose(deciding_BSE, model, None, grouped=False)
            counts_BE = self._over_ranks(_counts(plain, model.num_experts))
            even = self.context.plan.batch.sequence * model.experts_per_token / model.num_experts
            shares_BSE = scores_BSE if model.router_scores == "softmax" else _Shares.apply(scores_BSE)
            losses_BS = losses_BS + _Sum.apply(shares_BSE * (counts_BE * (aux / even)).unsqueeze(1))
        return losses_BS

    def _within_capacity(self, experts_BSK: Tensor, weights_BSK: Tensor) -> Tensor:
        """Which choices have room, [b, s, K]: for every expert and sequence those with the largest weights, of
        equal ones the earliest."""
        model, sequence, factor = self.model, self.context.plan.batch.sequence, self.model.expert_capacity_factor
        assert factor is not None
        room = min(sequence, math.ceil(sequence * model.experts_per_token / model.num_experts * factor))
        places_S = self.context.own_places()
        samples = len(experts_BSK)
        own = torch.cat(
            [experts_BSK.int(), weights_BSK.view(torch.int32), places_S.int().expand(samples, -1).unsqueeze(-1)], -1
        )
        width = model.experts_per_token
        experts, weights, places = self._whole_sequences(own).split([width, width, 1], -1)
        order = places.argsort(1).expand(-1, -1, width)
        experts, weights = experts.gather(1, order).long(), weights.gather(1, order).contiguous().view(torch.float32)
        wanted = weights.new_full((samples, sequence, model.num_experts), -1.0).scatter_(-1, experts, weights)
        first = wanted.sort(dim=1, descending=True, stable=True).indices[:, :room]
        within = torch.zeros_like(wanted, dtype=torch.bool).scatter_(1, first, True)
        return within[:, places_S].gather(-1, experts_BSK)

    def _whole_sequences(self, x_BSN: Tensor) -> Tensor:
        """What all ranks hold of these sequences, in the order of the ranks."""
        context = self.context
        return torch.cat(context.cp.all_gather(context.gather(x_BSN)), 1)

    def _over_ranks(self, counts_BE: Tensor) -> Tensor:
        """Counts over whole sequences, from those over the tokens that each rank holds."""
        for group in [self.context.cp] if self.context.tokens is None else [self.context.tp, self.context.cp]:
            counts_BE = sum_counts(counts_BE, group)
        return counts_BE


def reduce_counts(routers: Iterable[Router], groups: Iterable[Group]) -> None:
    """Adds up the step's counts over the members of groups that saw different tokens: `step_counts` of
    every router with a bias."""
    routers = [router for router in routers if router.expert_bias is not None]
    if not routers:
        return
    counts = torch.stack([router.take_counts() for router in routers])
    for group in groups:
        counts = sum_counts(counts, group)
    for router, total in zip(routers, counts, strict=True):
        router.step_counts = total


def sum_counts(counts: Tensor, group: Group) -> Tensor:
    """The sum of integers over the members of a group."""
    return counts if group.size == 1 else torch.stack(group.all_gather(counts)).sum(0, dtype=counts.dtype)


def choose(scores_BSE: Tensor, model: ModelSpec, bias: Tensor | None, *, grouped: bool = True) -> Tensor:
    """int64 [b, s, K]: the experts with the highest scores, each with its bias, ascending; of equal
    ones the lowest are taken.

    Where the model groups them (and `grouped`), they come from the groups with the highest scores alone.
    """
    compared = scores_BSE if bias is None else scores_BSE + bias
    if grouped and model.num_router_groups:
        compared = compared.masked_fill(~_in_chosen_groups(compared, model), -math.inf)
    return _highest(compared, model.experts_per_token).sort(-1).values


def _in_chosen_groups(scores_BSE: Tensor, model: ModelSpec) -> Tensor:
    members = scores_BSE.unflatten(-1, (model.num_router_groups, -1))
    best = members.sort(-1, descending=True).values
    of_group = best[..., 0] if model.router_group_scores == "max" else best[..., 0] + best[..., 1]
    chosen = torch.zeros_like(of_group, dtype=torch.bool).scatter_(
        -1, _highest(of_group, model.router_groups_per_token), True
    )
    return chosen.unsqueeze(-1).expand_as(members).flatten(-2)


def _highest(x: Tensor, number: int) -> Tensor:
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :number]


def _scores(logits_BSE: Tensor, model: ModelSpec, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """Scores [b, s, E], and log sum exp of the logits [b, s]."""
    probabilities_BSE, log_sum_BS = _Softmax.apply(logits_BSE, numerics)
    if model.router_scores == "softmax":
        return probabilities_BSE, log_sum_BS
    return numerics.elementwise(torch.sigmoid, logits_BSE), log_sum_BS


def _weights(scores_BSE: Tensor, experts_BSK: Tensor, model: ModelSpec) -> Tensor:
    """What the results of the chosen experts are multiplied by."""
    chosen = scores_BSE.gather(-1, experts_BSK)
    return (_Shares.apply(chosen) if model.normalized_router_weights else chosen) * model.router_scaling


def _source(x: Tensor) -> Callable[[], Tensor]:
    return lambda: x


def _counts(experts_BSK: Tensor, num_experts: int) -> Tensor:
    """int32 [b, E]: how many tokens of each sequence chose an expert."""
    chosen = experts_BSK.flatten(1)
    counts = torch.zeros(len(chosen), num_experts, dtype=torch.int32, device=chosen.device)
    return counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.int32))


class _Softmax(torch.autograd.Function):
    """Softmax and log sum exp over the last dimension, whose sums are folds: bits depend on its length alone."""

    @staticmethod
    def forward(ctx: Any, logits_BSE: Tensor, numerics: Numerics) -> tuple[Tensor, Tensor]:
        maximum = logits_BSE.amax(-1, keepdim=True)
        exponentials = numerics.elementwise(torch.exp, logits_BSE - maximum)
        total = fold(exponentials, -1)
        probabilities = exponentials / total.unsqueeze(-1)
        ctx.save_for_backward(probabilities)
        return probabilities, numerics.elementwise(torch.log, total) + maximum.squeeze(-1)

    @staticmethod
    def backward(ctx: Any, dprobabilities_BSE: Tensor, dlog_sum_BS: Tensor) -> tuple[Tensor, None]:
        (probabilities,) = ctx.saved_tensors
        inner = fold(probabilities * dprobabilities_BSE, -1) - dlog_sum_BS
        return probabilities * (dprobabilities_BSE - inner.unsqueeze(-1)), None


class _Shares(torch.autograd.Function):
    """x over the sum of its last dimension."""

    @staticmethod
    def forward(ctx: Any, x_BSN: Tensor) -> Tensor:
        total = fold(x_BSN, -1).unsqueeze(-1) + SMALLEST_SUM
        shares = x_BSN / total
        ctx.save_for_backward(shares, total)
        return shares

    @staticmethod
    def backward(ctx: Any, dshares_BSN: Tensor) -> Tensor:
        shares, total = ctx.saved_tensors
        return (dshares_BSN - fold(dshares_BSN * shares, -1).unsqueeze(-1)) / total


class _Sum(torch.autograd.Function):
    """The sum over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x_BSN: Tensor) -> Tensor:
        ctx.shape = x_BSN.shape
        return fold(x_BSN, -1)

    @staticmethod
    def backward(ctx: Any, dsum_BS: Tensor) -> Tensor:
        return dsum_BS.unsqueeze(-1).expand(ctx.shape)


class _WithLosses(torch.autograd.Function):
    """The weights; the backward gives every token's losses the gradient `share` as well."""

    @staticmethod
    def forward(ctx: Any, weights_BSK: Tensor, losses_BS: Tensor, share: float) -> Tensor:
        ctx.share, ctx.like = share, losses_BS.detach()
        return weights_BSK.view_as(weights_BSK)

    @staticmethod
    def backward(ctx: Any, dweights_BSK: Tensor) -> tuple[Tensor, Tensor, None]:
        return dweights_BSK, torch.full_like(ctx.like, ctx.share), None


class _Scaled(torch.autograd.Function):
    """x in fp32 times a factor that is made again for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Callable[[], Tensor]) -> Tensor:
        ctx.factor, ctx.dtype = factor, x.dtype
        return x.float() * factor()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return (dy * ctx.factor()).to(ctx.dtype), None
