"""Sizes of the tensors of one microbatch on one rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ...core.layout.chunks import Chunks
from ...core.model.attention_kinds import has_altered_softmax, layer_turns, rope_is_local, shorter_window
from ...core.model.model import ModelSpec
from ...core.model.operators import Operator, Width
from ...core.model.rotary import rotary_width
from ...core.plan.plan import Plan
from ...core.program.tensors import Tensors
from ..stack.memory_profile import MemoryProfile

MASK_BYTES = 1
"""A dropout mask holds one byte per element."""

STATISTIC_BYTES = 4
"""Softmax statistics, norm statistics, and whatever else is one number a row, are fp32."""

INDEX_BYTES = 8
"""Token numbers and indices are int64."""


def rotary_table_bytes(plan: Plan) -> int:
    """cos and sin of a sequence's positions on a context-parallel rank, fp32."""
    return 2 * plan.batch.sequence // plan.layout.cp * rotary_width(plan.model) * STATISTIC_BYTES


def num_rotary_tables(model: ModelSpec, layers: Iterable[int]) -> int:
    """How many of these some layers need: one for each base of theirs."""
    return len({rope_is_local(model, layer) for layer in layers if layer_turns(model, layer)})


@dataclass(frozen=True)
class LayerTensors:
    """Sizes of a plan's tensors on tensor-parallel rank 0, in bytes of one microbatch."""

    plan: Plan
    profile: MemoryProfile

    @cached_property
    def element(self) -> int:
        """Bytes of one activation element."""
        return 4 if self.plan.precision.dtype == "fp32" else 2

    @cached_property
    def operand(self) -> int:
        """Bytes of one element of a linear layer's kept input: 1 where it is kept in fp8, as its product read it."""
        return 1 if self.plan.precision.dtype == "fp8" and self.profile.keeps_fp8_operands else self.element

    @cached_property
    def tokens(self) -> int:
        """T: tokens of a microbatch on a context-parallel rank."""
        return self.plan.batch.micro_size * self.plan.batch.sequence // self.plan.layout.cp

    @cached_property
    def own_tokens(self) -> int:
        """Tokens whose hidden state this rank holds between the cut layers."""
        lo, hi = self.plan.tokens_of(0)
        return self.plan.batch.micro_size * (hi - lo)

    @cached_property
    def hidden(self) -> int:
        """H of this rank's own tokens."""
        return self.own_tokens * self.plan.model.hidden_size * self.element

    @cached_property
    def retained_input(self) -> int:
        """What a layer that is recomputed whole keeps of its input."""
        return -(-self.hidden // self.plan.layout.tp) if self.plan.recompute.distribute else self.hidden

    @cached_property
    def normalised(self) -> int:
        """A norm's output as the linear layer after it keeps it."""
        return self.own_tokens * self.plan.model.hidden_size * self.operand

    @cached_property
    def whole(self) -> int:
        """H of all tokens."""
        return self.tokens * self.plan.model.hidden_size * self.element

    @cached_property
    def gathered(self) -> int:
        """What a gather before a cut layer brings; 0 where nothing is gathered."""
        return self.whole if self.own_tokens < self.tokens else 0

    @cached_property
    def heads(self) -> int:
        """Query heads of this rank."""
        return self.plan.leaf_sizes.heads.owned_items(self.plan.layout.tp, 0)[1] * self.plan.model.query_heads_per_group

    @cached_property
    def kv_heads(self) -> int:
        """Key/value heads of this rank."""
        return self.plan.leaf_sizes.heads.owned_items(self.plan.layout.tp, 0)[1]

    @cached_property
    def queries(self) -> int:
        """All query heads of this rank."""
        return self.tokens * self.heads * self.plan.model.head_dim * self.element

    @cached_property
    def keys(self) -> int:
        """All key heads of this rank."""
        return self.tokens * self.kv_heads * self.plan.model.head_dim * self.element

    @cached_property
    def values(self) -> int:
        """All value heads of this rank."""
        return self.tokens * self.kv_heads * self.plan.model.value_head_dim * self.element

    @cached_property
    def attended(self) -> int:
        """The attention core's output."""
        return self.tokens * self.heads * self.plan.model.value_head_dim * self.element

    @cached_property
    def num_written(self) -> int:
        """Squares of scores that our own core keeps in fp32 where the library's kernels do not compute it
        (`backend.model.written_attention`): the probabilities, and the capped scores."""
        model = self.plan.model
        written = self.profile.counted_masks and has_altered_softmax(model)
        return 1 + (model.attention_softcap > 0) if written else 0

    def attends_by_blocks(self, core: Operator) -> bool:
        """Our own core works on blocks of queries wherever one causal call of the library does not do it all."""
        masked = shorter_window(core.window, self.plan.batch.sequence) > 0 or self.plan.model.position == "alibi"
        return self.profile.counted_masks and (len(self._query_blocks) > 1 or self.num_written > 0 or masked)

    def attends_by_token(self, core: Operator) -> bool:
        """Whether our own core takes and gives the heads of a token one after the other, so that the output product
        needs no copy (`backend.model.attention`)."""
        model, fast = self.plan.model, self.profile.counted_masks and self.plan.numerics.mode == "fast"
        turned = core.turns and not (model.qk_norm or model.whole_qk_norm or model.is_mla)
        return fast and turned and not self.plan.train.packed and not self.attends_by_blocks(core)

    @cached_property
    def attended_pairs(self) -> int:
        """Pairs of a query of the first context-parallel rank and a key up to the end of the query's block, per head
        before neighbours exchange heads for tokens."""
        return sum((end - start) * end for start, end in self._query_blocks) // self.plan.layout.cp_inner

    @cached_property
    def _query_blocks(self) -> tuple[tuple[int, int], ...]:
        """Where the blocks of queries lie in the sequence that the first context-parallel rank attends from."""
        plan = self.plan
        chunks = Chunks(plan.batch.sequence, plan.layout.cp_outer, 0)
        block = plan.leaf_sizes.gradient_token_block if plan.numerics.mode == "exact" else chunks.size
        return tuple((start, min(start + block, hi)) for lo, hi in chunks.spans for start in range(lo, hi, block))

    @cached_property
    def statistics(self) -> int:
        """Norm statistics of the rank's own tokens: mean and deviation, or the deviation alone."""
        return STATISTIC_BYTES * self.own_tokens * (2 if self.plan.model.norm == "layernorm" else 1)

    def held(self, width: Width) -> int:
        """Numbers of a token that this rank holds of a width."""
        degree = self.plan.layout.expert_tp if width.axis == "expert_ffn" else self.plan.layout.tp
        return self._program.held(width, degree)

    @cached_property
    def _program(self) -> Tensors:
        return Tensors(self.plan, 0)

    @cached_property
    def routed_tokens(self) -> int:
        """Tokens that arrive at this rank's experts when all experts get equally many, each padded to whole tokens.

        Megatron's capacity: ceil(T * k / E) a source rank and expert
        (megatron/core/transformer/moe/moe_utils.py, get_capacity).
        """
        model, layout = self.plan.model, self.plan.layout
        capacity = -(-self.own_tokens * model.experts_per_token // model.num_experts)
        return capacity * model.num_experts * layout.expert_tp

    @cached_property
    def vocabulary(self) -> int:
        """Rows of the output table on this rank."""
        tp = self.plan.layout.tp
        if (multiple := self.profile.vocabulary_multiple) > 1:
            return -(-self.plan.model.vocab_size // (multiple * tp)) * multiple
        return self.plan.leaf_sizes.vocab.owned_items(tp, 0)[1]
