"""With ZeRO and with buckets every action of a real step computes and sends what `core.program` says, to
the byte, on every rank."""

from __future__ import annotations

import pytest

from helpers.gates import in_both_modes
from helpers.plans import plan
from helpers.program import assert_every_action_records_the_program
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import Plan
from shardproof.core.program import Collective, Operation


def plan_of(
    layout: Layout,
    mode: str,
    *,
    model="tiny-gpt",
    samples=8,
    micro=1,
    schedule="1F1B",
    dtype="fp32",
    tied=True,
    bucket_bytes=None,
    early=None,
    shard=None,
    active=None,
    late=None,
) -> Plan:
    return plan(
        layout,
        model=model,
        tied_embeddings=tied,
        samples=samples,
        micro=micro,
        dtype=dtype,
        schedule=schedule,
        max_active_stages=active,
        bucket_bytes=bucket_bytes,
        overlap_grad_reduce=early,
        shard=shard,
        overlap_param_gather=late,
        mode=mode,
        gradient_token_block=8 if layout.cp == 1 else 6,
        reduction_token_block=4 if layout.cp == 1 else 3,
    )


LAYOUTS = [
    pytest.param(Layout(dp=3, zero=1), {"samples": 9}, id="dp3-tied"),
    pytest.param(Layout(dp=5, zero=1), {"samples": 10, "micro": 2, "tied": False}, id="dp5"),
    pytest.param(Layout(tp=2, pp=2, dp=2, zero=1), {"dtype": "bf16"}, id="tp2-pp2-dp2-bf16-tied-over-two-ranks"),
    pytest.param(
        Layout(tp=2, dp=3, sequence_parallel=True, zero=1), {"model": "tiny-llama", "samples": 15}, id="tp2-dp3-sp"
    ),
    pytest.param(Layout(dp=3), {"samples": 6, "bucket_bytes": 2**16}, id="buckets-dp3-tied"),
    pytest.param(
        Layout(tp=2, pp=2, dp=2, zero=1, sequence_parallel=True),
        {"bucket_bytes": 50_000, "tied": False},
        id="buckets-zero-sp",
    ),
    pytest.param(
        Layout(tp=2, dp=2, sequence_parallel=True), {"bucket_bytes": 50_000, "early": True}, id="early-buckets-sp"
    ),
    pytest.param(Layout(cp=2, dp=2, zero=1), {"samples": 4}, id="cp2-dp2-tied"),
    pytest.param(
        Layout(tp=2, cp=2, sequence_parallel=True, zero=1),
        {"samples": 2, "model": "tiny-llama", "tied": False},
        id="tp2-sp-cp2",
    ),
    pytest.param(Layout(pp=2, vpp=2, dp=2, zero=1), {"schedule": "ZBVZeroBubble"}, id="zbv-tied-on-one-rank"),
    pytest.param(Layout(pp=2, dp=6, zero=1), {"samples": 12, "shard": 3}, id="hybrid-3-of-6-tied"),
    pytest.param(Layout(cp=2, dp=4, zero=2), {"samples": 8, "shard": 4, "tied": False}, id="hybrid-cp2"),
    pytest.param(
        Layout(tp=2, pp=2, dp=3, sequence_parallel=True, zero=2),
        {"model": "tiny-llama", "samples": 6, "bucket_bytes": 50_000, "early": True, "schedule": "ZBH1"},
        id="zero2-buckets-during-the-backward",
    ),
    pytest.param(
        Layout(dp=4, zero=2),
        {"samples": 8, "shard": 2, "dtype": "bf16", "bucket_bytes": 50_000, "late": True},
        id="zero2-hybrid-late-gather",
    ),
    pytest.param(
        Layout(pp=2, vpp=2, dp=3, zero=3),
        {"schedule": "Interleaved1F1B", "active": 1, "samples": 6, "dtype": "bf16"},
        id="zero3",
    ),
]


@pytest.mark.parametrize(("layout", "choices", "mode"), in_both_modes(LAYOUTS, fast_on_push=4))
def test_every_action_of_a_step_with_zero_or_buckets_records_the_program(layout, choices, mode):
    assert_every_action_records_the_program(plan_of(layout, mode, **choices))


EXPERTS = [
    pytest.param(Layout(dp=4, tp=2, ep=2, etp=1, zero=2), {"shard": 2}, id="hybrid"),
    pytest.param(Layout(dp=2, cp=2, ep=2, zero=3), {"active": 1}, id="zero3-cp2"),
]


def over_copies(operation: Operation) -> bool:
    """Whether copies share something by it; what is sent to experts depends on the tokens."""
    return isinstance(operation, Collective) and operation.axis.partition("_")[0] in ("dp", "edp")


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize(("layout", "choices"), EXPERTS)
def test_copies_of_experts_share_what_the_program_says(layout, choices, mode):
    plan = plan_of(layout, mode, **{"model": "tiny-moe", "samples": 4, "tied": False, **choices})
    assert {
        operation.axis.partition("_")[0] for operation in assert_every_action_records_the_program(plan, over_copies)
    } == {"dp", "edp"}
