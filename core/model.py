"""`ModelSpec`: a decoder transformer as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .divisors import divisors
from .errors import ModelError, did_you_mean

ACTIVATIONS = ("gelu", "gelu_tanh", "swiglu", "relu_squared")
NORMS = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rope")

_COUNTS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_positions")


@dataclass(frozen=True)
class ModelSpec:
    """A dense decoder. `ffn_hidden_size` is the width after the activation (a SwiGLU has two products of that width before it).

    `bias` puts a bias on every linear layer but the output head. `max_positions` is the length of a learned position table.
    Raises `ModelError` with every rule that is broken.
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

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in _COUNTS}
        problems = [f"{name}={value!r} must be a whole number of at least 1." for name, value in counts.items() if not _is_count(value)]
        for name, known in (("activation", ACTIVATIONS), ("norm", NORMS), ("position", POSITIONS)):
            if getattr(self, name) not in known:
                value = getattr(self, name)
                problems.append(f"{name}={value!r} is not one of {', '.join(known)}{did_you_mean(str(value), known)}")
        problems += [f"{name}={value!r} must be above 0." for name in ("norm_eps", "rope_theta") if not (value := getattr(self, name)) > 0]
        if _is_count(self.num_heads) and _is_count(self.num_kv_heads) and self.num_heads % self.num_kv_heads:
            problems.append(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}, so query heads cannot share them evenly. "
                f"Use num_kv_heads among {divisors(self.num_heads)}."
            )
        if self.position == "rope" and _is_count(self.head_dim) and self.head_dim % 2:
            problems.append(f"head_dim={self.head_dim} is odd, but rotary positions need pairs. Use {self.head_dim + 1}.")
        if problems:
            raise ModelError(problems)

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


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
