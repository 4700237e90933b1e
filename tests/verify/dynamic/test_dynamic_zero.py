"""ZeRO on real ranks: each copy of a stage keeps a part of its gradients and optimizer state, and no bit
differs from one device."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from helpers.gates import sampled
from helpers.plans import product_plan
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.backend.unsupported import unsupported
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Numerics, ScheduleChoice
from shardproof.core.program.buckets import gradient_buckets
from shardproof.core.schedule.action import Kind
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.mutations import parse_fault


def tiny(
    *,
    model: str = "tiny-gpt",
    samples: int = 4,
    micro: int = 1,
    schedule: str = "1F1B",
    dtype: str = "fp32",
    tied: bool = True,
    bucket_bytes: int | None = None,
    overlap: bool | None = None,
    late: bool | None = None,
    shard: int | None = None,
    active: int | None = None,
    **degrees,
) -> Plan:
    """A batch of sequences of 24 tokens, clipped; blocks are small enough for every cut."""
    layout = Layout(zero=degrees.pop("zero", 1), **degrees)
    return product_plan(
        layout,
        model=model,
        tied_embeddings=tied,
        samples=samples,
        micro=micro,
        dtype=dtype,
        schedule=schedule,
        max_active_stages=active,
        mode="exact",
        **{
            "reduction_token_block": 4,
            **(
                {"gradient_token_block": 2, "reduction_token_block": 2}
                if layout.cp > 1
                else {"gradient_token_block": 8}
            ),
        },
        clip_grad_norm=0.1,
        bucket_bytes=bucket_bytes,
        overlap_grad_reduce=overlap,
        overlap_param_gather=late,
        shard=shard,
        steps=2,
        learning_rate=0.01,
    )


@sampled(
    "plan",
    [
        pytest.param(tiny(tp=2, pp=2, dp=2), id="tp2-pp2-dp2-table-tied-over-two-ranks"),
        pytest.param(tiny(pp=2, vpp=2, dp=2, schedule="ZBVZeroBubble"), id="split-backward-table-tied-on-one-rank"),
        pytest.param(tiny(cp=2, tp=2, dp=2, sequence_parallel=True, samples=3), id="cp2-tp2-dp2-sp"),
        pytest.param(tiny(cp=2, pp=3, stages="Ett||tL", samples=2, tied=False), id="cp2-pp3-an-empty-stage"),
        pytest.param(tiny(model="tiny-moe", tp=2, etp=1, ep=2, dp=2, tied=False), id="experts-with-other-copies"),
        pytest.param(tiny(model="tiny-moe", cp=2, dp=2, ep=2, tied=False), id="experts-and-cp"),
        pytest.param(tiny(dp=5, samples=7, zero=2), id="zero2-dp5-uneven-samples"),
        pytest.param(
            tiny(dp=3, pp=2, vpp=2, zero=3, active=1, schedule="ZBVZeroBubble", dtype="bf16", samples=6),
            id="zero3-zbv-bf16",
        ),
        pytest.param(
            tiny(dp=2, pp=2, zero=3, active=2, schedule="DualPipe", samples=8), id="zero3-replicas-crossed-table"
        ),
        pytest.param(tiny(dp=6, shard=3, samples=7), id="hybrid-3-of-6-uneven-samples"),
        pytest.param(tiny(cp=2, dp=2, shard=2, zero=3, active=1, samples=3), id="hybrid-cp2-zero3"),
        pytest.param(tiny(model="tiny-moe", dp=4, tp=2, ep=2, etp=1, shard=2, tied=False), id="hybrid-experts"),
        pytest.param(tiny(dp=3, pp=2, zero=2, bucket_bytes=30_000, late=True, samples=6), id="late-gather"),
    ],
    on_push=2,
)
def test_no_bit_differs_with_sharded_optimizer_states(plan: Plan) -> None:
    proof = prove(plan, transport="memory", steps=2)
    assert proof.findings == () and proof.changes == () and proof.report["bits_different"] == 0


@sampled(
    ("plan", "num_buckets"),
    [
        pytest.param(tiny(dp=3, zero=0, bucket_bytes=2**16), 9, id="dp3"),
        pytest.param(tiny(dp=2, bucket_bytes=1, tied=False), 29, id="one-parameter-each-zero1"),
        pytest.param(
            tiny(tp=2, dp=2, sequence_parallel=True, bucket_bytes=50_000, overlap=True, model="tiny-moe"),
            5,
            id="moe-sp-zero1-early",
        ),
        pytest.param(
            tiny(pp=2, vpp=2, dp=2, zero=0, bucket_bytes=50_000, overlap=True, schedule="ZBVZeroBubble"),
            5,
            id="split-backward-early",
        ),
        pytest.param(
            tiny(pp=2, dp=2, samples=8, bucket_bytes=1, overlap=True, schedule="DualPipe", tied=False),
            14,
            id="replicas-early",
        ),
        pytest.param(tiny(tp=2, pp=2, dp=2, sequence_parallel=True, bucket_bytes=50_000), 3, id="tp2-pp2-dp2-sp-zero1"),
    ],
    on_push=2,
)
def test_no_bit_differs_with_buckets(plan: Plan, num_buckets: int) -> None:
    assert len(gradient_buckets(plan, 0)) == num_buckets
    proof = prove(plan, transport="memory", steps=2)
    assert proof.findings == () and proof.changes == () and proof.report["bits_different"] == 0


@sampled("name", ["layers.0.mlp.down.weight", "embedding.tokens.weight"], on_push=1)
def test_a_reduction_that_a_rank_drops_is_found_in_its_part(name: str) -> None:
    proof = prove(tiny(dp=2), transport="memory", steps=1, fault=parse_fault(f"drop-reduction:1:{name}"))
    assert not proof.ok and name in proof.findings[0].where and "rank 1" in proof.findings[0].where


def test_over_gloo_and_in_fast_numerics_within_the_bounds() -> None:
    proof = prove(replace(tiny(dp=3, samples=3), numerics=Numerics("fast")), steps=2)
    assert proof.ok and proof.changes == ("numerics.mode fast -> exact: only exact numerics promise bits.",)
    assert proof.report["fast"]["tensors"] > 100


def test_a_schedule_file_with_its_own_gathers_runs_and_has_the_bits_of_one_device(tmp_path) -> None:
    file = tmp_path / "gathers.csv"
    file.write_text(
        "0UNSHARD,0F0,0F1,0RESHARD,2UNSHARD,2F0,2B0,2F1,2B1,2RESHARD,0UNSHARD,0B0,0B1,0RESHARD\n"
        "1UNSHARD,1F0,1F1,1RESHARD,3UNSHARD,3F0,3B0,3F1,3B1,3RESHARD,1UNSHARD,1B0,1B1,1RESHARD\n"
    )
    plan = tiny(dp=3, pp=2, vpp=2, zero=3, samples=6, schedule="Interleaved1F1B")
    plan = replace(plan, schedule=ScheduleChoice(file=str(file)))
    assert unsupported(plan) == []
    proof = prove(plan, transport="memory", steps=2)
    assert proof.findings == () and proof.changes == () and proof.report["bits_different"] == 0


def weights_between_steps(transport, plan):
    """Bytes of this rank's weights that are there between two steps, and of what it would have whole."""
    rank = TrainingRank(transport, plan)
    rank.step(0)
    loss = rank.evaluate()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in rank._weights}
    return sum(storages.values()), 4 * sum(shard.storage.numel() for shard in rank.shards), loss


def test_between_steps_and_after_an_evaluation_only_parts_of_the_weights_are_left() -> None:
    found = run_threads(
        MemoryWorld(3, timeout_s=60), weights_between_steps, tiny(dp=3, zero=3, active=1, tied=False, samples=3)
    )
    whole = found[0][1]
    assert (
        sum(num_bytes for num_bytes, _, _ in found) == pytest.approx(whole, rel=0.01)
        and len({loss for _, _, loss in found}) == 1
    )


def test_zero_3_with_gradients_reduced_during_every_backward_is_within_the_bounds_over_gloo() -> None:
    plan = tiny(dp=2, zero=3, active=1, bucket_bytes=30_000, overlap=True, schedule="ZBH1")
    proof = prove(replace(plan, numerics=Numerics("fast")), steps=2)
    assert proof.ok and proof.report["fast"]["tensors"] > 100


def reduction_under_the_last_backward(transport, plan):
    """Whether the first bucket was reduced while the last backward, which waits for that, went on; None where
    it waits for nothing."""
    rank = TrainingRank(transport, plan)
    if rank._early is None:
        _, spans = rank.step(0)
        ends = [span.end_s for span in spans if span.action.kind is Kind.B]
        assert next(span.start_s for span in spans if span.action.kind is Kind.REDUCE_GRAD) >= max(ends)
        return None
    begun, seen = threading.Event(), []
    wait_for_first, gradients = rank._early.wait_for_first, rank.stages[0].gradients
    expect = gradients.expect

    def waits_for_first(stage):
        wait_for_first(stage)
        begun.set()

    def expects(count, *, changed, wait):
        def changed_and_reduced():
            changed()
            if not seen and gradients.is_ready(gradients.buckets[0]):
                seen.append(begun.wait(60))

        expect(count, changed=changed_and_reduced, wait=wait)

    rank._early.wait_for_first, gradients.expect = waits_for_first, expects
    rank.step(0)
    return seen


@pytest.mark.parametrize(("overlap", "found"), [(True, [True]), (False, None)])
def test_buckets_are_reduced_under_the_last_backward_where_the_plan_says_so(overlap: bool, found) -> None:
    plan = tiny(dp=2, zero=0, samples=2, bucket_bytes=1, overlap=overlap)
    assert run_threads(MemoryWorld(2, timeout_s=120), reduction_under_the_last_backward, plan) == [found] * 2
