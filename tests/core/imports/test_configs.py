"""Configurations of our own in the formats of others: which plan each is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardproof.core.base.errors import PlanError
from shardproof.core.imports.account import Imported, Request
from shardproof.core.imports.given import import_file
from shardproof.core.plan.plan import Plan, any_plan
from shardproof.core.plan.toml import Given

FOLDER = Path(__file__).parent / "configs"
MODEL = {"preset": Given("llama3-8b", "--model")}
SIZES = {"sequence": Given(4096, "--sequence"), "global": Given(256, "--global-batch")}

PLANS: dict[str, tuple[int | None, str, dict[str, Any]]] = {
    "titan_8b_fsdp.toml": (
        64,
        "v0.1",
        {"layout.dp": 64, "layout.zero": 3, "batch.micro": 2, "batch.global": 128, "batch.sequence": 8192}
        | {"recompute.mode": "selective", "recompute.modules": ("norm",), "runtime.compile": True, "train.steps": 100},
    ),
    "titan_405b_float8.toml": (
        128,
        "v0.2",
        {"model.name": "llama3.1-405b", "layout.tp": 8, "layout.dp": 16, "layout.sequence_parallel": True}
        | {"precision.dtype": "fp8", "runtime.tp_comm_overlap": True, "runtime.fused_loss": True}
        | {"recompute.mode": "full", "train.learning_rate": 8e-5},
    ),
    # 80 layers on 8 stages; eight microbatches, as many as stages; every second layer of a rank's twenty
    "titan_2024_experimental.toml": (
        64,
        "before v0.1.0",
        {"layout.pp": 4, "layout.vpp": 2, "layout.tp": 2, "layout.cp": 2, "layout.dp": 4, "layout.stages": None}
        | {"schedule.name": "Interleaved1F1B", "batch.micro": 1, "layout.zero": 2, "recompute.mode": "full"}
        | {"recompute.layers": tuple(range(1, 80, 2))},
    ),
    # 32 layers and 2 for embedding and head on 4 stages: 9 9 8 8, less one at each end
    "titan_pipeline.toml": (
        None,
        "v0.1",
        {"layout.pp": 4, "layout.dp": 4, "layout.stages": "Et*8|t*9|t*8|t*7L", "batch.micro": 2, "layout.zero": 2},
    ),
    # the rank with stages 0 and 3 has layers 0-7 and 25-31, the other 8-16 and 17-24
    "titan_zbv.toml": (
        None,
        "v0.1",
        {"layout.vpp": 2, "schedule.name": "ZBVZeroBubble", "layout.zero": 3, "layout.stages": "Et*8|t*9|t*8|t*7L"}
        | {"recompute.layers": (3, 7, 11, 15, 19, 23, 28)},
    ),
    "titan_hsdp.toml": (
        None,
        "v0.1",
        {"layout.dp": 32, "layout.cp": 2, "data_parallel.shard": 16, "layout.zero": 3}
        | {"runtime.context_parallel": "ring", "recompute.mode": "none"},
    ),
    "titan_ddp.toml": (None, "before v0.1.0", {"layout.dp": 8, "layout.zero": 0, "model.name": "llama2-7b"}),
    "titan_deepseek.toml": (
        None,
        "v0.1",
        {"layout.ep": 32, "layout.etp": 1, "runtime.dispatch_once": True, "model.num_mtp_layers": 0, "layout.vpp": 2},
    ),
    "titan_qwen_moe_mxfp8.toml": (
        None,
        "v0.2",
        {"precision.dtype": "fp8", "precision.scaling": "block", "layout.ep": 4, "runtime.fused_loss": None},
    ),
    "titan_parts.toml": (None, "v0.1", {"layout.stages": "Et|t*5L", "layout.pp": 2, "batch.micro": 1}),
    "titan_exported.json": (
        None,
        "v0.1",
        {"train.seed": 42, "train.steps": 7, "optimizer.clip_grad_norm": 0.5, "schedule.name": "1F1B", "layout.tp": 2},
    ),
    "bridge_llama.yaml": (
        16,
        "",
        {"layout.tp": 2, "layout.pp": 2, "layout.vpp": 4, "layout.dp": 4, "layout.zero": 1, "model.rope_factor": 32.0}
        | {"recompute.modules": ("core_attn", "norm"), "schedule.name": "Interleaved1F1B", "batch.global": 512}
        | {"model.tied_embeddings": True, "precision.gradient_dtype": "fp32", "optimizer.betas": (0.9, 0.95)},
    ),
    "bridge_experts.yaml": (
        16,
        "",
        {"runtime.profile": "megatron-fsdp", "layout.zero": 3, "layout.ep": 8, "model.first_dense_layers": 2}
        | {"model.num_shared_experts": 2, "precision.dtype": "fp8", "runtime.dispatch_once": True},
    ),
    "bridge_windows.yaml": (
        8,
        "",
        {"model.sliding_window": 128, "model.window_layers": (1, 0), "model.rope_layers": (1, 1, 1, 0)}
        | {"model.rope_dim": 32, "model.attention_sinks": True, "model.attention_scale": 0.25},
    ),
    "bridge_gpt_oss.yaml": (
        8,
        "",
        {"model.bias": True, "model.router_bias": True, "model.rope_scaling": "yarn", "model.rope_truncate": False}
        | {"model.activation": "quick_geglu", "model.gate_limit": 7.0, "model.rope_factor": 32.0},
    ),
    "deepspeed_zero3.json": (
        8,
        "",
        {"layout.zero": 3, "batch.micro": 2, "batch.global": 64, "offload.optimizer": 1.0, "train.learning_rate": 1e-5},
    ),
    "deepspeed_auto.json": (8, "", {"layout.zero": 2, "precision.dtype": "bf16", "batch.micro": 1}),
    "accelerate_fsdp.yaml": (
        None,
        "",
        {"layout.dp": 8, "layout.zero": 2, "recompute.mode": "full", "runtime.profile": "fsdp"},
    ),
    "accelerate_hybrid.yaml": (None, "", {"data_parallel.shard": 8, "layout.zero": 3, "precision.dtype": "fp16"}),
    "accelerate_fsdp2.yaml": (
        None,
        "",
        {"layout.tp": 2, "layout.dp": 8, "data_parallel.shard": 4, "runtime.profile": "torchtitan"},
    ),
    "accelerate_plain.yaml": (None, "", {"layout.dp": 1, "layout.zero": 0, "precision.dtype": "fp32"}),
}
"""File -> devices, version, and what the plan says."""


def imported_from(name: str, devices: int | None, **variables: str) -> Imported:
    path = FOLDER / name
    model = MODEL if name.startswith(("deepspeed", "accelerate")) else {}
    imported = import_file(Request(path.read_text(), str(path), devices, model, variables))
    assert imported is not None
    imported.raise_refused()
    return imported


def plan_of(imported: Imported) -> Plan:
    values = dict(imported.values)
    if imported.format in ("deepspeed", "accelerate"):
        values |= {"model": MODEL, "batch": {**SIZES, **values.get("batch", {})}}
    plan = any_plan(values, imported.source)
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.parametrize("name", PLANS)
def test_a_configuration_is_the_plan_that_it_means(name: str):
    devices, version, expected = PLANS[name]
    imported = imported_from(name, devices)
    plan = plan_of(imported)
    names = {"batch.global": "global_size", "batch.micro": "micro_size"}
    found = {key: getattr(getattr(plan, key.split(".")[0]), names.get(key, key.split(".")[1])) for key in expected}
    assert (found, imported.version) == (expected, version)


def test_every_file_of_the_folder_is_tried():
    assert {path.name for path in FOLDER.iterdir()} == {*PLANS, "titan_registry.py"}


@pytest.mark.parametrize(("function", "tp", "mode"), [("llama3_8b", 2, "full"), ("llama3_8b_deep", 4, "none")])
def test_a_python_configuration_is_read_by_its_literals(function: str, tp: int, mode: str):
    imported = imported_from("titan_registry.py", None, config=function)
    plan = plan_of(imported)
    assert (plan.layout.tp, plan.recompute.mode, plan.batch.micro_size, plan.batch.sequence) == (tp, mode, 2, 8192)
    assert plan.runtime.cuda_graphs
    opaque = next(each for each in imported.settings if each.flag == "dataloader")
    assert (opaque.value, opaque.status) == ("open_anything('c4')", "no-effect")


def test_converters_in_the_registry_of_a_model_scale_by_rows():
    plan = plan_of(imported_from("titan_registry.py", None, config="llama3_8b_narrow"))
    assert (plan.precision.dtype, plan.precision.scaling, plan.runtime.compile) == ("fp8", "row", True)


def test_a_python_file_with_several_configurations_asks_for_one():
    with pytest.raises(PlanError, match=r"llama3_8b, llama3_8b_narrow, llama3_8b_deep\. Name one .*--variable config="):
        imported_from("titan_registry.py", None)
