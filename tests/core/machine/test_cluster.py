"""Clusters: every number has a source, and the hierarchy is a graph of levels."""

import dataclasses
import os

import pytest

from shardproof.core.base.errors import ClusterError, UnknownNameError
from shardproof.core.machine.cluster import ClusterSpec
from shardproof.core.machine.cluster_presets import CLUSTER_PRESETS, cluster_preset
from shardproof.core.plan.plan import Plan


@pytest.mark.parametrize("name", CLUSTER_PRESETS)
def test_every_number_of_a_preset_has_a_source(name):
    cluster = cluster_preset(name, 16)
    numbers = {field.name for field in dataclasses.fields(ClusterSpec)} - {"name", "num_devices", "sources"}
    assert set(cluster.sources) == numbers - {"device_price_per_hour", "device_watts"}  # a user's, in no preset
    assert (cluster.device_price_per_hour, cluster.device_watts) == (0, 0)
    assert cluster.name == name and all(cluster.sources.values())


def test_dgx_h100_of_512_devices_is_64_nodes_with_3_2_tb_per_s_of_network_bits_each():
    cluster = cluster_preset("dgx-h100", 512)
    assert cluster.num_nodes == 64
    assert cluster.node_network_bytes_per_s == 8 * 400e9 / 8
    assert cluster.peak_flops_per_s["bf16"] == 989.4e12


def test_this_host_shares_its_memory_and_cores_among_its_ranks():
    one, many = cluster_preset("this-host", 1), cluster_preset("this-host", 64)
    assert many.device_memory_bytes == one.device_memory_bytes / 64
    assert many.peak_flops_per_s["fp32"] == pytest.approx(
        one.peak_flops_per_s["fp32"] * min(1, (os.cpu_count() or 1) / 64)
    )
    assert many.num_nodes == 1


def test_every_problem_of_a_cluster_is_reported_together():
    with pytest.raises(ClusterError) as caught:
        dataclasses.replace(
            cluster_preset("dgx-h100", 8),
            devices_per_node=0,
            link_efficiency=1.5,
            network_latency_s=-1.0,
            peak_flops_per_s={"bf61": 1.0},
        )
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    ("headroom", "num_bytes"),
    [
        ("0", 0),
        ("8%", 0.08 * 79.11 * 2**30),
        ("0.5%", 0.005 * 79.11 * 2**30),
        ("4GiB", 2**32),
        ("500 MB", 5e8),
        ("4e9", 4e9),
    ],
)
def test_headroom_is_a_share_of_the_device_or_bytes(headroom, num_bytes):
    cluster = dataclasses.replace(cluster_preset("dgx-h100", 8), headroom=headroom)
    assert cluster.headroom_bytes == pytest.approx(num_bytes, rel=1e-6)


@pytest.mark.parametrize("headroom", ["", "-1", "8", "100%", "8 %%", "much", "nan", "1e999", "4XiB", "1iB"])
def test_headroom_that_is_no_size_is_refused_with_what_is(headroom):
    with pytest.raises(ClusterError, match="write a share of the whole below 100%"):
        dataclasses.replace(cluster_preset("dgx-h100", 8), headroom=headroom)


def test_headroom_of_the_whole_device_is_refused():
    with pytest.raises(ClusterError, match="leaves nothing of device_memory_bytes=84943715697"):
        dataclasses.replace(cluster_preset("dgx-h100", 8), headroom="80GiB")


def test_an_unknown_cluster_offers_the_closest_one():
    with pytest.raises(UnknownNameError, match="did you mean 'dgx-h100'"):
        cluster_preset("dgx-h10", 8)


def test_a_cluster_can_be_hashed_so_that_plans_can_be():
    assert hash(cluster_preset("dgx-h100", 8)) == hash(cluster_preset("dgx-h100", 8))


@pytest.mark.parametrize(
    ("name", "bf16_flops_per_s", "memory_gib", "memory_bytes_per_s", "link_bytes_per_s", "network_bytes_per_s"),
    [
        ("dgx-2", None, 31.74, 900e9, 150e9, 100e9),
        ("dgx-a100-40g", 312e12, 39.41, 1.555e12, 300e9, 200e9),
        ("dgx-a100-80g", 312e12, 79.15, 2.039e12, 300e9, 200e9),
        ("dgx-h100", 989.4e12, 79.11, 3.35e12, 450e9, 400e9),
        ("dgx-h200", 989.4e12, 139.80, 4.8e12, 450e9, 400e9),
        ("h800-pod", 989.4e12, 79.11, 3.35e12, 200e9, 400e9),
        ("alps-gh200", 989.4e12, 94.88, 4e12, 450e9, 100e9),
        ("dgx-b200", 2.25e15, 178.35, 8e12, 900e9, 400e9),
        ("dgx-b300", 2.25e15, 267.69, 8e12, 900e9, 800e9),
        ("gb200-nvl72", 2.5e15, 184.31, 8e12, 900e9, 72 * 50e9),
        ("gb300-nvl72", 2.5e15, 276.50, 8e12, 900e9, 72 * 100e9),
    ],
)
def test_a_preset_repeats_its_data_sheet_and_what_its_runtime_reports(
    name, bf16_flops_per_s, memory_gib, memory_bytes_per_s, link_bytes_per_s, network_bytes_per_s
):
    cluster = cluster_preset(name, 72)
    assert cluster.peak_flops_per_s.get("bf16") == bf16_flops_per_s
    assert (cluster.device_memory_bytes, cluster.device_memory_bytes_per_s) == (
        round(memory_gib * 2**30),
        memory_bytes_per_s,
    )
    source = cluster.sources["device_memory_bytes"]
    assert (source.startswith("reported: ") and "2026-11-23" in source) or (
        name == "h800-pod" and source.startswith("derived: ")
    )
    assert (cluster.node_link_bytes_per_s, cluster.node_network_bytes_per_s) == (link_bytes_per_s, network_bytes_per_s)


@pytest.mark.parametrize(
    ("devices", "per_rack"), [(8, 72), (72, 72), (128, 64), (144, 72), (256, 64), (512, 64), (100, 50)]
)
def test_jobs_over_several_racks_use_an_equal_part_of_each(devices, per_rack):
    cluster = cluster_preset("gb200-nvl72", devices)
    assert cluster.devices_per_node == per_rack
    assert cluster.node_network_bytes_per_s == per_rack * 50e9


def test_shares_by_dtype_and_curves_are_checked_with_everything_else():
    with pytest.raises(ClusterError) as caught:
        dataclasses.replace(
            cluster_preset("dgx-h100", 8),
            matmul_efficiency_by_dtype={"fp8": 1.2},
            sustained_share_by_dtype={"int8": 0.5},
            product_curve={"large": 1e12},
            memory_curve={"1e6": 0.0},
            num_compute_units=0,
        )
    assert [problem.split("=")[0] for problem in caught.value.problems] == [
        "num_compute_units",
        "matmul_efficiency_by_dtype",
        "sustained_share_by_dtype",
        "product_curve",
        "memory_curve",
    ]


def test_a_cluster_file_brings_measured_curves_and_a_plan_keeps_them(tmp_path):
    (tmp_path / "mine.toml").write_text(
        '[cluster]\npreset = "this-host"\nmemory_curve = { "1e4" = 2e10, "1e8" = 8e9 }\nsources = { memory_curve = '
        '"measured: here" }\n'
        '[cluster.product_curve]\n"1e6" = 4e10\n"1e9" = 9e10\n',
        encoding="utf-8",
    )
    text = '[model]\npreset = "gpt2"\n[cluster]\nfile = "mine.toml"\n[batch]\nglobal = 4\nmicro = 1\nsequence = 1024\n'
    plan = Plan.from_toml(text, str(tmp_path / "plan.toml"))
    assert dict(plan.cluster.product_curve) == {"1e6": 4e10, "1e9": 9e10}
    assert dict(plan.cluster.memory_curve) == {"1e4": 2e10, "1e8": 8e9}
    assert plan.cluster.sources["memory_curve"] == "measured: here"
    assert Plan.from_toml(plan.to_toml()) == plan
