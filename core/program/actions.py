"""The operations of every action of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..schedule.action import Kind
from .context import finish_sequences
from .gradients import (
    exchanged_of_table,
    gather_parameters,
    reduce_gradients,
    reduce_microbatch,
    step,
    step_counts,
    tied_ends,
)
from .layers import stage_ops
from .tensors import Tensors
from .work import Message, Op, Operation, Operations

if TYPE_CHECKING:
    from ..plan.plan import Plan


def operations(
    plan: Plan, kind: Kind, stage: int, tp_rank: int = 0, dp_rank: int = 0, *, cp_rank: int = 0, replica: int = 0
) -> Operations:
    """What one action of a stage computes and sends on one rank, in execution order.

    F, B, I, W, SEND_F and SEND_B are per microbatch; REDUCE_GRAD and UNSHARD per stage; STEP belongs to a pipeline rank
    and is asked for with its lowest stage. B is I and W together, layer by layer. Receives and RESHARD compute and send
    nothing. `replica` says which of the stage's pipeline ranks (`plan.placement.ranks[stage]`) is meant.
    Context-parallel ranks differ in the bytes of exact numerics only.
    """
    pp_rank = plan.placement.ranks[stage][replica]
    match kind:
        case Kind.F:
            return tuple(operation for work in stage_ops(plan, stage, tp_rank, cp_rank) for operation in work.forward)
        case Kind.B | Kind.I | Kind.W:
            works = stage_ops(plan, stage, tp_rank, cp_rank)
            if kind is Kind.I:
                return tuple(_backward(works, kind))
            finish = finish_sequences(plan, stage, tp_rank, cp_rank)
            return (*_backward(works, kind), *finish, *reduce_microbatch(plan, stage, tp_rank))
        case Kind.SEND_F | Kind.SEND_B:
            return (Message("", message_bytes(plan, tp_rank)),)
        case Kind.REDUCE_GRAD:
            copy = (
                0
                if copies_do_the_same(plan, kind, pp_rank)
                else plan.copy_of(stage, dp_rank=dp_rank, pp_rank=pp_rank, cp_rank=cp_rank)
            )
            return _once(plan, (kind, stage, tp_rank, copy), lambda: _reductions(plan, stage, tp_rank, copy))
        case Kind.UNSHARD:
            return (
                _once(plan, (kind, stage, tp_rank), lambda: tuple(gather_parameters(plan, stage, tp_rank)))
                if plan.layout.zero == 3
                else ()
            )
        case Kind.STEP:
            copy = 0 if copies_do_the_same(plan, kind, pp_rank) else dp_rank * plan.layout.cp + cp_rank
            sent = exchanged_of_table(plan, pp_rank, tp_rank, copy)  # and nothing else differs between copies
            return _once(plan, (kind, pp_rank, tp_rank, sent), lambda: tuple(step(plan, pp_rank, tp_rank, copy)))
        case _:
            return ()


def copies_do_the_same(plan: Plan, kind: Kind, pp_rank: int) -> bool:
    """Whether the copies of a pipeline rank have the same operations of an action.

    They have not where exact numerics reduce gradients, of which each sends the nodes of its own samples, and where
    STEP sends parts of a tied table.
    """
    match kind:
        case Kind.REDUCE_GRAD:
            return plan.numerics.mode == "fast"
        case Kind.STEP:
            return not (plan.layout.zero and tied_ends(plan, pp_rank))
        case _:
            return True


def _once(plan: Plan, key: tuple[Any, ...], make: Callable[[], Operations]) -> Operations:
    """What was made under a key before, else what `make` gives."""
    if key not in plan.memo:
        plan.memo[key] = make()
    found: Operations = plan.memo[key]
    return found


def _reductions(plan: Plan, stage: int, tp_rank: int, copy: int) -> Operations:
    return (*reduce_gradients(plan, stage, tp_rank, copy), *step_counts(plan, stage))


def message_bytes(plan: Plan, tp_rank: int = 0) -> int:
    """Bytes of one hidden state, or its gradient, between two stages: b*s/cp*h; with sequence parallelism each
    rank sends its tokens."""
    tensors = Tensors(plan, tp_rank)
    return tensors.own_tokens * plan.model.hidden_size * tensors.element_bytes


def _backward(works: tuple[Op, ...], kind: Kind) -> Iterator[Operation]:
    if kind is not Kind.W:
        for work in works:
            yield from work.recomputed
    for work in reversed(works):
        if kind is not Kind.W:
            yield from work.input_gradient
        if kind is not Kind.I:
            yield from work.weight_gradient
