"""The problems of the matrix: small models of every kind, each with the smallest sizes that a layout can cut.

Heads, experts, blocks of tokens and samples follow from the degrees of a layout (no model of six heads can be cut for
tp=5), so a problem has one reference per set of sizes, which all layouts of those sizes share.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.layout.layout import Layout
from ...core.machine.cluster import ClusterSpec
from ...core.machine.cluster_presets import cluster_preset
from ...core.model.model import ModelSpec
from ...core.plan.optimizer import Optimizer, OptimizerName
from ...core.plan.plan import Plan
from ...core.plan.sections import Batch, Numerics, Precision
from ...core.plan.train import Train

NUM_LAYERS = 3
"""Odd, so that pipelines cut them unevenly; one dense and two with experts in a mixture."""

HEADS = (6, 8, 5, 7)
"""Key/value heads, the first number that tp (times `cp_inner`) divides, else the first of all; 2 and 3 cut them at odd
places of the canonical tree."""

EXPERTS = (6, 4)
"""Experts, the first number that ep divides."""

EXPERT_WIDTHS = (24, 30, 28)
"""Units of an expert, the first number that tp divides."""

CLIP_GRAD_NORM = 0.05
"""Far below the gradient norms of these models, so that every step clips."""


@dataclass(frozen=True)
class Tokens:
    """Length of a sequence and the blocks of tokens that its sums are made of."""

    sequence: int
    gradient_block: int
    reduction_block: int


TOKENS = (Tokens(15, 8, 2), Tokens(15, 2, 2), Tokens(16, 4, 2), Tokens(16, 2, 1), Tokens(12, 2, 1), Tokens(24, 4, 1))
"""The first that a layout can cut: between blocks of which the last is shorter, or over 2*cp chunks of whole blocks."""

BIASED: Mapping[str, Any] = {"norm": "layernorm", "position": "learned", "activation": "gelu_tanh", "bias": True}
LATENT: Mapping[str, Any] = {
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "head_dim": 6,
}
CAPPED: Mapping[str, Any] = {
    "sliding_window": 5,
    "window_layers": (1, 0),
    "rope_local_theta": 100.0,
    "attention_scale": 0.7,
    "attention_softcap": 1.5,
    "logit_softcap": 0.4,
}
"""As Gemma's layers, with caps that these models' scores and logits reach."""
SINKS: Mapping[str, Any] = {
    "sliding_window": 3,
    "window_layers": (0, 1),
    "attention_sinks": True,
    "rope_layers": (1, 1, 0),
    "rope_dim": 2,
}
BLOOM: Mapping[str, Any] = {**BIASED, "position": "alibi", "embedding_norm": True}
MIXTURE: Mapping[str, Any] = {"experts_per_token": 2, "first_dense_layers": 1}
GROUPS: Mapping[str, Any] = {"num_router_groups": 2, "router_groups_per_token": 1}
FACTORS: Mapping[str, Any] = {"embedding_multiplier": 5.5, "residual_multiplier": 0.3, "logit_multiplier": 0.25}
NORMS: Mapping[str, Any] = {"post_norms": True, "norm_offset": 1.0}
LIMITED: Mapping[str, Any] = {"activation": "quick_geglu", "gate_limit": 0.0625, "gate_offset": 1.0, "mlp_bias": True}
SHARED: Mapping[str, Any] = {"num_shared_experts": 1, "shared_expert_gate": True, "expert_layer_step": 2}
DEEPSEEK: Mapping[str, Any] = {
    "router_scores": "sigmoid",
    "router_group_scores": "top_two",
    "router_scaling": 2.5,
    "expert_bias": True,
}


@dataclass(frozen=True)
class Problem:
    """What is trained, whatever the layout. `model` holds fields of `ModelSpec` but for the counts
    that follow from a layout.

    `attention` is `mha`, `gqa` (two query heads share one of key and value) or `mla`.
    """

    name: str
    attention: str
    model: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "fp32"
    dropout: float = 0.0
    train: Mapping[str, Any] = field(default_factory=dict)
    optimizer: OptimizerName = "adamw"
    _specs: dict[tuple[int, ...], ModelSpec] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_moe(self) -> bool:
        """True when its layers have experts."""
        return "experts_per_token" in self.model

    @functools.cached_property
    def features(self) -> tuple[tuple[str, str], ...]:
        """What distinguishes it from other problems, for the coverage table."""
        return (
            ("attention", self.attention),
            ("mlp", "experts" if self.is_moe else "dense"),
            ("norm", self.model.get("norm", "rmsnorm")),
            ("table", "tied" if self.model.get("tied_embeddings") else "untied"),
            ("packed", "yes" if self.train.get("packed") else "no"),
            ("mtp", "yes" if self.model.get("num_mtp_layers") else "no"),
            ("qk_norm", "yes" if self.model.get("qk_norm") else "no"),
            ("windows", "by layer" if self.model.get("window_layers") else "none"),
            ("scores", _scores(self.model)),
            ("block", "parallel" if self.model.get("parallel_block") else "in turn"),
            ("norms", "behind too" if self.model.get("post_norms") else "before"),
            ("capacity", "yes" if self.model.get("expert_capacity_factor") else "no"),
            ("router_loss", "yes" if self.train.get("router_aux_loss") else "no"),
            ("dtype", self.dtype),
            ("dropout", "yes" if self.dropout else "no"),
            ("optimizer", self.optimizer),
        )

    def spec(self, *, tp: int, cp_inner: int, ep: int, sequence: int) -> ModelSpec:
        """The model with as many heads and experts as degrees can cut."""
        heads = next((number for number in HEADS if number % (tp * cp_inner) == 0), HEADS[0])
        return ModelSpec(
            **{
                "name": f"{self.name}-{heads}h",
                "num_layers": NUM_LAYERS,
                "hidden_size": 32,
                "ffn_hidden_size": 50,
                "num_heads": heads * (2 if self.attention == "gqa" else 1),
                "num_kv_heads": heads,
                "head_dim": 4,
                "vocab_size": 259,
                "max_positions": sequence,
                "hidden_dropout": self.dropout,
                "attention_dropout": self.dropout / 2,
                **(self._experts(tp, ep) if self.is_moe else {}),
                **self.model,
            }
        )

    def _spec_of(self, *cut: int) -> ModelSpec:
        """`spec`, each made once."""
        if cut not in self._specs:
            tp, cp_inner, ep, sequence = cut
            self._specs[cut] = self.spec(tp=tp, cp_inner=cp_inner, ep=ep, sequence=sequence)
        return self._specs[cut]

    def _experts(self, tp: int, ep: int) -> dict[str, int]:
        """As many experts as ep divides, and of a width that tp divides."""
        number = next((number for number in EXPERTS if number % ep == 0), EXPERTS[0])
        width = next((width for width in EXPERT_WIDTHS if width % tp == 0), EXPERT_WIDTHS[0])
        shared = {"shared_expert_ffn_hidden_size": 2 * width} if self.model.get("shared_expert_gate") else {}
        return {"num_experts": number, "expert_ffn_hidden_size": width, **shared}

    def plan(self, layout: Layout, tokens: Tokens, batch: Batch, **choices: Any) -> Plan:
        """The plan of a layout; `choices` are further sections of a plan. Raises `PlanError` with
        every rule that it breaks."""
        return Plan(**self.sections(layout, tokens, batch), **choices)

    def sections(self, layout: Layout, tokens: Tokens, batch: Batch) -> dict[str, Any]:
        """The sections of a plan that the problem and a layout choose, by name."""
        return {
            "model": self._spec_of(layout.tp, layout.cp_inner, layout.ep, tokens.sequence),
            "cluster": _host(layout.world_size),
            "layout": layout,
            "batch": batch,
            "precision": _precision(self.dtype),
            "numerics": _numerics(tokens),
            "optimizer": _optimizer(self.optimizer),
            "train": _train(**self.train),
        }


def _scores(model: Mapping[str, Any]) -> str:
    """What attention makes of its scores besides a softmax."""
    return "capped" if model.get("attention_softcap") else "with sinks" if model.get("attention_sinks") else "plain"


@functools.cache
def _optimizer(name: OptimizerName) -> Optimizer:
    return Optimizer(name, clip_grad_norm=CLIP_GRAD_NORM)


@functools.cache
def _precision(dtype: str) -> Precision:
    return Precision(dtype)  # type: ignore[arg-type]


@functools.cache
def _numerics(tokens: Tokens) -> Numerics:
    return Numerics("exact", gradient_token_block=tokens.gradient_block, reduction_token_block=tokens.reduction_block)


@functools.cache
def _train(**chosen: Any) -> Train:
    return Train(steps=3, learning_rate=1e-2, **chosen)


@functools.cache
def _host(num_devices: int) -> ClusterSpec:
    return cluster_preset("this-host", num_devices)


PROBLEMS: Mapping[str, Problem] = {
    problem.name: problem
    for problem in (
        Problem("gpt", "mha", {**BIASED, "tied_embeddings": True}),
        Problem("bloom", "mha", BLOOM, dtype="bf16", train={"packed": True}),
        Problem("gpt-dropout", "mha", BIASED, dropout=0.1, train={"ignore_token": 32, "label_smoothing": 0.1}),
        Problem("gpt-bf16", "mha", {**BIASED, "tied_embeddings": True, "padding_rows": 3}, dtype="bf16", dropout=0.1),
        Problem("llama", "gqa", train={"z_loss": 1e-3}),
        Problem("llama-packed", "gqa", train={"packed": True}),
        Problem("llama-bf16", "gqa", {"activation": "geglu_tanh", **FACTORS, **NORMS}, dtype="bf16"),
        Problem(
            "llama-tied",
            "gqa",
            {"tied_embeddings": True, "activation": "relu_squared", "whole_qk_norm": True},
            dropout=0.1,
            optimizer="sgd",
        ),
        Problem(
            "gqa-layernorm",
            "gqa",
            {"norm": "layernorm", "norm_bias": False, "activation": "gelu", "parallel_block": True},
            dtype="bf16",
            dropout=0.1,
        ),
        Problem("qwen2", "gqa", {"qkv_bias": True, "tied_embeddings": True}, dtype="bf16", optimizer="sgd"),
        Problem("qwen3", "gqa", {"qk_norm": True}, optimizer="muon"),
        Problem("capped", "gqa", {**CAPPED, "tied_embeddings": True, "activation": "geglu"}),
        Problem("sinks", "gqa", {**SINKS, "qkv_bias": True}, dtype="bf16"),
        Problem("mla", "mla", {**LATENT, "q_lora_rank": 8, "tied_embeddings": True}, dropout=0.1),
        Problem(
            "mla-bf16",
            "mla",
            {**LATENT, "norm": "layernorm", "pre_norms": False, "post_norms": True, "attention_output_bias": True},
            dtype="bf16",
        ),
        Problem(
            "mixtral",
            "gqa",
            {**MIXTURE, **LIMITED, "router_bias": True},
            train={"router_aux_loss": 0.01},
            optimizer="muon",
        ),
        Problem(
            "gpt-experts",
            "mha",
            {**BIASED, **MIXTURE, "tied_embeddings": True, "expert_capacity_factor": 1.0},
            dtype="bf16",
            dropout=0.1,
            train={"router_jitter": 0.1, "router_z_loss": 1e-3},
        ),
        Problem(
            "qwen3-experts",
            "gqa",
            {**MIXTURE, "qk_norm": True, "expert_capacity_factor": 1.5},
            dtype="bf16",
            train={"router_aux_loss": 0.01},
        ),
        Problem(
            "mla-experts",
            "mla",
            {**LATENT, **MIXTURE, **GROUPS, **DEEPSEEK, **SHARED, "q_lora_rank": 8},
            dtype="bf16",
        ),
        Problem(
            "deepseek",
            "mla",
            {**LATENT, **MIXTURE, **GROUPS, "tied_embeddings": True, "num_mtp_layers": 1},
            dropout=0.1,
        ),
        Problem("gpt-mtp", "mha", {**BIASED, "tied_embeddings": True, "num_mtp_layers": 2}),
    )
}
"""Name -> problem."""
