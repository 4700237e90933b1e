"""`calibrate`: measurements in, a cluster file out that plans can name."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from statistics import geometric_mean

import pytest

from shardproof.core.base.errors import PlanError
from shardproof.core.commands.cli import main
from shardproof.core.commands.probes import PROBES
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Precision
from shardproof.simulator import calibrate
from shardproof.simulator.calibrate import calibrated, cluster_toml
from shardproof.simulator.network.network import collective_s
from shardproof.simulator.network.topology import spread_of
from shardproof.simulator.simulation.simulate import simulate


@dataclass(frozen=True)
class Row:
    kind: str
    name: str
    sizes: tuple[int, ...]
    ranks: int
    seconds: float
    spread: float = 0.1


SIZES = (16, 64, 256)
VARIANTS = ("nt", "nn", "tn", "tn_")
KERNELS = [
    "add",
    "add_",
    "transpose",
    "row_mean",
    "row_norm",
    "token_sum",
    "layer_norm",
    "layer_norm_backward",
    "gelu_tanh",
    "gelu_tanh_backward",
    "silu",
    "silu_backward",
    "exp",
    "cross_entropy",
    "cross_entropy_backward",
    "square_sum",
    "adamw",
    "rotate",
    "rotate_backward",
    "repeat",
    "function",
    "function_backward_16",
    "layer_plain",
    "layer_plain_backward",
    "layer_gated",
    "layer_gated_backward",
]


def rows() -> list[Row]:
    """A machine of 40 GFLOP/s, 10 GB/s and messages of 50 us and 2 GB/s, whose two cores keep 0.9
    of their rate together."""
    found = [
        Row("product", v, (m, n, k), 1, 2 * m * n * k / 40e9)
        for v in VARIANTS
        for m in SIZES
        for n in SIZES
        for k in SIZES
    ]
    found += [Row("kernel", name, (size,), 1, 12 * size / 10e9) for name in KERNELS for size in (1000, 1000000)]
    found += [Row("kernel", f"{name}_16", (64,), 1, 1e-5) for name in ("attention", "attention_backward")]
    for number, plan in enumerate(PROBES):
        found.append(Row("step", plan.model.name, (), 1, 0.1))
        found += [
            Row("alone", plan.model.name, (), 2, 0.18 * number),
            Row("together", plan.model.name, (), 2, 0.2 * number),
        ]
    found += [Row("message", "message", (size,), 2, 50e-6 + size / 2e9) for size in (0 + 8, 1 << 20)]
    found += [Row("message", "message_work", (size,), 2, 1e-4) for size in (8, 1 << 20)]
    return found + [
        Row("collective", op, (size,), 2, 2e-4)
        for op in ("all_reduce", "all_gather", "all_to_all")
        for size in (64, 1 << 20)
    ]


def cluster():
    return calibrated(rows(), name="here", num_cores=2, memory_bytes=8e9, when="2026-11-21")


def test_the_numbers_of_a_machine_come_back_from_its_measurements():
    found = cluster()
    assert found.peak_flops_per_s["fp32"] == pytest.approx(40e9)
    assert found.device_memory_bytes_per_s == pytest.approx(10e9)
    assert found.node_link_latency_s == pytest.approx(50e-6, rel=1e-3)
    assert found.node_link_bytes_per_s == pytest.approx(2e9)
    assert (found.busy_core_share, found.num_cores) == (pytest.approx(0.9), 2)
    assert found.kernel_curve["nn-16-64-256"] == pytest.approx(2 * 16 * 64 * 256 / 40e9)
    assert found.collective_curve["all_reduce-2-64"] == 2e-4
    assert all(found.sources[name] for name in ("kernel_curve", "collective_curve", "busy_core_share"))
    assert found.sources["kernel_curve"] == "measured: shardproof calibrate, 2026-11-21"


TURNS = {"short": 1e-3, "short_work": 1e-3, "long": 2e-3, "long_work": 9e-3, "work": 4e-3}
"""Turns of 1 and of 9 ms of work: with a collective the first take 1 ms longer, the others 2 ms."""


def test_waits_for_the_slower_rank_grow_with_the_root_of_the_work_and_are_no_part_of_collectives():
    measured = rows() + [Row("turn", name, (), 2, seconds) for name, seconds in TURNS.items()]
    slow = [replace(row, seconds=5e-3) if row.kind == "collective" else row for row in measured]
    found = calibrated(slow, name="here", num_cores=2, memory_bytes=8e9, when="now")
    root = (2e-3 - 1e-3) / (math.sqrt(9e-3) - math.sqrt(1e-3))
    assert found.rank_skew_root_s == pytest.approx(root)
    assert found.collective_curve["all_reduce-2-64"] == pytest.approx(5e-3 - root * math.sqrt(4e-3))
    alone = [0.18 * number for number in range(len(PROBES))]
    waited = sum(root * math.sqrt(3 * seconds) / 3 for seconds in alone)
    assert found.busy_core_share == pytest.approx(sum(alone) / (sum(alone) / 0.9 - waited))
    same = [replace(row, seconds=1e-3) if row.name == "long_work" else row for row in slow]
    # nothing can be known
    assert calibrated(same, name="here", num_cores=2, memory_bytes=8e9, when="now").rank_skew_root_s == 0.0
    # Four ranks have no core each: they wait for cores, which is simulated, and their collectives stay as measured.
    crowded = [replace(row, ranks=4) if row.kind in ("turn", "collective") else row for row in slow]
    found = calibrated(crowded, name="here", num_cores=2, memory_bytes=8e9, when="now")
    assert (found.rank_skew_root_s, found.collective_curve["all_reduce-4-64"]) == (0.0, 5e-3)


@pytest.mark.parametrize(
    ("layout", "meetings"),
    [(Layout(dp=2), 1), (Layout(pp=2), 1), (Layout(), 0), (Layout(tp=2), None), (Layout(dp=4), 0)],
)
def test_ranks_that_meet_once_a_step_wait_by_its_root_and_those_that_meet_often_longer(layout, meetings):
    def report(skew):
        here = replace(cluster(), rank_skew_root_s=skew, num_devices=layout.world_size)
        batch = Batch(8 * layout.dp, 2, 64)
        return simulate(Plan(model_preset("tiny-gpt"), here, layout, batch, precision=Precision("fp32"))).report

    still, skewed = report(0.0), report(0.01)
    longer_s = skewed["step_time_s"] - still["step_time_s"]
    once_s = 0.01 * math.sqrt(still["time_s"]["compute"])
    if meetings is None:
        assert longer_s > 2 * once_s
    else:
        assert longer_s == pytest.approx(meetings * once_s, rel=0.3, abs=1e-9)


def test_a_step_that_takes_longer_than_its_kernels_do_one_by_one_makes_every_action_longer():
    alone = replace(cluster(), num_devices=1)
    seconds = [simulate(replace(plan, cluster=alone)).report["step_time_s"] for plan in PROBES]
    assert geometric_mean(seconds) == pytest.approx(0.1)
    twice = [replace(row, seconds=0.2) if row.kind == "step" else row for row in rows()]
    found = calibrated(twice, name="here", num_cores=2, memory_bytes=8e9, when="now")
    assert found.step_over_kernels == pytest.approx(2 * cluster().step_over_kernels)


def test_no_collective_takes_less_than_a_smaller_one():
    found = [row for row in rows() if row.kind != "collective"]
    found += [
        Row("collective", "all_reduce", (size,), 2, seconds)
        for size, seconds in ((8, 3e-3), (64, 1e-3), (512, 2e-3), (4096, 5e-3))
    ]
    curve = calibrated(found, name="here", num_cores=2, memory_bytes=8e9, when="now").collective_curve
    means = {8: 2e-3, 64: 2e-3, 512: 2e-3, 4096: 5e-3}
    assert {size: curve[f"all_reduce-2-{size}"] for size in means} == pytest.approx(means)


def test_messages_that_take_no_longer_when_they_are_larger_give_the_rate_of_their_whole_time():
    noisy = [row for row in rows() if row.kind != "message"] + [
        Row("message", "message", (size,), 2, 2e-3) for size in (4096, 524288)
    ]
    found = calibrated(noisy, name="here", num_cores=2, memory_bytes=8e9, when="now")
    assert found.node_link_bytes_per_s == pytest.approx(524288 / 2e-3)


def test_a_cluster_file_read_by_a_plan_gives_the_same_prediction(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_toml(cluster()))
    text = '[model]\npreset = "tiny-gpt"\n[layout]\ntp = 2\npp = 1\ndp = 1\n[batch]\nglobal = 4\nsequence = 32\n'
    text += '[precision]\ndtype = "fp32"\n'
    plan = Plan.from_toml(f'{text}[cluster]\nfile = "{path}"\nnum_devices = 2\n')
    assert dict(plan.cluster.kernel_curve) == dict(cluster().kernel_curve)
    direct = replace(plan, cluster=replace(cluster(), num_devices=2))
    assert simulate(plan).report["step_time_s"] == simulate(direct).report["step_time_s"] > 0
    assert Plan.from_toml(plan.to_toml()).cluster == plan.cluster


def test_measured_collectives_replace_the_ring():
    from shardproof.core.program import Collective

    operation = Collective("", "all_reduce", "tp", 2, 64)
    assert collective_s(cluster(), spread_of(cluster(), [0, 1]), operation) == pytest.approx(2e-4)


def test_measurements_without_a_kind_are_refused():
    with pytest.raises(PlanError, match="no collective and no message"):
        calibrated(
            [row for row in rows() if row.kind not in ("collective", "message")],
            name="x",
            num_cores=1,
            memory_bytes=1e9,
            when="",
        )


def test_the_verb_writes_a_cluster_file_and_json(tmp_path, monkeypatch, capsys):
    asked = {}

    def measure(**options):
        asked.update(options)
        return rows()

    monkeypatch.setattr(calibrate, "service", lambda name: {"measure_machine": measure}[name])
    path = tmp_path / "here.toml"
    assert main(["calibrate", "--quick", "--name", "here", "-o", str(path)]) == 0
    assert 'name = "here"' in path.read_text() and "[cluster.kernel_curve]" in path.read_text()
    assert asked["quick"] is True
    assert f'file = "{path}"' in capsys.readouterr().out
    assert main(["calibrate", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["peak_flops_per_s"] == pytest.approx(40e9)
    assert len(report["measurements"]) == len(rows())


def test_a_quantile_outside_0_to_1_is_wrong_usage(capsys):
    assert main(["calibrate", "--quantile", "2"]) == 2
    assert "--quantile 2.0 must lie between 0 and 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--rounds", "0"], "must be at least 1"),
        (["-o", "nowhere/here.toml"], "no folder nowhere"),
        (["-o", "here.svg"], "writes .json, .txt or .toml, not .svg"),
    ],
)
def test_what_cannot_be_done_is_said_before_measuring(given, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrate, "service", lambda name: pytest.fail("it measured"))
    assert main(["calibrate", *given]) == 2
    assert words in capsys.readouterr().err
