"""Rows -> plans and measured seconds: rows typed in here, and the whole set in benchmarks/published/rows."""

from __future__ import annotations

import json

import pytest

from shardproof.benchmarks.published.plans import plan_of
from shardproof.benchmarks.published.row import (
    Row,
    RowError,
    measured_of,
    model_flops,
    read_rows,
    sc21_flops,
)
from shardproof.benchmarks.published.stacks import STACKS, stack_of
from shardproof.core.model.parameters import count_active_parameters, count_parameters


def published(**changes) -> Row:
    """Row 4 of SC21 table 1 (18.4B on 256 devices), with fields replaced by dotted name (`__` for the dot)."""
    data = {
        "id": "x",
        "source": "SC21 Narayanan",
        "family": "sc21_t1",
        "kind": "train_step",
        "tier": "A",
        "model": {
            "name": "GPT 18.4B",
            "layers": 40,
            "hidden": 6144,
            "ffn": 24576,
            "heads": 48,
            "kv_heads": 48,
            "vocab": 51200,
            "seq": 2048,
        },
        "hardware": {"gpu": "A100-80GB SXM", "count": 256, "inter": "8x200 Gb/s HDR InfiniBand per node"},
        "parallel": {"tp": 8, "pp": 1, "vpp": 1, "dp": 32, "cp": 1, "sp": False, "sharding": "none (DDP)"},
        "batch": {"micro": 8, "num_microbatches": 4, "global": 1024},
        "precision": "fp16",
        "recompute": "full (every layer)",
        "schedule": "none",
        "measured": {"tflops_per_gpu_hw": 135.0},
        "flags": None,
        "notes": None,
    }
    for name, value in changes.items():
        section, _, field = name.partition("__")
        data[section] = {**(data[section] or {}), field: value} if field else value
    return Row(data)


def test_sc21_row_becomes_its_plan_with_nothing_assumed():
    found = plan_of(published())
    plan = found.plan
    assert found.assumed == ()
    assert (plan.layout.tp, plan.layout.dp, plan.num_microbatches, plan.recompute.mode) == (8, 32, 4, "full")
    assert (plan.model.activation, plan.model.position, plan.model.tied_embeddings) == ("gelu_tanh", "learned", True)
    assert plan.cluster.name == "dgx-a100-80g" and plan.cluster.node_network_bytes_per_s == 200e9
    assert plan.runtime.profile == "megatron-2021"


def test_135_tflops_a_device_are_9_4_seconds_by_equation_3():
    # The collection derives 9.3993 s for this row from the same equation.
    assert measured_of(published()).step_s == pytest.approx(9.3993, abs=5e-4)


def test_model_flops_are_three_quarters_of_the_hardware_flops_but_for_logits():
    row = published()
    logits = 6 * 1024 * 2048 * 6144 * 51200
    assert model_flops(row) - logits == pytest.approx((sc21_flops(row) - logits) * 3 / 4, rel=1e-12)


def test_model_flops_of_experts_count_those_that_a_token_visits_and_shared_ones():
    moe = {"experts": 64, "topk": 8, "moe_ffn": 2560, "shared_ffn": 20480}
    dense = published(model__name="llama", model__ffn=8 * 2560 + 20480)
    assert model_flops(published(model__name="llama", model__moe=moe)) == model_flops(dense)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"measured": {"step_ms": 500.0}}, 0.5),
        ({"measured": {"samples_per_gpu_s": 0.5}}, 1024 / 0.5 / 256),
        ({"measured": {"tokens_per_gpu_s": 1000.0}}, 1024 * 2048 / 1000 / 256),
        ({"measured": {"oom": True}}, None),
    ],
)
def test_printed_rates_become_seconds(changes, seconds):
    assert measured_of(published(**changes)).step_s == (None if seconds is None else pytest.approx(seconds))


def test_memory_of_the_worst_rank_is_taken_from_the_most_exact_reading():
    measured = measured_of(published(measured={"per_rank_max_allocated_mb": [10.0, 12.5, 3.0], "peak_alloc_gib": 1.0}))
    assert (measured.memory_bytes, measured.memory_kind) == (12.5 * 2**20, "allocated")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hardware__gpu": "RTX-2080"}, "device 'RTX-2080' has no preset"),
        ({"schedule": "ZB-99p"}, "schedule 'ZB-99p' is not in the catalog"),
        ({"source": "a blog"}, "the software of 'a blog' is not described"),
        ({"batch": {"global": 1024}}, "batch.micro is not published"),
        ({"hardware__count": 512}, "tp\\*cp\\*dp\\*pp = 8\\*1\\*32\\*1 = 256 ranks, but num_devices=512"),
        ({"model__name": "Nemotron-H (hybrid Mamba)"}, "state-space layers are not modelled"),
        ({"precision": "nvfp4"}, "precision 'nvfp4' is not modelled"),
    ],
)
def test_rows_without_a_plan_say_what_is_missing(changes, what):
    with pytest.raises(RowError, match=what):
        plan_of(published(**changes))


def test_layers_and_two_that_divide_the_stages_leave_the_ends_one_short():
    # Zero Bubble (Qi et al. 2024): 22 layers on 8 stages, the first and the last hold two.
    plan = plan_of(published(model__layers=22, parallel__pp=8, parallel__tp=1, parallel__dp=32, schedule="1F1B")).plan
    assert [len(stage.layers) for stage in plan.stages] == [2, 3, 3, 3, 3, 3, 3, 2]


def test_a_module_for_another_token_counts_as_a_layer_of_the_last_stage():
    # NeMo, scripts/performance/llm/pretrain_deepseek_v3.py: one short on the first stage, two on the last.
    moe = {"experts": 256, "topk": 8, "moe_ffn": 2048, "shared": 1, "dense_layers": 3, "attention": "MLA"}
    model = {
        "name": "deepseek-v3",
        "layers": 61,
        "hidden": 7168,
        "ffn": 18432,
        "heads": 128,
        "vocab": 129280,
        "seq": 4096,
        "moe": moe,
    }
    parallel = {
        "tp": 2,
        "pp": 4,
        "vpp": 1,
        "dp": 16,
        "cp": 1,
        "ep": 32,
        "etp": 1,
        "sp": True,
        "sharding": "distributed optimizer",
    }
    changes = {
        "model": model,
        "parallel": parallel,
        "hardware__gpu": "GB200",
        "hardware__count": 128,
        "schedule": "1F1B",
    }
    row = published(
        source="dgxc-benchmarking", family="dgxc_dsv3_gb200", precision="bf16", recompute="selective", **changes
    )
    plan = plan_of(row).plan
    assert plan.model.num_mtp_layers == 1 and plan.runtime.attention == "unfused"
    assert [len(stage.layers) for stage in plan.stages] == [15, 16, 16, 14]


def test_redistributed_layers_leave_the_stage_of_a_heavy_head_fewest():
    # Vocabulary Parallelism, Redis: 32 layers of hidden 3072 on 8 stages, 262,144 tokens: the head
    # is as heavy as six layers.
    changes = {
        "model__layers": 32,
        "model__hidden": 3072,
        "model__heads": 24,
        "model__kv_heads": 24,
        "model__vocab": 262144,
    }
    row = published(
        **changes, parallel__pp=8, parallel__tp=1, parallel__dp=32, flags={"vocab_method": "Redis"}, schedule="1F1B"
    )
    counts = [len(stage.layers) for stage in plan_of(row).plan.stages]
    assert sum(counts) == 32 and counts[-1] == min(counts) and max(counts) == 5


def test_chunks_follow_from_two_layers_each_where_the_table_leaves_them_out():
    changes = {
        "model__layers": 96,
        "parallel__pp": 8,
        "parallel__dp": 4,
        "parallel__vpp": None,
        "schedule": "interleaved 1F1B",
    }
    found = plan_of(published(**changes))
    assert found.plan.layout.vpp == 6 and found.assumed == ("layers_per_chunk=2",)


def test_zero_bubble_steps_wait_for_no_norm_unless_they_are_said_to():
    changes = {"model__layers": 40, "parallel__pp": 8, "parallel__dp": 4}
    assert plan_of(published(**changes, schedule="ZB-2p")).plan.optimizer.clip_grad_norm == 0
    assert (
        plan_of(
            published(**changes, schedule=("ZB-2p, all-reduce synchronised optimizer step"))
        ).plan.optimizer.clip_grad_norm
        > 0
    )


def test_the_nemotron_report_leaves_its_microbatch_to_nvidias_configuration_of_the_model():
    found = plan_of(
        published(source="Nemotron-4 15B report", family="nemotron15_report", batch__micro=None, parallel__sp=None)
    )
    assert (found.plan.batch.micro_size, found.plan.layout.sequence_parallel, found.plan.runtime.profile) == (
        2,
        True,
        "nemo-24.05",
    )
    assert set(found.assumed) == {"batch.micro=2", "parallel.sp=True"}


@pytest.mark.parametrize(
    ("source", "sharding", "profile"),
    [
        ("SC21 Narayanan", "ZeRO-3", "deepspeed-zero3"),
        ("SC21 Narayanan", "none (DDP)", "megatron-2021"),
        ("MoE Parallel Folding (2504.14960)", "FSDP (ZeRO-3)", "megatron-fsdp"),
        ("MoE Parallel Folding (2504.14960)", "distributed optimizer (ZeRO-1)", "megatron-te"),
    ],
)
def test_rows_under_zero_3_run_the_code_that_shards_there(source, sharding, profile):
    assert plan_of(published(source=source, parallel__sharding=sharding)).plan.runtime.profile == profile


def test_sharding_within_eight_devices_is_a_hybrid_group():
    assert plan_of(published(parallel__sharding="ZeRO-1 over 8 GPUs")).plan.data_parallel.shard == 8
    assert plan_of(published(parallel__sharding="ZeRO-1 over all DP ranks")).plan.data_parallel.shard is None


def test_a_power_limit_of_500_of_700_watts_leaves_88_percent_of_the_sustained_share():
    full = plan_of(published(hardware__gpu="H100-80GB SXM")).plan.cluster
    limited = plan_of(published(hardware__gpu="H100-96GB HBM2e 500W")).plan.cluster
    assert limited.sustained_share == pytest.approx(0.883 * full.sustained_share, rel=1e-3)
    assert limited.device_memory_bytes == round(94.88 * 2**30)


def test_folder_without_rows_is_named(tmp_path):
    with pytest.raises(RowError, match="holds no published rows"):
        read_rows(tmp_path)


def test_rows_are_read_in_file_order(tmp_path):
    def named(name):
        return {"id": name, "source": "a paper", "family": "table 1", "kind": "train_step"}

    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(named(name)) + "\n\n" + json.dumps(named(name * 2)) + "\n")
    assert [row.id for row in read_rows(tmp_path)] == ["a", "aa", "b", "bb"]


def test_every_training_row_has_a_plan_or_a_reason_and_three_in_four_a_plan():
    rows = [row for row in read_rows() if row["kind"] == "train_step"]
    refused = []
    for row in rows:
        try:
            plan_of(row)
        except RowError as error:
            refused.append(str(error))
    assert all(refused) and len(refused) < len(rows) / 4


def test_every_described_stack_belongs_to_a_source_or_series():
    rows = read_rows()
    families, sources = {row.family for row in rows}, {row.source for row in rows}
    assert all(
        name.partition(", ")[0] in sources or any(f"{one}_".startswith(f"{name}_") for one in families)
        for name in STACKS
    )


def test_a_series_without_a_stack_of_its_own_has_that_of_its_release():
    def found(family, source="dgxc-benchmarking"):
        return stack_of(published(source=source, family=family))

    assert found("dgxc2502_8b") is STACKS["dgxc2502"]
    assert found("dgxc2502_nem340") is STACKS["dgxc2502_nem340"]
    assert found("dgxc25021_8b") is STACKS["dgxc-benchmarking"]
    assert found("new", "unknown") is None


def test_seconds_derived_here_agree_with_those_of_the_collection():
    rows = [
        row
        for row in read_rows()
        if row["measured.derived_step_s"] and not (row["measured.step_s"] or row["measured.step_ms"])
    ]
    pairs = []
    for row in rows:
        data = {
            **row.data,
            "measured": {name: value for name, value in row["measured"].items() if name != "derived_step_s"},
        }
        if (seconds := measured_of(Row(data)).step_s) is not None:
            pairs.append((seconds, row["measured.derived_step_s"]))
    assert len(pairs) > 300
    assert all(mine == pytest.approx(theirs, rel=0.01) for mine, theirs in pairs)


@pytest.mark.parametrize(
    ("said", "scaling"), [("fp8 rowwise", "row"), ("mxfp8 cublas", "block"), ("fp8 tensorwise", None), ("bf16", None)]
)
def test_torchtitan_says_how_far_a_scale_reaches(said, scaling):
    titan = {"source": "torchtitan async-TP", "family": "torchtitan_async", "hardware": {"gpu": "H100", "count": 256}}
    assert plan_of(published(**titan, precision=said)).plan.precision.scaling == scaling


def test_tables_of_composer_in_pure_precision_are_of_an_older_torch():
    tables = {"source": "llm-foundry (MosaicML)", "family": "llmfoundry_A100_80GB", "precision": "bf16"}
    profiles = [
        plan_of(published(**tables, flags={"mp_mode": mode})).plan.runtime.profile for mode in ("PURE", "DEFAULT")
    ]
    assert profiles == ["fsdp-1.13", "fsdp"]


def test_torchtitan_of_mid_2025_repeats_the_attention_of_cudnn():
    titan = {"hardware": {"gpu": "H100", "count": 256}, "recompute": None}
    recomputes = {
        source: plan_of(published(**titan, source=source, family="x")).plan.recompute.modules
        for source in ("torchtitan mxfp8 doc", "torchtitan benchmarks")
    }
    assert recomputes == {"torchtitan mxfp8 doc": ("core_attn",), "torchtitan benchmarks": ("norm",)}


def test_ablation_rows_of_megascale_after_the_baseline_have_no_plan():
    ablation = {"source": "MegaScale NSDI24", "family": "megascale_ablation"}
    assert plan_of(published(**ablation, notes="baseline Megatron-LM")).plan.runtime.profile == "megatron-2023"
    with pytest.raises(RowError, match="every row of the ablation adds"):
        plan_of(published(**ablation, notes="+DP overlap"))


def test_nanotron_cuts_16_layers_with_a_head_of_four_into_10_and_6():
    model = {
        "name": "Llama-style 1.34B",
        "layers": 16,
        "hidden": 2048,
        "ffn": 8192,
        "heads": 32,
        "kv_heads": 32,
        "vocab": 131072,
        "seq": 4096,
    }
    parallel = {"tp": 1, "pp": 2, "dp": 4, "vpp": 1, "sharding": "ZeRO-1"}
    row = published(
        source="nanotron v0.5 (HF)",
        family="nanotron",
        model=model,
        parallel=parallel,
        hardware={"gpu": "H100-80GB", "count": 8},
        batch={"micro": 1, "global": 64, "num_microbatches": 16},
        precision="bf16",
        recompute="none",
        schedule="1F1B",
    )
    assert [len(stage.layers) for stage in plan_of(row).plan.stages] == [10, 6]


def test_sizes_of_a_model_that_a_table_only_names_come_from_its_public_configuration():
    named = {"name": "GPT OSS 120B", "seq": 4096}
    parallel = {"tp": 1, "pp": 1, "dp": 64, "ep": 16, "sharding": "distributed optimizer (ZeRO-1)"}
    row = published(
        source="Megatron-Bridge perf summary",
        family=("mbridge_26.06 NeMo Container_GPT OSS 120B"),
        model=named,
        parallel=parallel,
        hardware={"gpu": "DGX-GB300", "count": 64},
        batch={"micro": 4, "global": 1280},
        precision="mxfp8",
        recompute=None,
    )
    plan = plan_of(row).plan
    assert count_parameters(plan.model) == pytest.approx(116.8e9, rel=0.002)  # arXiv 2508.10925, table 1
    # without the token table of 0.6B: 5.1B, as there
    assert count_active_parameters(plan.model) == pytest.approx(5.7e9, rel=0.01)
    assert plan.runtime.cuda_graphs and plan.runtime.ep_comm_overlap


def test_stages_hold_the_layers_that_a_row_lists():
    listed = (
        "layers_per_stage=[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18], [19, 20, 21, "
        "22, 23, 24, 25]]"
    )
    row = published(
        source="Sailor (SOSP25)",
        precision=None,
        notes=listed,
        model__layers=24,
        parallel__pp=4,
        parallel__dp=8,
        schedule="1F1B",
    )
    plan = plan_of(row).plan
    assert [len(stage.layers) for stage in plan.stages] == [4, 7, 7, 6]
    assert plan.cluster.peak_flops_per_s["fp32"] == 156e12  # TF32: the container lets fp32 products run in it


def test_a_microbatch_is_all_of_a_replicas_batch_where_the_software_knows_no_accumulation():
    found = plan_of(
        published(
            source="Megatron-LM README 2020",
            family="megatron2020",
            batch={"micro": None, "global": 512},
            recompute=None,
        )
    )
    assert (found.plan.batch.micro_size, found.plan.num_microbatches) == (16, 1)
    assert found.assumed == ("batch.num_microbatches=1", "recompute=full")


def test_a_v_has_two_stages_a_rank():
    assert (
        plan_of(published(parallel__vpp=None, parallel__pp=4, parallel__dp=8, schedule="V-Half")).plan.layout.vpp == 2
    )


def test_whole_experts_where_cut_ones_do_not_lie_on_a_stages_ranks():
    experts = {"name": "Mixtral", "moe": {"experts": 8, "topk": 2}}
    changes = {"model__" + name: value for name, value in experts.items()}
    cut = plan_of(published(**changes, parallel__ep=4))
    whole = plan_of(
        published(**changes, parallel__ep=8, parallel__pp=16, parallel__dp=2, model__layers=48, schedule="1F1B")
    )
    assert cut.plan.layout.etp is None and "parallel.etp=1" not in cut.assumed
    assert whole.plan.layout.etp == 1 and "parallel.etp=1" in whole.assumed


def test_megatron_core_of_2024_interleaves_single_layers_and_its_gpts_are_four_times_as_wide():
    model = {"name": "GPT 119B", "layers": 92, "hidden": 10240, "ffn": None, "heads": 80, "vocab": 131072, "seq": 4096}
    row = published(
        source="Megatron-Core README r0.8",
        family="mcore_weak",
        model=model,
        hardware={"gpu": "H100-80GB SXM (Eos)", "count": 1536},
        parallel={"tp": 8, "pp": 4, "dp": 48, "cp": 1},
        batch={"global": 768},
        precision="bf16",
        recompute=None,
        schedule=None,
    )
    plan = plan_of(row).plan
    assert (plan.layout.vpp, plan.model.ffn_hidden_size, plan.num_microbatches) == (23, 40960, 16)
    assert plan.layout.zero == 1 and plan.layout.sequence_parallel and plan.runtime.tp_comm_overlap


def test_llama_3_scatters_summed_gradients_and_leaves_the_ends_without_a_layer():
    model = {
        "name": "Llama-3.1-405B",
        "layers": 126,
        "hidden": 16384,
        "ffn": 53248,
        "heads": 128,
        "kv_heads": 8,
        "vocab": 128256,
        "seq": 8192,
    }
    row = published(
        source="Llama 3 herd",
        family="llama3_t4",
        model=model,
        hardware={"gpu": "H100-80GB HBM3 700W", "count": 8192},
        parallel={"tp": 8, "pp": 16, "dp": 64, "cp": 1, "sharding": "FSDP (parameters not resharded after forward)"},
        batch={"global": 2048},
        precision="bf16",
        recompute=None,
        schedule=("interleaved 1F1B variant (tunable N), uneven stages"),
    )
    plan = plan_of(row).plan
    assert (plan.layout.zero, plan.layout.vpp, plan.layout.order) == (1, 8, "tp-cp-ep-pp-dp")
    assert [len(stage.layers) for stage in plan.stages] == [0, *[1] * 126, 0]


def test_fine_tuning_of_all_weights_is_a_training_step_and_that_of_added_ones_is_none():
    tuned = published(kind="finetune_step", source_ref="26.06 NeMo Container, SFT Performance, LLAMA3_70B")
    assert plan_of(tuned).plan == plan_of(published()).plan
    with pytest.raises(RowError, match="frozen parts"):
        plan_of(published(kind="finetune_step", source_ref="26.06 NeMo Container, LoRA Performance, LLAMA3_70B"))


def test_a_submitter_that_changed_the_software_has_a_stack_of_its_own():
    fields = {"source": "MLPerf Training v5.1", "family": "mlperf_v5.1_llama3-8b", "flags__tp_comm_overlap": True}
    cisco, nvidia = (plan_of(published(**fields, source_ref=f"{who}/results/x")).plan for who in ("Cisco", "NVIDIA"))
    assert (cisco.runtime.tp_comm_overlap, cisco.data_parallel.bucket_bytes, cisco.data_parallel.check_gradients) == (
        False,
        256,
        None,
    )
    assert (
        nvidia.runtime.tp_comm_overlap,
        nvidia.data_parallel.bucket_bytes,
        nvidia.data_parallel.check_gradients,
    ) == (True, 2**29, False)
