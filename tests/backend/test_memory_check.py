"""`train` asks whether the machine has the memory before ranks start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.modules import modular, module
from helpers.plans import product_plan
from shardproof.backend.memory_check import CERTAIN_SHARE, FORKED_BYTES, TORCH_BYTES, check_memory, need_of
from shardproof.core.base.errors import PlanError
from shardproof.core.commands.cli import main
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.host import _group_limits, available_memory_bytes
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch
from shardproof.simulator.search.fit import fit

EIGHT_BILLION = ["--model", "llama3-8b", "--set", "model.vocab_size=259", "--sequence", "256", "--dtype", "bf16"]


def tiny(layout: Layout, cluster: str = "this-host") -> Plan:
    return product_plan(layout, model=model_preset("tiny-llama"), cluster=cluster, samples=4, sequence=64)


def test_eight_ranks_of_an_8b_model_are_refused_before_any_starts(capsys, monkeypatch):
    monkeypatch.setattr("shardproof.backend.memory_check.available_memory_bytes", lambda: 24e9)
    assert main(["train", *EIGHT_BILLION, "--dp", "8", "--global-batch", "8"]) == 2
    error = capsys.readouterr().err
    assert "8 ranks on this machine take at least" in error and "22.4 GiB are" in error and "Traceback" not in error


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, dp=2), Layout(dp=3, zero=1), Layout(pp=2)])
def test_what_is_certain_is_every_state_and_one_rest(layout):
    plan = tiny(layout)
    need, rows = need_of(plan, "gloo"), fit(plan).report["per_rank"]
    each, states = layout.world_size // layout.pp, ("weights", "gradients", "optimizer")
    held = sum(each * sum(row["memory_bytes"][name] for name in states) for row in rows)
    rest = max(row["peak_memory_bytes"] - sum(row["memory_bytes"][name] for name in states) for row in rows)
    assert need.num_ranks == layout.world_size
    assert need.certain == pytest.approx(CERTAIN_SHARE * (held + rest) + FORKED_BYTES * layout.world_size)
    assert need.peaks == pytest.approx(
        each * sum(row["peak_memory_bytes"] for row in rows) + FORKED_BYTES * layout.world_size
    )
    assert need_of(plan, "memory").certain == pytest.approx(CERTAIN_SHARE * (held + rest) + TORCH_BYTES)


def test_memory_is_refused_warned_of_or_enough():
    plan = tiny(Layout(dp=2))
    need = need_of(plan, "gloo")
    assert check_memory(plan, "gloo", need.peaks) is None
    warning = check_memory(plan, "gloo", (need.certain + need.peaks) / 2)
    assert warning is not None and warning.startswith("2 ranks on this machine may take")
    with pytest.raises(PlanError, match="2 ranks on this machine take at least"):
        check_memory(plan, "gloo", need.certain - 1)


def test_a_rank_of_torchrun_asks_for_those_of_its_machine(monkeypatch):
    plan = tiny(Layout(pp=2, dp=2))
    for name, value in {"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert need_of(plan, "gloo").num_ranks == 2
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert check_memory(plan, "gloo", 0.0) is None


def test_modules_count_together():
    plan = modular(module("encoder", tp=2), module("decoder", ["encoder"], dp=3), samples=3, schedule="GPipe")
    assert need_of(plan, "gloo").num_ranks == plan.world_size


def test_on_gpus_the_cluster_of_the_plan_decides():
    small = tiny(Layout(dp=2), "dgx-h100")
    assert check_memory(small, "nccl") is None and check_memory(tiny(Layout(dp=2)), "nccl") is None
    large = replace(small, model=replace(model_preset("llama3-70b"), vocab_size=259), batch=Batch(2, 1, 256))
    with pytest.raises(PlanError, match=r"it needs .* of the device are usable"):
        check_memory(large, "nccl")


def test_limits_of_control_groups_count_all_the_way_up(tmp_path: Path):
    (tmp_path / "membership").write_text("0::/a/b\n5:cpu,memory:/x\n3:cpu:/x\n")
    for name, limit, used in (("a/b", "max", "5"), ("a", "100", "40")):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "memory.max").write_text(limit)
        (tmp_path / name / "memory.current").write_text(used)
    (tmp_path / "memory/x").mkdir(parents=True)
    (tmp_path / "memory/x/memory.limit_in_bytes").write_text("70")
    (tmp_path / "memory/x/memory.usage_in_bytes").write_text("30")
    assert sorted(_group_limits(tmp_path / "membership", tmp_path)) == [40.0, 60.0]
    assert list(_group_limits(tmp_path / "missing", tmp_path)) == []
    assert (available := available_memory_bytes()) is not None and available > 1e8
