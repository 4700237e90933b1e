"""Rules about forwards and backwards: each once, on its rank, in order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....core.schedule.action import COMPUTE, RECEIVES, SENDS, Kind
from ....core.schedule.messages import UnrunnableError, add_messages
from .blocking import NONE
from .rule import Rule, Violation
from .view import View


def wrong_rank(view: View) -> Iterator[Violation]:
    """Actions in the row of a rank that does not hold their stage."""
    kind, stage, microbatch, index = view.parts
    holds = np.zeros((view.schedule.num_stages, view.schedule.num_ranks), dtype=bool)
    for each, owners in enumerate(view.schedule.placement.ranks):
        holds[each, list(owners)] = True
    owner = view.owner(stage, microbatch)
    wrong = np.where(microbatch >= 0, owner != view.rank[index], ~holds[stage, view.rank[index]])
    for part in np.flatnonzero(wrong):
        token, rank = f"{stage[part]}{Kind(int(kind[part])).name}", int(view.rank[index[part]])
        yield Violation(
            int(index[part]),
            rank,
            (f"{token} is in the row of rank {rank}, but rank {owner[part]} holds stage {stage[part]}."),
        )


def duplicate_action(view: View) -> Iterator[Violation]:
    """Repetitions of a forward or backward of one microbatch."""
    yield from _repeated(view, COMPUTE - {Kind.OVERLAP_F_B})


def duplicate_message(view: View) -> Iterator[Violation]:
    """Repetitions of a send or a receive of one microbatch."""
    yield from _repeated(view, SENDS | RECEIVES)


def missing_forward(view: View) -> Iterator[Violation]:
    """Microbatches that a stage never runs forward."""
    yield from _absent(view, view.first(Kind.F) == NONE, "never runs the forward of")


def missing_backward(view: View) -> Iterator[Violation]:
    """Microbatches that a stage never runs backward."""
    yield from _absent(view, view.gradient == NONE, "never runs the backward (B, or I and W) of")


def missing_weight_gradient(view: View) -> Iterator[Violation]:
    """I without its W."""
    missing = (view.first(Kind.I) != NONE) & (view.first(Kind.W) == NONE) & (view.first(Kind.B) == NONE)
    for index in np.sort(view.first(Kind.I)[missing]):
        yield Violation(
            int(index),
            int(view.rank[index]),
            ("the input gradient is made, but W, the weight gradient, never follows."),
        )


def doubled_gradient(view: View) -> Iterator[Violation]:
    """B as well as I or W: a gradient counted twice."""
    split = np.maximum(view.first(Kind.I), view.first(Kind.W))
    doubled = (view.first(Kind.B) != NONE) & (split != NONE)
    for index in np.sort(split[doubled]):
        yield Violation(
            int(index),
            int(view.rank[index]),
            ("B of this stage and microbatch is there too, so a gradient is counted twice."),
        )


def backward_before_forward(view: View) -> Iterator[Violation]:
    """B or I that does not come after its F."""
    yield from _out_of_order(view, view.first(Kind.F), view.gradient, "runs before its forward")


def weight_before_input(view: View) -> Iterator[Violation]:
    """W that does not come after its I."""
    yield from _out_of_order(view, view.first(Kind.I), view.first(Kind.W), "runs before I, whose saved values it uses")


def hand_over_order(view: View) -> Iterator[Violation]:
    """Neighbouring stages on one rank whose later one runs first."""
    for hops in view.hops:
        chosen = ~hops.crossing
        what = f"runs before the neighbour stage on this rank has made its {hops.value}"
        yield from _out_of_order(view, hops.maker[chosen], hops.user[chosen], what)


def compute_cycle(view: View) -> Iterator[Violation]:
    """Compute actions over all ranks that wait for each other; only asked of schedules without
    messages of their own."""
    try:
        add_messages(view.schedule)
    except UnrunnableError as error:
        circle = [f"{view.token(index)} (rank {view.rank[index]})" for index in error.cycle]
        what = f"no rank can go on: {' waits for '.join([*circle, circle[0]])}."
        yield Violation(error.cycle[0], int(view.rank[error.cycle[0]]), what, error.cycle[1:])


def _repeated(view: View, kinds: frozenset[Kind]) -> Iterator[Violation]:
    for kind in sorted(kinds):
        for index in view.repeated(kind):
            yield Violation(
                int(index), int(view.rank[index]), (f"{kind.name} of this stage and microbatch was there before.")
            )


def _absent(view: View, missing: np.ndarray, verb: str) -> Iterator[Violation]:
    for stage, microbatch in np.argwhere(missing).tolist():
        yield Violation(
            None,
            int(view.owner_table[stage, microbatch]),
            f"stage {stage} {verb} microbatch {microbatch}.",
            microbatch=microbatch,
        )


def _out_of_order(view: View, first: np.ndarray, then: np.ndarray, what: str) -> Iterator[Violation]:
    wrong = (first != NONE) & (then != NONE) & (then <= first)
    for index, other in sorted(zip(then[wrong].tolist(), first[wrong].tolist(), strict=True)):
        yield Violation(index, int(view.rank[index]), f"{what} ({view.place(other)}).", (other,))


PLACEMENT_RULES = (
    Rule(
        "wrong-rank",
        "Every action runs on the rank that holds its stage.",
        "Move the action to that rank's row, or move the whole stage.",
        "0F0,0B0,1B0\n1F0\n",
        wrong_rank,
    ),
)

COMPUTE_RULES = (
    Rule(
        "duplicate-action",
        "A stage runs each F, B, I and W at most once per microbatch.",
        "Remove the repetition.",
        "0F0,0F0,0B0\n",
        duplicate_action,
    ),
    Rule(
        "duplicate-message",
        "A stage sends and receives each value at most once per microbatch.",
        "Remove the repetition.",
        "0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0STEP\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1STEP\n",
        duplicate_message,
    ),
    Rule(
        "missing-forward", "Every stage runs every microbatch forward.", "Add the F.", "0F0,0B0,0B1\n", missing_forward
    ),
    Rule(
        "missing-backward",
        "Every stage runs every microbatch backward: B, or I and W.",
        "Add a B, or an I and a W.",
        "0F0,0F1,0B0\n",
        missing_backward,
    ),
    Rule(
        "missing-weight-gradient",
        "Every input gradient I is followed by its weight gradient W.",
        "Add the W, or write B for both.",
        "0F0,0I0\n",
        missing_weight_gradient,
    ),
    Rule(
        "doubled-gradient",
        "A backward is one B, or one I and one W, not both.",
        "Keep the B, or the I and the W.",
        "0F0,0B0,0I0,0W0\n",
        doubled_gradient,
    ),
    Rule(
        "backward-before-forward",
        "A backward comes after the forward of its stage and microbatch.",
        "Put the F first.",
        "0B0,0F0\n",
        backward_before_forward,
    ),
    Rule(
        "weight-before-input",
        "A weight gradient W comes after its input gradient I.",
        "Put the I first.",
        "0F0,0W0,0I0\n",
        weight_before_input,
    ),
    Rule(
        "hand-over-order",
        "Of two neighbouring stages on one rank, the one that makes a value runs before the one that uses it.",
        "Swap the two.",
        "1F0,0F0,1B0,0B0\n",
        hand_over_order,
    ),
)

CYCLE_RULES = (
    Rule(
        "compute-cycle",
        "Executing the compute actions in list order, no circle of ranks waits for each other.",
        "Bring all ranks to one order of microbatches, for instance forwards and backwards each ascending.",
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0\n",
        compute_cycle,
    ),
)
