"""Context parallelism on real ranks: each has two chunks of every sequence, and no bit differs from one device."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.gates import sampled
from helpers.plans import training_plan
from shardproof.backend.trainer import Trainer
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Precision
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.dynamic.twin import twin
from shardproof.verify.mutations import parse_fault
from shardproof.verify.run.proof_run import one_device


def tiny(
    *,
    model: str = "tiny-gpt",
    samples: int = 4,
    micro: int = 1,
    sequence: int = 24,
    block: int = 3,
    schedule: str = "1F1B",
    dtype: str = "fp32",
    recompute: str = "none",
    mode: str = "exact",
    ring: bool = False,
    changes: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **degrees: Any,
) -> Plan:
    """Clipping is active. Chunks of a sequence are whole blocks of `block` tokens."""
    return training_plan(
        model=model,
        **changes or {},
        samples=samples,
        micro=micro,
        sequence=sequence,
        context_parallel="ring" if ring else None,
        dtype=dtype,
        recompute=recompute,
        schedule=schedule,
        mode=mode,
        gradient_token_block=block,
        reduction_token_block=min(block, 3),
        **train or {},
        **degrees,
    )


DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}


@sampled(
    "plan",
    [
        pytest.param(tiny(cp=2, tp=2, dp=2, sequence_parallel=True, samples=6, micro=3), id="cp2-tp2-dp2-sp-micro3"),
        pytest.param(tiny(cp=3, dp=2, model="tiny-llama", block=2, ring=True, samples=6), id="cp3-dp2-gqa-ring"),
        pytest.param(tiny(cp=2, pp=2, vpp=2, schedule="ZBVZeroBubble", dtype="bf16"), id="cp2-split-backward-bf16"),
        pytest.param(tiny(cp=5, sequence=20, block=2, samples=2, recompute="full"), id="cp5-full-recomputation"),
        pytest.param(
            tiny(cp=2, tp=3, model="tiny-gpt-6h", changes=DROPOUT, recompute="selective"),
            id="cp2-tp3-dropout-selective",
        ),
        pytest.param(
            tiny(cp=4, cp_inner=2, samples=2, ring=True, changes=DROPOUT), id="cp4-heads-of-2-then-ring-dropout"
        ),
        pytest.param(
            tiny(cp=2, cp_inner=2, model="tiny-llama", tp=2, sequence_parallel=True), id="cp2-heads-gqa-tp2-sp"
        ),
        pytest.param(tiny(cp=2, pp=2, schedule="DualPipe", samples=8), id="cp2-replicas"),
        pytest.param(
            tiny(cp=6, cp_inner=3, model="tiny-gpt-6h", recompute="full", samples=2, block=2), id="cp6-heads-of-3"
        ),
        pytest.param(
            tiny(cp=4, cp_inner=2, ep=2, model="tiny-deepseek", samples=2), id="cp4-heads-of-2-ep2-latent-experts-mtp"
        ),
        pytest.param(
            tiny(cp=2, tp=2, ep=2, model="tiny-deepseek", sequence_parallel=True, samples=2),
            id="cp2-tp2-ep2-latent-experts-mtp",
        ),
        pytest.param(
            tiny(cp=2, tp=2, model="tiny-llama", changes={"qk_norm": True}, samples=2), id="cp2-tp2-norms-of-heads"
        ),
    ],
    on_push=2,
)
def test_no_bit_differs_with_context_parallelism(plan: Plan) -> None:
    assert twin(plan) == (plan, [])
    proof = prove(plan, transport="memory", steps=1)
    assert proof.findings == () and proof.report["bits_different"] == 0
    assert proof.report["tensors_compared"] > 100


def test_fast_numerics_over_3_parts_train_as_on_one_device() -> None:
    """Two steps in fp32, whose sums have other orders: a few units of 2^-24 of the loss, which is about 5."""
    plan = tiny(cp=3, tp=2, sequence_parallel=True, block=2, mode="fast", model="tiny-llama", ring=True)
    many, one = (Trainer(each, transport="memory").fit() for each in (plan, one_device(plan)))
    assert many.losses == pytest.approx(one.losses, rel=2e-6) and many.validation_losses == pytest.approx(
        one.validation_losses, rel=2e-6
    )
    assert many.grad_norms == pytest.approx(one.grad_norms, rel=2e-5)


def test_fast_numerics_exchange_heads_and_train_as_on_one_device() -> None:
    plan = tiny(cp=4, cp_inner=2, mode="fast", model="tiny-llama")
    many, one = (Trainer(each, transport="memory").fit() for each in (plan, one_device(plan)))
    assert many.losses == pytest.approx(one.losses, rel=2e-6)
    assert many.grad_norms == pytest.approx(one.grad_norms, rel=2e-5)


def test_a_large_plan_keeps_context_parallelism_in_its_twin() -> None:
    layout = Layout(cp=4, tp=2, dp=4)
    cluster = cluster_preset("dgx-h100", layout.world_size)
    plan = Plan(model_preset("llama2-7b"), cluster, layout, Batch(8, 1, 4096), precision=Precision("fp32"))
    small, changes = twin(plan)
    assert (small.layout.cp, small.layout.world_size, small.batch.sequence) == (
        2,
        8,
        32,
    ) and small.leaf_sizes.gradient_token_block == 4
    assert "layout.cp 4 -> 2: to fit this host." in changes
    proof = prove(tiny(cp=2, samples=2), steps=1)
    assert proof.ok and proof.report["transport"] == "shm"


@pytest.mark.parametrize(
    ("degrees", "inner", "small"),
    [
        ({"cp": 8, "tp": 2, "dp": 1}, 4, (4, 2)),
        ({"cp": 8, "tp": 2, "dp": 2}, 8, (2, 2)),
        ({"cp": 8, "tp": 2, "dp": 2}, 2, (2, 2)),
        ({"cp": 16, "dp": 1}, 4, (8, 2)),
    ],
    ids=["both levels", "heads alone", "no room for both levels", "cp alone"],
)
def test_a_twin_exchanges_heads_as_the_plan_does(degrees: dict[str, int], inner: int, small: tuple[int, int]) -> None:
    layout = Layout(**degrees, cp_inner=inner)
    cluster = cluster_preset("dgx-h100", layout.world_size)
    plan = Plan(model_preset("llama2-7b"), cluster, layout, Batch(8, 1, 4096), precision=Precision("fp32"))
    found, _ = twin(plan)
    assert (found.layout.cp, found.layout.cp_inner) == small


def test_a_dropped_reduction_is_found_on_the_rank_that_has_the_wrong_tokens() -> None:
    """Rank 3 is tensor-parallel rank 1 of the context-parallel rank that has the middle of the sequence."""
    fault = parse_fault("drop-reduction:3:layers.0.mlp.down")
    proof = prove(tiny(cp=2, tp=2, samples=2), transport="memory", steps=1, fault=fault)
    first = proof.report["first_divergence"]
    assert (
        (first["tensor"], first["phase"]) == ("layers.0.mlp", "activation")
        and 3 in first["ranks"]
        and not {0, 1} & set(first["ranks"])
    )


def test_a_dropped_gradient_is_refused_where_all_are_finished_together() -> None:
    with pytest.raises(
        PlanError,
        match=r"with cp=2 all gradients of a stage are finished in one exchange.*Choose a layer, such as layers",
    ):
        parse_fault("drop-reduction:1:layers.0.mlp.down.weight").check(tiny(cp=2, tp=2))


def test_chunks_inside_a_block_of_tokens_are_refused_with_the_blocks_that_admit_them() -> None:
    message = (
        r"cp=2 cuts sequence=24 into chunks of 6 tokens, inside a block of gradient_token_block=4.*among \[1, 2, 3, 6\]"
    )
    with pytest.raises(PlanError, match=message):
        tiny(cp=2, block=4)
