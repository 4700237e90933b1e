"""The layouts of the matrix: every pair of degrees, schedules, precisions, kinds of layers and modes of
recomputation that can be run."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ...backend.unsupported import unsupported
from ...core.base.divisors import divisors
from ...core.base.errors import PlanError
from ...core.base.reduction import cut
from ...core.layout.layout import DEFAULT_ORDER, Layout
from ...core.plan.plan import Plan
from ...core.plan.rules import broken_rules
from ...core.plan.runtime import Offload, Recompute, Runtime
from ...core.plan.sections import Batch, DataParallel, ScheduleChoice
from ...core.schedule import CATALOG
from ..run.given_groups import can_be_given
from .covering import Covering, Feature, Row, Space, cover, first_possible
from .problems import NUM_LAYERS, PROBLEMS, TOKENS, Problem

MAX_RANKS = 16
"""Larger worlds only repeat what smaller ones show, with more threads."""

MANY_RANKS = 100
"""What is possible on so many ranks, and not on `MAX_RANKS`, is too large to run, but not refused."""

PIPELINES: Mapping[str, tuple[str, int, int]] = {
    f"{schedule} {pp}x{vpp}": (schedule, pp, vpp)
    for schedule, pp, vpp in (
        ("1F1B", 1, 1),
        ("1F1B", 2, 1),
        ("1F1B", 3, 1),
        ("1F1B", 5, 1),
        ("1F1B", 8, 1),
        ("GPipe", 4, 1),
        ("Interleaved1F1B", 2, 2),
        ("LoopedBFS", 2, 2),
        ("InterleavedZeroBubble", 2, 2),
        ("ZBH1", 3, 1),
        ("ZBH2", 2, 1),
        ("ZBAuto", 4, 1),
        ("ZBVZeroBubble", 2, 2),
        ("ZBVZeroBubble", 3, 2),
        ("VHalf", 2, 2),
        ("VMin", 3, 2),
        ("DualPipe", 2, 1),
        ("DualPipe", 4, 1),
        ("DualPipeV", 2, 2),
        ("DualPipeV", 3, 2),
        ("Combined1F1B", 2, 2),
        ("Combined1F1B", 6, 1),
    )
}
"""`schedule ranks x stages per rank`: every schedule of the catalog."""

PAIRED = ("Combined1F1B", "DualPipe", "DualPipeV")
"""The schedules with pairs of a forward and a backward, which `ep_comm_overlap` lets run in turns."""

RECOMPUTE: Mapping[str, Recompute] = {
    "none": Recompute(),
    "core": Recompute("selective"),
    "parts": Recompute("selective", modules=("core_attn", "norm", "mlp", "moe")),
    "inner": Recompute("selective", modules=("mlp_act", "moe_act", "mla_up_proj", "shared_experts")),
    "full": Recompute("full"),
    "first": Recompute("full", num_layers=1),
    "spread": Recompute("full", distribute=True),
}
"""Modes of recomputation; of `modules` those that a problem's model has."""

MESSAGES: Mapping[str, tuple[bool | None, bool | None]] = {
    "overlapped": (None, None),
    "together": (False, None),
    "in order": (False, False),
}
"""How messages between stages are sent: `p2p_overlap` and `p2p_batched`."""

KEYS: Mapping[str, tuple[Literal["all_gather", "ring"], bool]] = {
    "all_gather": ("all_gather", False),
    "ring": ("ring", False),
    "heads": ("all_gather", True),
    "heads, ring": ("ring", True),
}
"""How queries meet keys: how these are sent, and whether neighbours exchange heads for tokens first: all of cp, or with
a ring the fewest that cut it."""
OFFLOAD: Mapping[str, Offload] = {
    "nothing": Offload(),
    "a layer and half": Offload(activations=1, optimizer=0.5),
    "all": Offload(activations=NUM_LAYERS, optimizer=1.0),
    "half, with weights": Offload(optimizer=0.5, masters=True),
}
"""What rests in host memory: of layers' saved tensors, of the optimizer's moments, and of its fp32 weights."""

CUT_BY_TOKENS = ("batch", "numerics")
"""The sections of a plan that say how many tokens there are, and in what blocks."""

THREAD_S, PROCESS_S = 0.2, 0.8
"""Seconds of one core that a rank takes besides its tokens: ranks whose groups are given are processes."""

BUCKET_BYTES = 2**14
"""Several buckets in every stage."""

FACTORS: Mapping[str, tuple[str | int, ...]] = {
    "problem": tuple(PROBLEMS),
    "pipeline": tuple(PIPELINES),
    "tp": (1, 2, 3, 4, 5, 6, 8),
    "dp": (1, 2, 3, 4, 5, 6),
    "cp": (1, 2, 3, 4),
    "ep": (1, 2, 3, 4),
    "etp": ("tp", 1, 2, 3),
    "sequence": ("whole", "cut"),
    "micro": (1, 2, 3),
    "split": ("even", "uneven"),
    "recompute": tuple(RECOMPUTE),
    "offload": tuple(OFFLOAD),
    "order": (DEFAULT_ORDER, "pp-dp-tp-cp-ep"),
    "overlap": ("no", "tp"),
    "ep_comm_overlap": ("no", "yes"),
    "keys": tuple(KEYS),
    "messages": tuple(MESSAGES),
    "zero": (0, 1, 2, 3),
    "shard": ("all", "some"),
    "buckets": ("one", "several", "overlapped"),
    "groups": ("ours", "given"),
}
"""What a layout of the matrix chooses; the first value of each is the plain one."""

_values = operator.itemgetter(*FACTORS)


@dataclass(frozen=True)
class Refusal:
    """Why a layout is not run, in the words of the rules: what was given, and what would be admitted."""

    problems: tuple[str, ...]


def matrix_space(max_ranks: int = MAX_RANKS) -> Space:
    """The rows of `FACTORS` that can be run on so many ranks, and the features whose pairs are to meet."""
    plain = {name: values[0] for name, values in FACTORS.items()}
    return Space(
        FACTORS,
        plain=(
            plain,
            {**plain, "cp": 2, "dp": 2},
            {**plain, "dp": 2, "zero": 1},
            {**plain, "problem": next(name for name, problem in PROBLEMS.items() if problem.is_moe)},
        ),
        features=features,
        admits=lambda row: (
            isinstance(plan := plan_of(row, max_ranks), Plan) and (row["groups"] == "ours" or can_be_given(plan))
        ),
        too_large=lambda row: plan_of(row, max_ranks) is None,
        cost=_cost,
        group=reference_of,
        varied=frozenset(
            {
                "problem",
                "sequence",
                "micro",
                "recompute",
                "offload",
                "order",
                "overlap",
                "ep_comm_overlap",
                "keys",
                "messages",
                "split",
                "buckets",
            }
        ),
    )


@functools.cache
def matrix() -> Covering:
    """The layouts of the matrix: pairwise covering rows."""
    return cover(matrix_space(), candidates=8)


@functools.cache
def refusals() -> tuple[tuple[tuple[Feature, ...], Refusal], ...]:
    """The single features and the pairs of features that the rules refuse on any number of ranks up to `MANY_RANKS`."""
    wide = matrix_space(MANY_RANKS)
    given = [*(((feature,), row) for feature, row in matrix().impossible), *matrix().left]
    return tuple(
        (features, refusal)
        for features, row in given
        if isinstance(refusal := plan_of(row, MANY_RANKS), Refusal) and first_possible(wide, row, features) is None
    )


def features(row: Row) -> tuple[Feature, ...]:
    """What a row combines. Degrees of experts count where there are experts, the way of keys where they are sent, the
    split of the batch where it is split."""
    return _features(_chosen(_values(row)))


@functools.cache
def _features(values: tuple[str | int, ...]) -> tuple[Feature, ...]:
    row = dict(zip(FACTORS, values, strict=True))
    problem = PROBLEMS[str(row["problem"])]
    schedule, pp, _ = PIPELINES[str(row["pipeline"])]
    idle = _idle(str(row["pipeline"]), dp=int(row["dp"]), cp=int(row["cp"]), zero=int(row["zero"])) | {
        "problem",
        "pipeline",
    }
    idle |= (set() if problem.is_moe else {"ep", "etp"}) | (set() if row["dp"] != 1 or row["cp"] != 1 else {"zero"})
    idle |= {"groups"} if num_ranks(row) == 1 else set()
    named = [item for item in row.items() if item[0] not in idle]
    return (("schedule", schedule), ("pp", pp), *named, ("cuts", _cuts(row)), *problem.features)


def _cuts(row: Row) -> str:
    """What tensor and context parallelism cut between them: a tensor-parallel rank has all tokens or its own, of a
    sequence or a part of one. What two of these meet is not shown by pairs of degrees alone."""
    tokens = "own tokens" if row["sequence"] == "cut" else "all tokens"
    return f"{tokens if row['tp'] != 1 else 'no tp'} of {'a part' if row['cp'] != 1 else 'a sequence'}"


@functools.cache
def _chosen(values: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """The values of a row with the plain ones of those factors that do nothing in it: such rows have one plan."""
    row = dict(zip(FACTORS, values, strict=True))
    idle = _idle(str(row["pipeline"]), dp=int(row["dp"]), cp=int(row["cp"]), zero=int(row["zero"]))
    return _values({**row, "keys": keys_of(row), **{name: FACTORS[name][0] for name in idle}})


@functools.cache
def _idle(pipeline: str, *, dp: int, cp: int, zero: int) -> frozenset[str]:
    """The factors whose value changes nothing in a row with these."""
    schedule, pp, _ = PIPELINES[pipeline]
    works = {
        "keys": cp != 1,
        "split": dp != 1,
        "messages": pp != 1,
        "ep_comm_overlap": schedule in PAIRED,
        "shard": dp != 1 and zero != 0,
        "buckets": dp != 1 and cp == 1,
    }
    return frozenset(name for name, does in works.items() if not does)


def num_ranks(row: Row) -> int:
    """Ranks of a row."""
    _, pp, _ = PIPELINES[str(row["pipeline"])]
    return pp * math.prod(int(row[name]) for name in ("tp", "dp", "cp"))


def plan_of(row: Row, max_ranks: int = MAX_RANKS) -> Plan | Refusal | None:
    """The plan of a row with the plainest sizes that admit it, or why there is none; None for more
    ranks than `max_ranks`."""
    if num_ranks(row) > max_ranks:
        return None
    return _plan_of(_chosen(_values({**row, "groups": FACTORS["groups"][0]})))  # of which a plan knows nothing


@functools.cache
def _plan_of(values: tuple[str | int, ...]) -> Plan | Refusal:
    row = dict(zip(FACTORS, values, strict=True))
    schedule, pp, vpp = PIPELINES[str(row["pipeline"])]
    tp, dp, cp, ep, micro = (int(row[name]) for name in ("tp", "dp", "cp", "ep", "micro"))
    try:
        layout = Layout(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=cp,
            cp_inner=cp_inner_of(cp, str(row["keys"])),
            ep=ep,
            etp=None if row["etp"] == "tp" else int(row["etp"]),
            vpp=vpp,
            sequence_parallel=row["sequence"] == "cut",
            zero=int(row["zero"]),
            order=str(row["order"]),
            stages=stages(pp * vpp),
        )
    except PlanError as error:
        return Refusal(error.problems)
    samples = micro * _microbatches(schedule, pp=pp, dp=dp, micro=micro, short=row["split"] == "uneven" and dp > 1)
    choices = {
        "schedule": ScheduleChoice(schedule, max_active_stages=1 + (schedule in PAIRED) if row["zero"] == 3 else None),
        "data_parallel": data_parallel_of(row),
        "recompute": recompute_of(PROBLEMS[str(row["problem"])], str(row["recompute"])),
        "offload": offload_of(PROBLEMS[str(row["problem"])], str(row["offload"])),
        "runtime": Runtime(
            tp_comm_overlap=True if row["overlap"] == "tp" else None,
            ep_comm_overlap=True if row["ep_comm_overlap"] == "yes" and schedule in PAIRED else None,
            p2p_overlap=MESSAGES[str(row["messages"])][0] if pp > 1 else None,
            p2p_batched=MESSAGES[str(row["messages"])][1] if pp > 1 else None,
            context_parallel=None if cp == 1 else KEYS[str(row["keys"])][0],
        ),
    }
    return _first_plan(PROBLEMS[str(row["problem"])], layout, samples=samples, micro=micro, choices=choices)


def keys_of(row: Row) -> str:
    """How queries meet keys: where all of cp are neighbours there is one level only."""
    keys = str(row.get("keys", "all_gather"))
    one_level = keys == "heads, ring" and cp_inner_of(int(row["cp"]), keys) == row["cp"]
    return "heads" if one_level else keys


def cp_inner_of(cp: int, keys: str) -> int:
    """Neighbours that exchange heads for tokens."""
    how, exchanges = KEYS[keys]
    if not exchanges or cp == 1:
        return 1
    return cp if how == "all_gather" else divisors(cp)[1]


def data_parallel_of(row: Row) -> DataParallel:
    """How copies share gradients and weights: `some` shards over the largest part of the data-parallel ranks
    that is not all of them."""
    dp, cp, is_sharded, buckets = int(row["dp"]), int(row["cp"]), row["zero"] != 0, row["buckets"]
    buckets = "one" if dp == 1 or cp > 1 else buckets
    late = buckets == "overlapped"
    return DataParallel(
        shard=cp * divisors(dp)[-2] if row["shard"] == "some" and is_sharded and dp > 1 else None,
        bucket_bytes=None if buckets == "one" else BUCKET_BYTES,
        overlap_grad_reduce=True if late else None,
        overlap_param_gather=True if late and is_sharded else None,
    )


def recompute_of(problem: Problem, name: str) -> Recompute:
    """One of `RECOMPUTE`, of the modules that the problem's model has."""
    chosen = RECOMPUTE[name]
    if chosen.mode != "selective":
        return chosen
    lacks = {"moe", "moe_act"} if not problem.is_moe else set()
    lacks |= {"mla_up_proj"} if problem.attention != "mla" else set()
    lacks |= {"shared_experts"} if "num_shared_experts" not in problem.model else set()
    return replace(chosen, modules=tuple(module for module in chosen.modules if module not in lacks))


def offload_of(problem: Problem, name: str) -> Offload:
    """One of `OFFLOAD`, with fp32 weights where layers compute with others; of Muon no moments."""
    chosen = OFFLOAD[name]
    if problem.optimizer == "muon":
        return Offload(activations=chosen.activations)
    return replace(chosen, masters=chosen.masters and problem.dtype != "fp32")


def _first_plan(
    problem: Problem, layout: Layout, *, samples: int, micro: int, choices: Mapping[str, Any]
) -> Plan | Refusal:
    """The plan with the first of `TOKENS` that a layout can cut. Otherwise what a layout breaks however tokens are cut,
    or the shortest refusal where there is no such thing."""
    refusals: list[Refusal] = []
    for tokens in TOKENS:
        sections = {**problem.sections(layout, tokens, Batch(samples, micro, tokens.sequence)), **choices}
        try:
            plan = Plan(**sections)
        except PlanError as error:
            if not refusals and (
                broken := broken_rules({name: noun for name, noun in sections.items() if name not in CUT_BY_TOKENS})
            ):
                return Refusal(tuple(each.sentence for each in broken))
            refusals.append(Refusal(error.problems))
            continue
        problems = unsupported(plan)
        return Refusal(tuple(problems)) if problems else plan
    return min(refusals, key=lambda refusal: len(refusal.problems))


def _cost(row: Row, alone: bool) -> float:
    """Seconds of one core, roughly: threads that talk, tokens, and the reference for the first row that needs it."""
    plan = plan_of(row)
    assert isinstance(plan, Plan)
    tokens_s = plan.batch.global_size * plan.batch.sequence * (3 if plan.model.is_moe else 2) / 300
    ranks_s = (PROCESS_S if row["groups"] == "given" else THREAD_S) * plan.layout.world_size
    return ranks_s + (2 if alone else 1) * tokens_s


def expected_cost(row: Row) -> float:
    """Seconds of one core that a row takes, roughly, its reference included."""
    return _cost(row, True)


def reference_of(row: Row) -> tuple[object, ...]:
    """What makes two rows have one reference."""
    plan = plan_of(row)
    assert isinstance(plan, Plan)
    return plan.model, plan.batch.global_size, plan.batch.sequence, plan.numerics


def stages(num_stages: int) -> str | None:
    """The layers of the matrix' models over stages as evenly as possible, the last stages without any
    where there are too few.

    >>> stages(3), stages(2), stages(5)
    (None, 'Ett|tL', 'Et|t|t||L')
    """
    if NUM_LAYERS % num_stages == 0:
        return None
    intervals = [cut(NUM_LAYERS, num_stages, stage) for stage in range(num_stages)]
    return f"E{'|'.join('t' * (hi - lo) for lo, hi in intervals)}L"


def _microbatches(schedule: str, *, pp: int, dp: int, micro: int, short: bool) -> int:
    """The fewest microbatches of a step for which the schedule exists: six samples at least, and in a pipeline
    two rounds unless they are long. With `short` the last data-parallel rank has fewer than the others, and the
    rounds are two or more."""
    least = max(-(-6 // (dp * micro)), 2 if short or (pp > 1 and dp * micro <= 6) else 1)
    exists, multiple = CATALOG[schedule].condition, CATALOG[schedule].multiple
    counts = range(least, least + 4 * pp)
    rounds = next((m for m in counts if exists(pp, m) is None and not (short and exists(pp, m - multiple))), least)
    return rounds * dp - short * multiple
