"""A decoder's forward of one sequence by its formulas, in fp64 and without code of the backend.

`Decoder.run` is one chain of formulas. Whoever derives from it says what the rest is made from wherever a ledger has an
activation: what was recorded there (`forward`), or what was computed (`derivative`).

Shape suffixes: S tokens of the sequence, H hidden, N heads, D features of a head, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...core.model.blocks import layer_prefix, mtp_prefix
from ...core.model.model import ModelSpec
from ...core.model.parameters import TOKEN_TABLE
from ...core.model.rotary import attention_scale, rotary_frequencies, rotary_growth
from ...core.plan.plan import Plan
from . import draws
from .formulas import (
    Array,
    expert_weights,
    gelu,
    gelu_tanh,
    library,
    log_sum,
    rounded,
    router_scores,
    same_kind,
    sigmoid,
    softmax,
)


@dataclass(frozen=True)
class Inputs:
    """What one sequence of a step is made from: `tokens` and `targets` [S]; what k modules of multi-token prediction
    predict, [S, k]; the places at which documents begin, [S], None for one document. Draws go by `step` and `sample`,
    its number in the global batch."""

    tokens: np.ndarray
    targets: np.ndarray
    later: np.ndarray | None = None
    documents: np.ndarray | None = None
    step: int = 0
    sample: int = 0

    ARRAYS: ClassVar = ("tokens", "targets", "later", "documents")


class Decoder:
    """The formulas of one sequence. `weight` gives parameters by name as products take them: rounded to their
    format."""

    def __init__(self, plan: Plan, inputs: Inputs, weight: Callable[[str], Array]):
        self.plan, self.model, self.inputs, self.weight = plan, plan.model, inputs, weight
        places = np.arange(len(inputs.tokens))
        self.positions = places if inputs.documents is None else places - inputs.documents
        given = self.model.gate_limit  # in the format of what it limits: many of these are just there
        self.gate_limit = None if given is None else rounded(np.array([given]), plan.precision.dtype).item()

    def shown(self, name: str, x: Array) -> Array:
        """What the rest is made from in the place of an activation."""
        return x

    def stored(self, x: Array) -> Array:
        """A hidden state as the backend keeps it: rounded to its format."""
        return x

    def single(self, x: Array) -> Array:
        """What the backend computes in fp32 whatever the format, rounded to that."""
        return x

    def chosen(self, layer: int, logits_SE: Array) -> Array:
        """[S, E]: which experts each token takes, and [S, E] of which of them it gets results."""
        raise NotImplementedError

    def run(self) -> list[Array]:
        """[S] each: the losses of tokens, then those of the modules of multi-token prediction."""
        x_SH = self.shown("embedding.output", self._dropped("embedding", self._embedded()))
        for layer in range(self.model.num_layers):
            x_SH = self.layer(layer, x_SH)
        return self.head(x_SH)

    def head(self, x_SH: Array) -> list[Array]:
        """The losses from what the last layer gives."""
        normed_SH = self.norm("head.norm", x_SH)
        losses_S = self.shown("head.losses", self._losses(normed_SH, self.inputs.targets))
        return [losses_S, *self._ahead(normed_SH)]

    def layer(self, layer: int, x_SH: Array) -> Array:
        """A layer from what goes into it; in a parallel block the MLP takes what attention takes. With `post_norms`
        both halves' results are normed before they are added (Gemma 2, arXiv 2408.00118, section 2), without
        `pre_norms` only these are (OLMo 2, arXiv 2501.00656, section 3.2)."""
        prefix, model = layer_prefix(layer), self.model
        attention = self._latent_attention if model.is_mla else self._attention
        taken_SH = self._normed(f"{prefix}.attention.norm", x_SH) if model.pre_norms else x_SH
        attended_SH = self.shown(f"{prefix}.attention", attention(f"{prefix}.attention", taken_SH, layer))
        x_SH = self.stored(self._added(x_SH, f"{prefix}.attention", attended_SH))
        if not model.parallel_block:
            taken_SH = self._normed(f"{prefix}.mlp.norm", x_SH) if model.pre_norms else x_SH
        y_SH = self.shown(f"{prefix}.mlp", self._mlp(f"{prefix}.mlp", taken_SH, layer))
        return self.shown(f"{prefix}.output", self._added(x_SH, f"{prefix}.mlp", y_SH))

    def _added(self, x_SH: Array, half: str, y_SH: Array) -> Array:
        """The residual stream with what a half of a layer makes, times the model's factor."""
        if self.model.post_norms:
            y_SH = self._normed(f"{half}.post_norm", y_SH)
        return x_SH + self.stored(self._dropped(half, y_SH) * self.model.residual_multiplier)

    def _normed(self, name: str, x_SH: Array) -> Array:
        return self.shown(name, self.norm(name, x_SH))

    def norm(self, name: str, x: Array) -> Array:
        """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019) over the last dimension."""
        model, layernorm = self.model, self.model.norm == "layernorm"
        centred = x - x.mean(-1, keepdims=True) if layernorm else x
        normed = centred / library(x).sqrt((centred * centred).mean(-1, keepdims=True) + model.norm_eps)
        bias = self.weight(f"{name}.bias") if layernorm and model.norm_bias else 0.0
        return self.stored(normed * (self.weight(f"{name}.weight") + model.norm_offset) + bias)

    def _linear(self, name: str, x: Array, *, bias: bool | None = None) -> Array:
        held = self.model.bias if bias is None else bias
        return self.stored(x @ self.weight(f"{name}.weight").T + (self.weight(f"{name}.bias") if held else 0.0))

    def _embedded(self) -> Array:
        x_SH = self._looked_up(self.inputs.tokens)
        if self.model.embedding_norm:
            x_SH = self.norm("embedding.norm", x_SH)
        return (
            x_SH + self.weight("embedding.positions.weight")[self.positions]
            if self.model.position == "learned"
            else x_SH
        )

    def _looked_up(self, ids: np.ndarray) -> Array:
        """Rows of the token table as they enter the model."""
        return self.stored(self.weight(TOKEN_TABLE)[ids] * self.model.embedding_multiplier)

    def _attention(self, prefix: str, x_SH: Array, layer: int) -> Array:
        """Vaswani et al. 2017, section 3.2; query heads share keys and values in groups (Ainslie et al. 2023, arXiv
        2305.13245)."""
        model, queries = self.model, self.model.query_heads_per_group
        qkv = self._linear(f"{prefix}.qkv", x_SH, bias=model.bias or model.qkv_bias)
        groups = qkv.reshape(len(x_SH), model.num_kv_heads, queries + 2, model.head_dim)
        q, k, v = groups[:, :, :queries], groups[:, :, queries : queries + 1], groups[:, :, queries + 1 :]
        if model.qk_norm:
            q, k = self.norm(f"{prefix}.query_norm", q), self.norm(f"{prefix}.key_norm", k)
        if model.whole_qk_norm:  # over all heads together (OLMo 2, arXiv 2501.00656, section 3.2)
            names = f"{prefix}.all_queries_norm", f"{prefix}.all_keys_norm"
            q, k = (
                self.norm(name, part.reshape(len(x_SH), -1)).reshape(part.shape)
                for name, part in zip(names, (q, k), strict=True)
            )
        if model.position == "rope" and _has(model.rope_layers, layer):
            q, k = self._turned(q, layer), self._turned(k, layer)
        k, v = (library(x_SH).broadcast_to(part, q.shape) for part in (k, v))
        q, k, v = (part.reshape(len(x_SH), model.num_heads, model.head_dim) for part in (q, k, v))
        biased = model.bias or model.attention_output_bias
        return self._linear(f"{prefix}.output", self._attended(prefix, q, k, v, layer), bias=biased)

    def _latent_attention(self, prefix: str, x_SH: Array, layer: int) -> Array:
        """DeepSeek-V2, arXiv 2405.04434, equations 37-47."""
        model, plain, joined = self.model, self.model.qk_nope_head_dim, library(x_SH).concatenate
        if model.q_lora_rank:
            low = self.norm(f"{prefix}.q_norm", self._linear(f"{prefix}.q_down", x_SH))
            q = self._linear(f"{prefix}.q_up", low)
        else:
            q = self._linear(f"{prefix}.q", x_SH)
        q_SND = q.reshape(len(x_SH), model.num_heads, model.head_dim)
        down = self._linear(f"{prefix}.kv_down", x_SH)
        latent = self.norm(f"{prefix}.kv_norm", down[:, : model.kv_lora_rank])
        pairs = self._linear(f"{prefix}.kv_up", latent).reshape(len(x_SH), model.num_heads, -1)
        q_SND = joined([q_SND[..., :plain], self._turned(q_SND[..., plain:], layer)], -1)
        shared = self._turned(down[:, None, model.kv_lora_rank :], layer)
        turned = library(x_SH).broadcast_to(shared, (*q_SND.shape[:2], model.qk_rope_head_dim))
        k_SND = joined([pairs[..., :plain], turned], -1)
        biased = model.bias or model.attention_output_bias
        return self._linear(
            f"{prefix}.output", self._attended(prefix, q_SND, k_SND, pairs[..., plain:], layer), bias=biased
        )

    def _turned(self, x: Array, layer: int) -> Array:
        """[S, ..., D] with the pairs (i, i + D/2) turned by their positions (Su et al. 2021, arXiv 2104.09864, equation
        34)."""
        model = self.model
        local = model.rope_local_theta is not None and _has(model.window_layers, layer)
        frequencies = np.array(rotary_frequencies(model, self.plan.batch.sequence, local=local))
        growth = rotary_growth(model, local=local)
        angles = (self.positions[:, None] * frequencies).reshape(len(x), *[1] * (x.ndim - 2), -1)
        cos, sin = same_kind(x, np.cos(angles) * growth), same_kind(x, np.sin(angles) * growth)
        first, second = x[..., : len(frequencies)], x[..., len(frequencies) :]
        return self.stored(library(x).concatenate([first * cos - second * sin, first * sin + second * cos], -1))

    def _attended(self, prefix: str, q_SND: Array, k_SND: Array, v_SND: Array, layer: int) -> Array:
        """[S, N D]: each token sees those of its document up to itself, as far as the layer's window reaches. A sink
        takes part in the softmax and has no value (gpt-oss, arXiv 2508.10925, section 2.2); with ALiBi a score falls
        with the distance."""
        keys, queries = np.arange(len(q_SND)), np.arange(len(q_SND))[:, None]
        model, documents = self.model, self.inputs.documents
        window = model.sliding_window if _has(model.window_layers, layer) else 0
        seen = (keys <= queries) & ((keys > queries - window) if window else True)
        if documents is not None:
            seen &= keys >= documents[:, None]
        visible, found = same_kind(q_SND, seen), []
        for head in range(q_SND.shape[1]):
            scores = self.single(q_SND[:, head] @ k_SND[:, head].T * attention_scale(model))
            scores = _capped(scores, model.attention_softcap)
            if model.position == "alibi":
                scores = scores - same_kind(q_SND, _alibi_slope(model, head) * (queries - keys))
            scores = library(q_SND).where(visible, scores, -math.inf)
            if model.attention_sinks:
                sinks = library(q_SND).broadcast_to(self.weight(f"{prefix}.core.sinks")[head], (len(keys), 1))
                scores = library(q_SND).concatenate([scores, sinks], -1)
            shares = self.single(softmax(scores))[:, : len(keys)]
            found.append(self._probabilities_dropped(prefix, head, shares) @ v_SND[:, head])
        return self.stored(library(q_SND).concatenate(found, -1))

    def _probabilities_dropped(self, prefix: str, head: int, x: Array) -> Array:
        """Elements are numbered by (sample of the global batch, head, query, key)."""
        share, length = self.model.attention_dropout, self.plan.batch.sequence
        if not share:
            return x
        row = (self.inputs.sample * self.model.num_heads + head) * length
        index = (row + np.arange(len(x))[:, None]) * length + np.arange(len(x))
        return x * same_kind(x, draws.dropout_factor(*self._draw(f"{prefix}.core"), index, share))

    def _dropped(self, operation: str, x_SH: Array) -> Array:
        share = self.model.hidden_dropout
        return (
            x_SH * same_kind(x_SH, draws.dropout_factor(*self._draw(operation), self._index(), share))
            if share
            else x_SH
        )

    def _index(self) -> np.ndarray:
        """[S, H]: the numbers of a hidden state's elements in the whole tensor of a step."""
        hidden, length = self.model.hidden_size, len(self.inputs.tokens)
        rows = self.inputs.sample * self.plan.batch.sequence + np.arange(length)
        return rows[:, None] * hidden + np.arange(hidden)

    def _draw(self, operation: str) -> tuple[int, str, int]:
        return self.plan.train.seed, self.plan.name_in_run(operation), self.inputs.step

    def _mlp(self, prefix: str, x_SH: Array, layer: int) -> Array:
        if not self.model.layer_is_moe(layer):
            return self._dense(prefix, x_SH)
        bias = self.weight(f"{prefix}.router.bias") if self.model.router_bias else 0.0
        logits_SE = self._jittered(prefix, x_SH) @ self.weight(f"{prefix}.router.weight").T + bias
        return self._experts(prefix, x_SH, self.shown(f"{prefix}.router", self.single(logits_SE)), layer)

    def _dense(self, prefix: str, x_SH: Array) -> Array:
        """An MLP."""
        biased = self.model.bias or self.model.mlp_bias
        units = self.activated(self._linear(f"{prefix}.up", x_SH, bias=biased))
        return self._linear(f"{prefix}.down", units, bias=biased)

    def _jittered(self, prefix: str, x_SH: Array) -> Array:
        """A router's input, every element times 1 - jitter to 1 + jitter (Fedus et al. 2022, Switch Transformers,
        section 2.4)."""
        jitter = self.plan.train.router_jitter
        if not jitter:
            return x_SH
        return x_SH * same_kind(
            x_SH, 1 + jitter * (2 * draws.uniform(*self._draw(f"{prefix}.router"), self._index()) - 1)
        )

    def _experts(self, prefix: str, x_SH: Array, logits_SE: Array, layer: int) -> Array:
        """Chosen experts' results times their weights, and shared ones (DeepSeek-V3, arXiv 2412.19437, equations
        12-16)."""
        chosen_SE, routed_SE = self.chosen(layer, logits_SE)
        weights_SE = expert_weights(router_scores(logits_SE, self.model), same_kind(x_SH, chosen_SE), self.model)
        y_SH = library(x_SH).zeros_like(x_SH)
        for expert, (rows, results) in enumerate(self.results(prefix, x_SH, routed_SE)):
            y_SH[rows] += weights_SE[rows, expert, None] * results
        return y_SH + self._shared(f"{prefix}.shared", x_SH) if self.model.num_shared_experts else y_SH

    def _shared(self, prefix: str, x_SH: Array) -> Array:
        """The shared experts, weighed by a sigmoid of each token where the model has that (transformers'
        `Qwen2MoeSparseMoeBlock`)."""
        y_SH = self._dense(prefix, x_SH)
        if not self.model.shared_expert_gate:
            return y_SH
        return self.stored(self.stored(sigmoid(self._linear(f"{prefix}.gate", x_SH, bias=False))) * y_SH)

    def results(self, prefix: str, x_SH: Array, routed_SE: np.ndarray) -> Iterator[tuple[Array, Array]]:
        """For every expert the tokens that it works on, [S], and what it makes of them."""
        experts, num_experts = f"{prefix}.experts", self.model.num_experts
        biased = self.model.bias or self.model.mlp_bias
        up, down = (list(self.weight(f"{experts}.{part}.weight")) for part in ("up", "down"))
        biases = [
            list(self.weight(f"{experts}.{part}.bias")) if biased else [0.0] * num_experts for part in ("up", "down")
        ]
        for expert in range(num_experts):
            rows = same_kind(x_SH, np.flatnonzero(routed_SE[:, expert]))
            units = self.activated(self.stored(x_SH[rows] @ up[expert].T + biases[0][expert]))
            yield rows, self.stored(units @ down[expert].T + biases[1][expert])

    def activated(self, x: Array) -> Array:
        """The activation; where it is gated every gate stands before the unit that it multiplies (Shazeer 2020, arXiv
        2002.05202). gpt-oss limits both and adds 1 to the unit (transformers' `GptOssExperts._apply_gate`)."""
        gates, units = x[..., ::2], x[..., 1::2]
        if (limit := self.gate_limit) is not None:
            gates, units = library(x).clip(gates, None, limit), library(x).clip(units, -limit, limit)
        units = units + self.model.gate_offset
        match self.model.activation:
            case "swiglu":
                y = gates * sigmoid(gates) * units
            case "geglu":
                y = gelu(gates) * units
            case "geglu_tanh":
                y = gelu_tanh(gates) * units
            case "quick_geglu":
                y = gates * sigmoid(1.702 * gates) * units
            case "gelu":
                y = gelu(x)
            case "gelu_tanh":
                y = gelu_tanh(x)
            case _:
                y = (x * (x > 0)) ** 2
        return self.stored(y)

    def logits(self, normed_SH: Array) -> Array:
        """[S, V]: scores of the ids of the vocabulary."""
        table = self.weight(TOKEN_TABLE if self.model.tied_embeddings else "head.output.weight")
        normed_SH = self.stored(normed_SH * self.model.logit_multiplier)
        logits = (normed_SH @ table.T)[:, : self.model.vocab_size - self.model.padding_rows]
        return _capped(logits, self.model.logit_softcap)

    def _losses(self, normed_SH: Array, targets_S: np.ndarray) -> Array:
        """[S]: cross-entropy with the plan's label smoothing over the ids of the vocabulary and its z-loss; 0 where
        nothing counts."""
        train, logits = self.plan.train, self.logits(normed_SH)
        counts = targets_S >= 0 if train.ignore_token is None else targets_S != train.ignore_token
        log_sums, smoothing = log_sum(logits), train.label_smoothing
        at_target = logits[np.arange(len(logits)), np.where(counts, targets_S, 0)]
        losses = log_sums - (1 - smoothing) * at_target - smoothing * logits.mean(-1) + train.z_loss * log_sums**2
        return losses * same_kind(losses, counts.astype(np.float64))

    def _ahead(self, normed_SH: Array) -> list[Array]:
        """Multi-token prediction (DeepSeek-V3, section 2.2): module k joins a token's hidden state with a later token's
        embedding."""
        inputs, later, found = self.inputs, self.inputs.later, []
        if later is None:
            return []
        for depth in range(self.model.num_mtp_layers):
            prefix = mtp_prefix(depth)
            ids = inputs.targets if depth == 0 else later[:, depth - 1]
            embedded = self._dropped(f"{prefix}.embedding", self._looked_up(np.maximum(ids, 0)))
            joined = self.norm(f"{prefix}.embedding_norm", embedded), self.norm(f"{prefix}.hidden_norm", normed_SH)
            x_SH = self.shown(
                f"{prefix}.projection",
                self._linear(f"{prefix}.projection", library(normed_SH).concatenate(joined, -1), bias=False),
            )
            normed_SH = self.norm(f"{prefix}.norm", self.layer(self.model.num_layers + depth, x_SH))
            found.append(self.shown(f"{prefix}.losses", self._losses(normed_SH, later[:, depth])))
        return found


def _has(pattern: Sequence[int], layer: int) -> bool:
    """Whether a list of 1 and 0, repeated over the layers, has 1 for this one; an empty one has it for all."""
    return not pattern or pattern[layer % len(pattern)] == 1


def _alibi_slope(model: ModelSpec, head: int) -> float:
    """By how much a head's scores fall for each token between query and key (Press et al. 2022, arXiv 2108.12409,
    section 3, and their published code for numbers of heads that are no power of two)."""
    power = 2 ** int(math.log2(model.num_heads))
    exponent = 8 * (head + 1) / power if head < power else 4 * (2 * (head - power) + 1) / power
    return model.alibi_multiplier * 2.0**-exponent


def _capped(x: Array, cap: float) -> Array:
    """c tanh(x / c) (Gemma 2, arXiv 2408.00118, section 2); x where c is 0."""
    return cap * library(x).tanh(x / cap) if cap else x
