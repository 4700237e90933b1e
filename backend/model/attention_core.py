"""The core of attention: softmax(q k^T) v over the sequence, under context parallelism too, with
packed documents, windows, ALiBi, dropout, capped scores and sinks.

One causal call of the library does it where a rank has whole sequences of a single block. Else queries are worked on in
blocks: of `gradient_token_block` tokens in exact numerics, whole chunks of this rank in fast ones. A block meets the
keys up to its own end, with a mask. The gradients of keys and values are sums over blocks: in exact numerics the
canonical tree over all blocks of the sequence, in which a block has nothing for keys behind its end. Context-parallel
ranks bring keys and values together for the forward and again for the backward, and each gets the gradients of its own.
A ring (Liu et al. 2023, Ring Attention, arXiv 2310.01889) is another way to send the same keys and values; what
is computed with them stays the same. Neighbours (`layout.cp_inner`) exchange heads for tokens before and back after
all this (`attention_exchange`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.layout.chunks import Chunks
from ...core.model.attention_kinds import layer_window, shorter_window
from ..base.autograd import Function
from ..base.microbatch import Microbatch
from ..tensor_parallel import LayerContext
from .alibi import PenalisedKernel, own_slopes
from .attention_blocks import Block, FusedKernel, Kernel, PaddedKernel, RepeatedKernel
from .attention_exchange import KeySums, gathered, heads_for_tokens, in_order, scattered, tokens_for_heads
from .written_attention import WrittenKernel


class AttentionCore(nn.Module):
    """q [b, heads, s, d], k [b, groups, s, d] and v [b, groups, s, w] -> [b, heads, s, w]; all contiguous, of the
    tokens that this context-parallel rank has. A group of neighbouring query heads shares a key and a value head.

    A query sees the keys up to its own, as far as they belong to its document and lie in the layer's window. Where the
    model has sinks queries have a feature more, the score of theirs. `scale` is 1/sqrt(d) unless given.
    """

    def __init__(self, context: LayerContext, name: str, layer: int, *, scale: float | None = None):
        super().__init__()
        self.name = name
        self.context = context
        self.scale = scale
        self.exact = context.numerics.mode == "exact"
        self.window = shorter_window(layer_window(context.model, layer), context.chunks.num_items)
        self.slopes = own_slopes(context)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        microbatch = self.context.running_microbatch
        if self.context.cp_inner.size == 1:
            return self._attended(q, k, v, microbatch)
        microbatch = replace(microbatch, documents=self._neighbours_documents(microbatch))
        q, k, v = _TokensForHeads.apply(self, q, k, v)
        return _HeadsForTokens.apply(self, self._attended(q, k, v, microbatch))

    def _neighbours_documents(self, microbatch: Microbatch) -> Tensor | None:
        """Where the documents begin that the tokens of all neighbours belong to."""
        if microbatch.documents is None:
            return None
        with self.context.recorder.layer(self.name):
            return in_order(self.context.cp_inner.all_gather(microbatch.documents), 1)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, microbatch: Microbatch) -> Tensor:
        (samples, heads, own), d, width = q.shape[:3], k.shape[-1], v.shape[-1]
        keys = self.context.query_chunks_of(microbatch).num_items
        with self.context.recorder.layer(self.name):
            self.context.recorder.product(own, keys, d, samples * heads)
            self.context.recorder.product(own, width, keys, samples * heads)
        kernel = self._kernel(q, v, microbatch)
        if kernel is not None:
            return _Blockwise.apply(q, k, v, self, kernel, microbatch)
        if (times := heads // k.shape[1]) > 1:
            k, v = _RepeatHeads.apply(k, times), _RepeatHeads.apply(v, times)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return _RecordBackward.apply(y, self, d) if self.exact or self.context.recorder.enabled else y

    def _kernel(self, q: Tensor, v: Tensor, microbatch: Microbatch) -> Kernel | None:
        """What computes a block; None where one causal call of the library does it all."""
        context = self.context
        if self._is_written_out(microbatch):
            return WrittenKernel(context, self.name, microbatch, self.scale, self.slopes)
        kernel = self._library_kernel(q, v, microbatch)
        return PenalisedKernel(kernel, self.slopes) if kernel is not None and self.slopes else kernel

    def _library_kernel(self, q: Tensor, v: Tensor, microbatch: Microbatch) -> Kernel | None:
        same_width = q.shape[-1] == v.shape[-1]
        if self.is_one_call(microbatch) and (same_width or not self.exact):
            return None
        if q.device.type != "cpu":
            return RepeatedKernel(self.scale)
        # for values as wide as keys the library works per sample and head, for others it
        # multiplies all of them together
        return FusedKernel(self.scale) if same_width else PaddedKernel(self.scale or 1 / math.sqrt(q.shape[-1]))

    def _is_written_out(self, microbatch: Microbatch) -> bool:
        """Whether the library's kernels do not compute it."""
        model = self.context.model
        drops = model.attention_dropout > 0 and microbatch.step is not None
        return drops or model.attention_softcap > 0 or model.attention_sinks

    def is_one_call(self, microbatch: Microbatch) -> bool:
        """Whether all queries are one block without a mask of its own; what the library computes is then left to it."""
        return microbatch.documents is None and not self.window and not self.slopes and self._is_one_block

    @cached_property
    def _is_one_block(self) -> bool:
        return len(list(self.blocks(self.context.query_chunks))) == 1

    @property
    def takes_strides(self) -> bool:
        """Whether the heads of a token of the running microbatch may lie one after the other: where the library
        does all of it, fast."""
        microbatch = self.context.running_microbatch
        return not self.exact and not self._is_written_out(microbatch) and self.is_one_call(microbatch)

    def block_size(self, chunks: Chunks) -> int:
        """Tokens of a block."""
        return min(self.context.plan.leaf_sizes.gradient_token_block, chunks.num_items) if self.exact else chunks.size

    def blocks(self, chunks: Chunks) -> Iterator[Block]:
        """This rank's blocks of queries, in the order of the sequence."""
        size = self.block_size(chunks)
        for lo, hi in chunks.spans:
            for start in range(lo, hi, size):
                yield Block(start // size, chunks.local(start), min(size, hi - start), start)

    def record_backward(self, dy: Tensor, d: int, keys: int) -> None:
        """The gradients of scores, of values, of queries and of keys; `dy` is [b, heads, s, w]."""
        samples, heads, own, width = dy.shape
        count, recorder = samples * heads, self.context.recorder
        with recorder.layer(self.name):
            recorder.product(own, keys, width, count)
            if d == width:
                recorder.product(own, d, keys, 3 * count)
            else:
                recorder.product(own, width, keys, count)
                recorder.product(own, d, keys, 2 * count)


class _TokensForHeads(Function):
    """Queries, keys and values of all neighbours' tokens for a part of the heads; the backward sends their gradients
    back."""

    @staticmethod
    def forward(ctx: Any, core: AttentionCore, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.core = core
        with core.context.recorder.layer(core.name):
            return tuple(tokens_for_heads(core.context.cp_inner, parts))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.core.context.recorder.layer(ctx.core.name):
            return None, *heads_for_tokens(ctx.core.context.cp_inner, gradients)


class _HeadsForTokens(Function):
    """The result of this rank's tokens for all heads; the backward exchanges its gradient for that of a part of the
    heads."""

    @staticmethod
    def forward(ctx: Any, core: AttentionCore, y: Tensor) -> Tensor:
        ctx.core = core
        with core.context.recorder.layer(core.name):
            return heads_for_tokens(core.context.cp_inner, [y])[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        with ctx.core.context.recorder.layer(ctx.core.name):
            return None, tokens_for_heads(ctx.core.context.cp_inner, [dy])[0]


class _Blockwise(Function):
    """Block by block; in exact numerics in fp32, rounded once. Keys and values of other ranks are not
    kept for the backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, core: AttentionCore, kernel: Kernel, microbatch: Microbatch
    ) -> Tensor:
        ctx.of = core, kernel, microbatch
        dtype = torch.float32 if core.exact else q.dtype
        keys, values = _keys_and_values(core, q, k, v, dtype)
        y = q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype)
        saved: list[Tensor] = []
        for block in core.blocks(core.context.query_chunks_of(microbatch)):
            mask = block.mask(microbatch.documents, dtype, q.device, window=core.window)
            part, for_backward = kernel.forward(
                block.of(q, dtype), keys[:, :, : block.end], values[:, :, : block.end], mask, block.start
            )
            y[:, :, block.rows] = part
            saved += for_backward
        ctx.save_for_backward(q, k, v, y, *saved)
        return y.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, y, *saved), (core, kernel, microbatch) = ctx.saved_tensors, ctx.of
        chunks = core.context.query_chunks_of(microbatch)
        core.record_backward(dy, k.shape[3], chunks.num_items)
        keys, values = _keys_and_values(core, q, k, v, y.dtype)
        dq, sums, blocks = torch.empty_like(q), KeySums(chunks, core.block_size(chunks)), list(core.blocks(chunks))
        per_block = len(saved) // len(blocks)
        for number, block in enumerate(blocks):
            mask = block.mask(microbatch.documents, y.dtype, q.device, window=core.window)
            for_backward = saved[number * per_block : (number + 1) * per_block]
            inputs = block.of(q, y.dtype), keys[:, :, : block.end], values[:, :, : block.end]
            dq_part, *others = kernel.backward(
                block.of(dy, y.dtype),
                *inputs,
                mask,
                y=block.of(y, y.dtype),
                for_backward=for_backward,
                start=block.start,
            )
            dq[:, :, block.rows] = dq_part
            sums.add(block.index, torch.cat([_sum_of_heads(part, k.shape[1]) for part in others], -1))
        with core.context.recorder.layer(core.name):
            dk, dv = scattered(core.context, sums, q.dtype).split([k.shape[3], v.shape[3]], -1)
        return dq, dk.contiguous(), dv.contiguous(), None, None, None


def _keys_and_values(core: AttentionCore, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Keys and values of the whole sequence, one head for each head of `q`."""
    with core.context.recorder.layer(core.name):
        whole = gathered(core.context, (k, v))
    times = q.shape[1] // k.shape[1]
    return [part.to(dtype) if times == 1 else part.to(dtype).repeat_interleave(times, dim=1) for part in whole]


def _sum_of_heads(x: Tensor, groups: int) -> Tensor:
    """[b, heads, s, d] -> [b, groups, s, d] fp32: the heads of a group added in their order."""
    first, *rest = x.unflatten(1, (groups, -1)).unbind(2)
    total = first.to(torch.float32, copy=bool(rest))
    for head in rest:
        total.add_(head)
    return total


class _RecordBackward(Function):
    """The identity; its backward records the products of the attention's backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, core: AttentionCore, d: int) -> Tensor:
        ctx.of = core, d
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        core, d = ctx.of
        core.record_backward(dy, d, dy.shape[2])
        return dy.contiguous(), None, None


class _RepeatHeads(Function):
    """[b, groups, s, d] -> [b, groups * times, s, d]; the backward adds a group's query heads in their order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int) -> Tensor:
        ctx.groups = x.shape[1]
        return x.repeat_interleave(times, dim=1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _sum_of_heads(dy, ctx.groups).to(dy.dtype), None
