"""A twin keeps the axes, the schedule and the divisibility, and says every change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import product_plan
from shardproof.core.base.divisors import divisors
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.model.parameters import count_parameters
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.sections import Batch, DataParallel, Numerics, Precision, ScheduleChoice
from shardproof.core.plan.train import Train
from shardproof.verify.dynamic.twin import MAX_THREADS, MAX_WORLD_SIZE, proof_transport, twin


def plan(model: str, layout: Layout, batch: Batch, schedule: str = "1F1B", **more: object) -> Plan:
    cluster = "dgx-h100" if layout.world_size % 8 == 0 else "this-host"
    sizes = {"samples": batch.global_size, "micro": batch.micro_size, "sequence": batch.sequence}
    return product_plan(layout, model=model_preset(model), cluster=cluster, schedule=schedule, **sizes, **more)


def gpt3() -> Plan:
    """The example of the interface: 1,024 devices, bf16, selective recompute, ZeRO 1, sequence
    parallel, fast numerics."""
    layout = Layout(tp=8, pp=8, dp=16, sequence_parallel=True, zero=1)
    return plan(
        "gpt3-175b", layout, Batch(1536, 1, 2048), precision=Precision("bf16"), recompute=Recompute("selective")
    )


def test_gpt3_on_1024_devices_becomes_8_ranks_with_every_axis_kept() -> None:
    small, changes = twin(gpt3())
    assert (small.layout.tp, small.layout.pp, small.layout.dp) == (2, 2, 2)
    assert small.schedule == gpt3().schedule and small.num_microbatches == 4
    assert small.model.vocab_size % 2 == 1, "50257 is odd, so the twin's vocabulary is cut unevenly too"
    assert small.model.tied_embeddings and small.model.bias and small.model.position == "learned"
    said = " ".join(changes)
    for word in ("fast -> exact", "tp 8 -> 2", "96 -> 4"):
        assert word in said
    assert small.layout.sequence_parallel and "parallel" not in said, "the backend runs sequence parallelism"
    assert small.precision == Precision("bf16") and small.recompute == Recompute("selective")


def test_a_plan_that_fits_is_its_own_twin() -> None:
    whole = plan(
        "tiny-gpt", Layout(tp=2, pp=2, dp=2), Batch(8, 1, 32), precision=Precision("fp32"), numerics=Numerics("exact")
    )
    assert twin(whole) == (whole, [])


def test_a_twin_draws_its_weights_instead_of_loading_those_of_the_whole() -> None:
    small, changes = twin(replace(gpt3(), train=Train(load="gpt3")))
    assert small.train.load is None and "train.load gpt3 -> None: to fit this host." in changes


@pytest.mark.parametrize("data", ["/not/here/news_text_document", "s3://bucket/news", "1 /not/here/a 2 s3://b/c"])
def test_a_twin_does_not_look_for_data_that_are_not_on_this_machine(data) -> None:
    small, _ = twin(replace(gpt3(), train=Train(data=data, split="9,1")))
    assert (small.train.data, small.train.split) == (Train().data, None)
    here, _ = twin(replace(gpt3(), train=Train(data=__file__, split="9,1")))
    assert (here.train.data, here.train.split) == (__file__, "9,1")


def test_a_twin_has_the_id_that_its_sequences_are_filled_up_with() -> None:
    small, _ = twin(replace(gpt3(), train=Train(padded=True, ignore_token=50256)))
    assert small.train.ignore_token == 50256 < small.model.vocab_size <= 50258


def test_only_what_the_backend_lacks_changes_in_a_plan_that_fits() -> None:
    whole = plan("tiny-gpt", Layout(dp=3, zero=2), Batch(6, 2, 32), precision=Precision("bf16"))
    small, changes = twin(whole)
    assert small.model == whole.model and small.batch == whole.batch and small.layout == whole.layout
    assert small.precision == whole.precision and len(changes) == 1


def test_zero_3_gathers_whole_stages_and_hybrid_groups_shrink_with_the_copies() -> None:
    whole = plan("llama3-70b", Layout(pp=4, dp=48, zero=3), Batch(48 * 8, 1, 4096), data_parallel=DataParallel(shard=8))
    small, changes = twin(whole)
    assert small.schedule.max_active_stages == 3 and any("max_active_stages none -> 3" in change for change in changes)
    assert (
        small.layout.zero == 3 and small.layout.dp > 1 and small.data_parallel.shard in divisors(small.layout.dp)[:-1]
    )


def test_degrees_that_are_no_powers_of_two_stay_so() -> None:
    small, _ = twin(plan("tiny-gpt-6h", Layout(tp=6, pp=1, dp=10), Batch(60, 1, 32)))
    assert (small.layout.tp, small.layout.dp) == (2, 3) or (small.layout.tp, small.layout.dp) == (3, 2)
    small, _ = twin(plan("llama3-70b", Layout(pp=5, dp=8), Batch(40, 1, 4096)))
    assert small.layout.pp == 3 and small.layout.dp == 2


def test_interleaving_keeps_its_virtual_stages_and_legal_microbatches() -> None:
    small, _ = twin(plan("llama3-70b", Layout(tp=8, pp=4, vpp=5, dp=2), Batch(16, 1, 4096), "Interleaved1F1B"))
    assert small.layout.vpp == 5 and small.layout.pp == 2
    assert small.num_microbatches % small.layout.pp == 0
    assert small.model.num_layers == 10


def test_fewer_microbatches_than_ranks_stay_fewer() -> None:
    small, _ = twin(plan("llama3-70b", Layout(tp=2, pp=8, dp=2), Batch(6, 1, 4096)))
    assert 1 <= small.num_microbatches < small.layout.pp or (small.layout.pp == 2 and small.num_microbatches == 1)


def test_uneven_stages_stay_uneven() -> None:
    small, _ = twin(plan("llama3-8b", Layout(tp=8, pp=4, dp=2, stages="Et*7|t*9|t*9|t*7L"), Batch(8, 1, 4096)))
    counts = [len(stage.layers) for stage in small.stages]
    assert len(counts) == small.layout.pp and sum(counts) == small.model.num_layers


def test_a_schedule_file_of_16_ranks_cannot_shrink() -> None:
    layout = Layout(pp=16, dp=2)
    whole = Plan(
        model_preset("llama3-70b"),
        cluster_preset("dgx-h100", 32),
        layout,
        Batch(64, 1, 4096),
        schedule=ScheduleChoice(file="x.csv"),
    )
    with pytest.raises(PlanError, match="fixes pp=16"):
        twin(whole)


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4, 5, 8, 10, 16]),
    dp=st.integers(1, 9),
    per_rank=st.integers(1, 9),
    micro=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_every_axis_above_1_stays_above_1_on_at_most_8_ranks(
    tp: int, pp: int, dp: int, per_rank: int, micro: int
) -> None:
    layout = Layout(tp=tp, pp=pp, dp=dp)
    whole = Plan(
        model_preset("llama3-70b"),
        cluster_preset("this-host", layout.world_size),
        layout,
        Batch(per_rank * micro * dp, micro, 4096),
    )
    small, _ = twin(whole)
    assert small.layout.world_size <= MAX_WORLD_SIZE
    for axis in ("tp", "pp", "dp"):
        degree, before = getattr(small.layout, axis), getattr(layout, axis)
        assert degree <= before and (degree > 1) == (before > 1)
    assert (small.batch.micro_size > 1) == (micro > 1)
    assert count_parameters(small.model) < 10**6


def test_64_ranks_that_are_threads_stay_and_processes_do_not() -> None:
    whole = plan(
        "tiny-gpt", Layout(tp=4, pp=4, dp=4), Batch(16, 1, 32), numerics=Numerics("exact"), precision=Precision("fp32")
    )
    whole = replace(whole, model=replace(whole.model, num_layers=4))
    assert proof_transport(whole) == "memory" and twin(whole, MAX_THREADS) == (whole, [])
    assert twin(whole)[0].layout.world_size == MAX_WORLD_SIZE


def test_a_model_that_is_too_large_shrinks_under_a_layout_that_stays() -> None:
    layout = Layout(tp=8, pp=3, dp=2, sequence_parallel=True, stages="Et*30|t*25|t*25L")
    small, changes = twin(plan("llama3-70b", layout, Batch(6, 1, 4096)), MAX_THREADS)
    assert small.layout == replace(layout, stages="Ett|t|tL") and count_parameters(small.model) < 10**6
    assert small.model.num_kv_heads % 8 == 0 and not any("layout.dp" in change for change in changes)
    assert proof_transport(gpt3()) == "shm" and twin(gpt3(), MAX_THREADS)[0].layout.world_size == MAX_WORLD_SIZE
