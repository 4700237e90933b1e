"""Rules about the end of a step: gathered parameters, gradient reductions, the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....core.schedule.action import Kind
from .rule import Rule, Violation
from .view import View


def sharded_use(view: View) -> Iterator[Violation]:
    """Compute on a stage whose parameters are not gathered; only for stages that are ever gathered or freed."""
    kind, stage, index, gathered = _shard_states(view)
    compute = (kind != Kind.UNSHARD) & (kind != Kind.RESHARD)
    for part in np.flatnonzero(compute & ~gathered).tolist():
        what = f"the parameters of stage {stage[part]} are not gathered here."
        yield Violation(int(index[part]), int(view.rank[index[part]]), what)


def unshard_in_turn(view: View) -> Iterator[Violation]:
    """UNSHARD of what is gathered, RESHARD of what is not."""
    kind, stage, index, gathered = _shard_states(view)
    wrong = ((kind == Kind.UNSHARD) & gathered) | ((kind == Kind.RESHARD) & ~gathered)
    for part in np.flatnonzero(wrong).tolist():
        state = "gathered already" if gathered[part] else "not gathered"
        yield Violation(
            int(index[part]), int(view.rank[index[part]]), (f"the parameters of stage {stage[part]} are {state}.")
        )


def missing_reduction(view: View) -> Iterator[Violation]:
    """Stages whose gradients a rank never reduces."""
    _, held, reductions = _reductions(view)
    for key in np.setdiff1d(held, reductions).tolist():
        rank, stage = divmod(key, view.schedule.num_stages)
        yield Violation(None, rank, f"the gradients of stage {stage} are never reduced.")


def repeated_reduction(view: View) -> Iterator[Violation]:
    """Second and later reductions of a stage."""
    index, _, reductions = _reductions(view)
    _, first = np.unique(reductions, return_index=True)
    for i in np.delete(index, first).tolist():
        yield Violation(
            i, int(view.rank[i]), ("the gradients of this stage were reduced before; they would be counted twice.")
        )


def early_reduction(view: View) -> Iterator[Violation]:
    """Reductions with a backward of their stage still to come."""
    kind, stage, _, index = view.parts
    adds = np.isin(kind, (Kind.B, Kind.W))
    last = np.full(view.schedule.num_ranks * view.schedule.num_stages, -1)
    np.maximum.at(last, view.rank[index[adds]] * view.schedule.num_stages + stage[adds], index[adds])
    reductions, _, keys = _reductions(view)
    for i, late in zip(reductions.tolist(), last[keys].tolist(), strict=True):
        if late > i:
            yield Violation(
                i, int(view.rank[i]), (f"a backward of this stage is still to come ({view.place(late)})."), (late,)
            )


def missing_step(view: View) -> Iterator[Violation]:
    """Ranks that hold a stage and never run the optimizer."""
    steps = np.flatnonzero(view.schedule.actions.kind == Kind.STEP)
    holding = {rank for owners in view.schedule.placement.ranks for rank in owners}
    for rank in sorted(holding - set(view.rank[steps].tolist())):
        yield Violation(None, rank, "the rank never runs its optimizer step.")


def step_not_last(view: View) -> Iterator[Violation]:
    """Optimizer steps with anything of their rank behind them."""
    steps = np.flatnonzero(view.schedule.actions.kind == Kind.STEP)
    for i in steps[steps + 1 != view.schedule.offsets[1:][view.rank[steps]]].tolist():
        yield Violation(i, int(view.rank[i]), f"{view.token(i + 1)} comes after it.", (i + 1,))


def step_stage(view: View) -> Iterator[Violation]:
    """Optimizer steps not written with the lowest stage of their rank."""
    for i in np.flatnonzero(view.schedule.actions.kind == Kind.STEP).tolist():
        lowest = view.schedule.placement.stages_of(int(view.rank[i]))[0]
        if view.schedule.actions.stage[i] != lowest:
            yield Violation(
                i,
                int(view.rank[i]),
                (f"STEP covers all stages of the rank and is written with the lowest, here {lowest}STEP."),
            )


def _reductions(view: View) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(indices of REDUCE_GRAD, keys rank * num_stages + stage of every held stage, keys of the REDUCE_GRADs)."""
    num_stages = view.schedule.num_stages
    held = np.array(
        sorted(
            rank * num_stages + stage for stage, owners in enumerate(view.schedule.placement.ranks) for rank in owners
        )
    )
    index = np.flatnonzero(view.schedule.actions.kind == Kind.REDUCE_GRAD)
    return index, held, view.rank[index].astype(np.int64) * num_stages + view.schedule.actions.stage[index]


def _shard_states(view: View) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(kind, stage, index, gathered just before) of every action that needs or changes the state, by
    rank, stage, then index."""
    kind, stage, _, index = view.parts
    changes = (kind == Kind.UNSHARD) | (kind == Kind.RESHARD)
    key = view.rank[index].astype(np.int64) * view.schedule.num_stages + stage
    chosen = np.flatnonzero(np.isin(kind, (Kind.F, Kind.B, Kind.I, Kind.W)) | changes)
    chosen = chosen[np.isin(key[chosen], np.unique(key[changes]))]
    chosen = chosen[np.lexsort((index[chosen], key[chosen]))]
    kind, stage, index, key, changes = kind[chosen], stage[chosen], index[chosen], key[chosen], changes[chosen]
    if not len(chosen):
        return kind, stage, index, np.zeros(0, dtype=bool)
    position = np.arange(len(chosen))
    # The last change strictly before each position, if it is of the same rank and stage.
    last_change = np.maximum.accumulate(np.where(changes, position, -1))
    before = np.concatenate([[-1], last_change[:-1]])
    gathered = (before >= 0) & (key[before] == key) & (kind[before] == Kind.UNSHARD)
    return kind, stage, index, gathered


STEP_RULES = (
    Rule(
        "sharded-use",
        "A stage whose parameters are gathered and freed (ZeRO-3) computes only between UNSHARD and RESHARD.",
        "Move the UNSHARD before it, or the RESHARD behind it.",
        "0UNSHARD,0F0,0RESHARD,0B0,0REDUCE_GRAD,0STEP\n",
        sharded_use,
    ),
    Rule(
        "unshard-in-turn",
        "UNSHARD and RESHARD of a stage come in turn.",
        "Remove the second of the two.",
        "0UNSHARD,0F0,0UNSHARD,0B0,0RESHARD,0REDUCE_GRAD,0STEP\n",
        unshard_in_turn,
    ),
    Rule(
        "missing-reduction",
        "Every rank reduces the gradients of each of its stages.",
        "Add REDUCE_GRAD after the stage's last backward.",
        "0F0,1F0,1B0,1REDUCE_GRAD,0B0,0STEP\n",
        missing_reduction,
    ),
    Rule(
        "repeated-reduction",
        "The gradients of a stage are reduced once per step.",
        "Keep the one after the last backward.",
        "0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD,0STEP\n",
        repeated_reduction,
    ),
    Rule(
        "early-reduction",
        "REDUCE_GRAD of a stage comes after its last B or W.",
        "Move it behind the last backward.",
        "0F0,0REDUCE_GRAD,0B0,0STEP\n",
        early_reduction,
    ),
    Rule(
        "missing-step",
        "Every rank ends with an optimizer step.",
        "Add STEP at the end.",
        "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0STEP\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD\n",
        missing_step,
    ),
    Rule(
        "step-not-last",
        "STEP is the last action of a rank.",
        "Move it to the end and keep one.",
        "0F0,0B0,0STEP,0REDUCE_GRAD\n",
        step_not_last,
    ),
    Rule(
        "step-stage",
        "STEP is written with the lowest stage of its rank.",
        "Change its stage.",
        "0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD,1STEP\n",
        step_stage,
    ),
)
