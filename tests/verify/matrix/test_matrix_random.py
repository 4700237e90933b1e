"""Random layouts of random problems, drawn by Hypothesis: each holds on every floor of proof, or is refused
with what would be admitted.

`RANDOM_LAYOUTS=200` runs so many of them on real ranks; the suite runs a few.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from shardproof.backend.unsupported import unsupported
from shardproof.core.base.divisors import divisors
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.layout import AXES, Layout
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Runtime
from shardproof.core.plan.sections import Batch, DataParallel, ScheduleChoice
from shardproof.core.schedule import CATALOG
from shardproof.verify.matrix.layouts import PAIRED, RECOMPUTE, matrix_space, recompute_of
from shardproof.verify.matrix.matrix import prove_plan
from shardproof.verify.matrix.problems import NUM_LAYERS, PROBLEMS, Problem, Tokens
from shardproof.verify.run.references import References
from shardproof.verify.symbolic.static import prove_static

MAX_RANKS = 8
NUM_RUNS = int(os.environ.get("RANDOM_LAYOUTS", "6"))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A problem of the matrix with what else its kind of model can have: norms of heads, experts with
    losses and a capacity."""
    problem = PROBLEMS[draw(st.sampled_from(sorted(PROBLEMS)))]
    model: dict[str, Any] = dict(problem.model)
    train: dict[str, Any] = dict(problem.train)
    if problem.attention != "mla":
        model["qk_norm"] = draw(st.booleans())
    if problem.is_moe:
        model["expert_capacity_factor"] = draw(st.sampled_from((None, 0.5, 1.0, 1.5)))
        train["router_aux_loss"] = draw(st.sampled_from((0.0, 0.01)))
        train["router_z_loss"] = draw(st.sampled_from((0.0, 1e-3)))
        train["router_jitter"] = draw(st.sampled_from((0.0, 0.1)))
    return replace(problem, model=model, train=train, _specs={})


@st.composite
def layer_cuts(draw: st.DrawFn, num_stages: int) -> str:
    """The layers of the matrix' models over stages anyhow; stages may have none."""
    cuts = sorted(draw(st.integers(0, NUM_LAYERS)) for _ in range(num_stages - 1))
    counts = [hi - lo for lo, hi in zip((0, *cuts), (*cuts, NUM_LAYERS), strict=True)]
    return f"E{'|'.join('t' * count for count in counts)}L"


@st.composite
def layouts(draw: st.DrawFn, is_moe: bool) -> tuple[str, Layout]:
    """A schedule and a layout of at most eight ranks, often one that cannot be."""
    schedule = draw(st.sampled_from(sorted(CATALOG)))
    pp = draw(st.sampled_from((1, 2, 3, 4)))
    vpp = CATALOG[schedule].nearest_vpp(draw(st.sampled_from((1, 2, 3)))) if pp > 1 else 1
    left = MAX_RANKS // pp
    tp = draw(st.integers(1, left))
    cp = draw(st.integers(1, max(1, left // tp)))
    dp = draw(st.integers(1, max(1, left // tp // cp)))
    ranks = tp * cp * dp
    etp = draw(st.sampled_from([None, *divisors(ranks)])) if is_moe else None
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        cp_inner=draw(st.sampled_from(divisors(cp))),
        etp=etp,
        zero=draw(st.integers(0, 3)) if dp * cp > 1 else 0,
        ep=draw(st.sampled_from([n for n in divisors(ranks) if ranks % (n * (etp or tp)) == 0])) if is_moe else 1,
        vpp=vpp,
        sequence_parallel=draw(st.booleans()),
        order="-".join(draw(st.permutations(AXES))),
        stages=draw(layer_cuts(pp * vpp)),
    )
    return (schedule if pp > 1 or CATALOG[schedule].nearest_vpp(1) == 1 else "1F1B"), layout


@st.composite
def tokens(draw: st.DrawFn, cp: int) -> Tokens:
    """A short sequence and blocks of it; with context parallelism mostly of chunks that are whole blocks."""
    block = draw(st.integers(1, 4))
    if cp == 1 or draw(st.integers(0, 9)) == 0:
        return Tokens(draw(st.integers(6, 20)), draw(st.integers(2, 9)), block)
    return Tokens(
        2 * cp * block * draw(st.sampled_from((1, 2))),
        block,
        draw(st.sampled_from([n for n in range(1, block + 1) if block % n == 0])),
    )


@st.composite
def plans(draw: st.DrawFn, problem: Problem) -> Plan | PlanError:
    """A plan, or the error that says why it is none."""
    schedule, layout = draw(layouts(problem.is_moe))
    chosen = draw(tokens(layout.cp))
    micro = draw(st.integers(1, 3))
    rounds = draw(st.integers(1, 3)) if CATALOG[schedule].condition(layout.pp, 1) is None else 2 * layout.pp
    less = draw(st.integers(0, layout.dp - 1))  # so many ranks have one microbatch less
    recompute = recompute_of(problem, draw(st.sampled_from(sorted(RECOMPUTE))))
    overlap = True if draw(st.booleans()) else None
    keys = draw(st.sampled_from(("all_gather", "ring"))) if layout.cp > 1 else None
    shard = layout.cp * draw(st.sampled_from(divisors(layout.dp))) if layout.zero else None
    ahead = 1 + (schedule in PAIRED) if layout.zero == 3 else None
    try:
        return problem.plan(
            layout,
            chosen,
            Batch(max(1, rounds * layout.dp - less) * micro, micro, chosen.sequence),
            schedule=ScheduleChoice(schedule, max_active_stages=ahead),
            data_parallel=DataParallel(shard=None if shard == layout.dp * layout.cp else shard),
            recompute=recompute,
            runtime=Runtime(tp_comm_overlap=overlap, context_parallel=keys),
        )
    except PlanError as error:
        return error


ADVICE = ("Use ", "Choose ", "Set ", "Leave ", "Give ", "Add ", "Write ")


@settings(max_examples=NUM_RUNS, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=problems().flatmap(plans), seed=st.integers(0, 9))
def test_a_random_layout_has_the_bits_of_one_device_or_is_refused_with_advice(
    plan: Plan | PlanError, seed: int
) -> None:
    problems = plan.problems if isinstance(plan, PlanError) else unsupported(plan)
    event("refused" if problems else "run")
    assert all(any(word in problem for word in ADVICE) for problem in problems), problems
    if isinstance(plan, Plan) and not problems:
        seeded = replace(plan, train=replace(plan.train, seed=seed))
        outcome = prove_plan(seeded, matrix_space().plain[0], References(most=1), steps=1)
        assert not outcome.findings, f"{seeded.to_toml()}\n{outcome.line}"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=problems().flatmap(plans))
def test_no_random_layout_that_runs_is_refused_by_rules_or_symbols(plan: Plan | PlanError) -> None:
    problems = plan.problems if isinstance(plan, PlanError) else unsupported(plan)
    event("refused" if problems else "proved")
    assert all(any(word in problem for word in ADVICE) for problem in problems), problems
    if isinstance(plan, Plan) and not problems:
        proof = prove_static(plan)
        assert proof.ok, f"{plan.to_toml()}\n{proof.text}"
