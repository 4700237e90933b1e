"""`ModelSpec`: a decoder transformer as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelSpec:
    """A dense decoder. `ffn_hidden_size` is the width after the activation (a SwiGLU has two products of that width before it).

    `bias` puts a bias on every linear layer but the output head. `max_positions` is the length of a learned position table.
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    activation: Literal["gelu", "gelu_tanh", "swiglu", "relu_squared"] = "swiglu"
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    position: Literal["learned", "rope"] = "rope"
    rope_theta: float = 10000.0
    tied_embeddings: bool = False
    bias: bool = False

    @property
    def gated(self) -> bool:
        """True when the first MLP product has a gate half (SwiGLU)."""
        return self.activation == "swiglu"

    @property
    def query_heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        """Exact count, tied tensors once."""
        from .parameters import parameters

        return sum(parameter.num_elements for parameter in parameters(self))
