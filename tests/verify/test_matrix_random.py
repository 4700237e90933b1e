"""Random layouts of random problems, drawn by Hypothesis: each has the bits of one device, or is refused with what would be admitted."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from shardproof.backend.unsupported import unsupported
from shardproof.core.errors import PlanError
from shardproof.core.layout import AXES, Layout
from shardproof.core.plan import Batch, Plan, Runtime, ScheduleChoice
from shardproof.core.schedules import CATALOG
from shardproof.verify.matrix import prove_plan
from shardproof.verify.matrix_layouts import RECOMPUTE, matrix_space, recompute_of
from shardproof.verify.matrix_problems import NUM_LAYERS, PROBLEMS, Problem, Tokens
from shardproof.verify.references import References

MAX_RANKS = 8


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
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=draw(st.sampled_from([n for n in range(1, tp * cp * dp + 1) if tp * cp * dp % (n * tp) == 0])) if is_moe else 1,
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
        2 * cp * block * draw(st.sampled_from((1, 2))), block, draw(st.sampled_from([n for n in range(1, block + 1) if block % n == 0]))
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
    try:
        return problem.plan(
            layout,
            chosen,
            Batch(max(1, rounds * layout.dp - less) * micro, micro, chosen.sequence),
            schedule=ScheduleChoice(schedule),
            recompute=recompute,
            runtime=Runtime(tp_comm_overlap=overlap, context_parallel=keys),
        )
    except PlanError as error:
        return error


ADVICE = ("Use ", "Choose ", "Set ", "Leave ", "Give ", "Add ", "Write ")


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=st.sampled_from(sorted(PROBLEMS)).flatmap(lambda name: plans(PROBLEMS[name])), seed=st.integers(0, 9))
def test_a_random_layout_has_the_bits_of_one_device_or_is_refused_with_advice(plan: Plan | PlanError, seed: int) -> None:
    problems = plan.problems if isinstance(plan, PlanError) else unsupported(plan)
    event("refused" if problems else "run")
    assert all(any(word in problem for word in ADVICE) for problem in problems), problems
    if isinstance(plan, Plan) and not problems:
        seeded = replace(plan, train=replace(plan.train, seed=seed))
        outcome = prove_plan(seeded, matrix_space().plain[0], References(most=1), steps=1)
        assert not outcome.findings, f"{seeded.to_toml()}\n{outcome.line}"


@settings(max_examples=200, deadline=None)
@given(plan=st.sampled_from(sorted(PROBLEMS)).flatmap(lambda name: plans(PROBLEMS[name])))
def test_every_refusal_of_a_random_layout_gives_advice(plan: Plan | PlanError) -> None:
    problems = plan.problems if isinstance(plan, PlanError) else unsupported(plan)
    assert all(any(word in problem for word in ADVICE) for problem in problems), problems
