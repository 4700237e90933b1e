"""Cross-entropy over a vocabulary that is cut over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.plan.train import Train
from ..numerics import Numerics, OwnedLeaves
from ..transport.base import Group
from .context import LayerContext

IGNORE_INDEX = -100
"""The target of tokens that count for nothing, as in `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True)
class LossChoice:
    """What is minimised, per token with target t over the n ids of the vocabulary, with p =
    softmax(l) and Z = sum exp(l):

        (1 - label_smoothing) * -log p_t + label_smoothing / n * sum_v -log p_v + z_loss * (log Z)^2

    The smoothed target is torch's (`F.cross_entropy`): t has 1 - e + e/n and every other id e/n, over the *whole*
    vocabulary whatever the cut. (Megatron-Core's e gives t 1 - e and the n-1 others e/(n-1): it is (n-1)/n of ours.)
    `z_loss` keeps log Z near 0 (PaLM, arXiv 2204.02311, section 5). A token whose target is `ignore_index` has loss and
    gradient 0. The last `padding_rows` rows of the vocabulary are no ids: they get no probability, no share of the
    smoothing and no gradient.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = IGNORE_INDEX
    padding_rows: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"label_smoothing={self.label_smoothing} must be at least 0 and below 1: it is a share of the target."
            )
        if self.z_loss < 0 or self.padding_rows < 0:
            raise ValueError(f"z_loss={self.z_loss} and padding_rows={self.padding_rows} must be at least 0.")


PLAIN = LossChoice()


def ignored_target(train: Train) -> int:
    """The target of tokens that count for nothing."""
    return IGNORE_INDEX if train.ignore_token is None else train.ignore_token


class VocabParallelCrossEntropy(nn.Module):
    """Logits [b, s, v] of this rank's vocabulary and targets [b, s] -> losses [b, s] fp32, the same on every rank.

    What is minimised is the plan's choice while training; `eval()` takes label smoothing and z-loss away, so that
    held-out losses of different choices can be compared.
    """

    def __init__(self, context: LayerContext, leaves: OwnedLeaves, name: str = "head.loss"):
        super().__init__()
        self.name = name
        self.context = context
        self.leaves = leaves
        train = context.plan.train
        self.held_out = LossChoice(ignore_index=ignored_target(train), padding_rows=context.model.padding_rows)
        self.trained = replace(self.held_out, label_smoothing=train.label_smoothing, z_loss=train.z_loss)

    def forward(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        choice = self.trained if self.training else self.held_out
        with self.context.recorder.layer(self.name):
            return vocab_parallel_cross_entropy(
                logits_BSV,
                targets_BS,
                leaves=self.leaves,
                group=self.context.tp,
                numerics=self.context.numerics,
                choice=choice,
            )


def vocab_parallel_cross_entropy(
    logits_BSV: Tensor,
    targets_BS: Tensor,
    *,
    leaves: OwnedLeaves,
    group: Group,
    numerics: Numerics,
    choice: LossChoice = PLAIN,
) -> Tensor:
    """Losses [b, s] fp32, the same on every member, from each member's logits [b, s, v] in any floating
    format and all targets [b, s].

    `leaves` say which rows of the vocabulary are this member's. The gradient has the format of the logits.
    Raises `ValueError` for targets outside the vocabulary (on the CPU; on a GPU the check would wait for the device).
    """
    num_ids = leaves.leaves.num_items - choice.padding_rows
    if num_ids < 1:
        raise ValueError(
            f"padding_rows={choice.padding_rows} leave no id of a vocabulary of {leaves.leaves.num_items} rows."
        )
    if not targets_BS.is_cuda:
        _check_targets(targets_BS, num_ids, choice)
    if numerics.mode == "fast" and group.size == 1 and choice == LossChoice(ignore_index=choice.ignore_index):
        # the batch is not kept for the backward
        logits, targets = logits_BSV.float().flatten(0, 1), targets_BS.flatten().clone()
        return F.cross_entropy(logits, targets, ignore_index=choice.ignore_index, reduction="none").view(
            targets_BS.shape
        )
    return _CrossEntropy.apply(logits_BSV, targets_BS, leaves, group, numerics, choice)


class _CrossEntropy(torch.autograd.Function):
    """loss = log(sum exp(l - m)) - (l_t - m) with m the largest logit over all ranks; Z = exp(m) * sum exp(l - m)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_BSV: Tensor,
        targets_BS: Tensor,
        leaves: OwnedLeaves,
        group: Group,
        numerics: Numerics,
        choice: LossChoice,
    ) -> Tensor:
        lo, hi = leaves.items
        num_ids = leaves.leaves.num_items - choice.padding_rows
        own_ids = max(min(hi, num_ids) - lo, 0)
        ignored = targets_BS == choice.ignore_index
        elsewhere = (targets_BS < lo) | (targets_BS >= lo + own_ids) | ignored
        local_target = torch.where(elsewhere, 0, targets_BS - lo).unsqueeze(-1)
        shifted, maximum = _shifted(logits_BSV.float(), own_ids, group, numerics)
        target = shifted.gather(-1, local_target).squeeze(-1).masked_fill_(elsewhere, 0.0)
        sums = [numerics.leaf_sums(shifted, leaves)] if choice.label_smoothing else []
        shifted[..., own_ids:] = -torch.inf
        exponentials = numerics.elementwise(torch.exp_, shifted)
        *smoothed, sum_exp, target = numerics.row_sums(
            [*sums, numerics.leaf_sums(exponentials, leaves)], leaves, group, target
        )

        log_sum = numerics.elementwise(torch.log, sum_exp)
        loss = log_sum - (1 - choice.label_smoothing) * target
        for sum_shifted in smoothed:
            loss -= sum_shifted * (choice.label_smoothing / num_ids)
        log_z = log_sum + maximum
        if choice.z_loss:
            loss += log_z.square() * choice.z_loss
        saved = [exponentials, sum_exp, local_target.masked_fill_(ignored.unsqueeze(-1), -1), elsewhere]
        ctx.save_for_backward(*saved, *([log_z] if choice.z_loss else []))
        ctx.arguments = choice, own_ids, num_ids, logits_BSV.dtype
        return loss.masked_fill_(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, dloss_BS: Tensor) -> tuple[Tensor | None, ...]:
        exponentials, sum_exp, local_target, elsewhere, *log_z = ctx.saved_tensors
        choice, own_ids, num_ids, dtype = ctx.arguments
        dloss_BS = dloss_BS.masked_fill(local_target.squeeze(-1) < 0, 0.0)
        scale = dloss_BS / sum_exp
        for each in log_z:
            scale = scale * (1 + each * (2 * choice.z_loss))
        gradient = exponentials * scale.unsqueeze(-1)
        if choice.label_smoothing:
            gradient[..., :own_ids] -= (dloss_BS * (choice.label_smoothing / num_ids)).unsqueeze(-1)
        at_target = dloss_BS.masked_fill(elsewhere, 0.0) * (choice.label_smoothing - 1)
        gradient.scatter_add_(-1, local_target.clamp(min=0), at_target.unsqueeze(-1))
        return gradient.to(dtype), None, None, None, None, None


def _shifted(logits_BSV: Tensor, own_ids: int, group: Group, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """Logits minus the largest of their token over all ranks, padding rows 0; and that largest logit [b, s]."""
    shape = logits_BSV.shape[:-1]
    own = logits_BSV[..., :own_ids].amax(-1) if own_ids else logits_BSV.new_full(shape, -torch.inf)
    maximum = numerics.row_maximum(own, group)
    shifted = logits_BSV - maximum.unsqueeze(-1)
    shifted[..., own_ids:] = 0.0
    return shifted, maximum


def _check_targets(targets_BS: Tensor, num_ids: int, choice: LossChoice) -> None:
    wrong = ((targets_BS < 0) | (targets_BS >= num_ids)) & (targets_BS != choice.ignore_index)
    if wrong.is_cuda:  # the device ends there itself, and nobody waits
        torch._assert_async(~wrong.any(), f"a target is no id of a vocabulary of {num_ids}.")
    elif bool(wrong.any()):
        raise ValueError(
            f"target {int(targets_BS[wrong][0])} is no id of a vocabulary of {num_ids}. "
            f"Use 0 to {num_ids - 1}, or {choice.ignore_index} for tokens that do not count."
        )
