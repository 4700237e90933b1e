"""Published collectives: rows of NCCL are predicted, kernels of other engines are refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof.benchmarks.published.row import Row
from shardproof.benchmarks.published.validation.collectives import predict_collective


def row(gpu: str, count: int, **measured: Any) -> Row:
    return Row(
        {"id": "row", "source": "test", "hardware": {"gpu": gpu, "count": count}, "measured": {"nodes": 1, **measured}}
    )


@pytest.mark.parametrize(
    ("published", "algorithm"),
    [
        # dgxc
        (
            row("H100-80GB SXM", 8, op="all_reduce", algorithm="NCCL default", bytes=2**34, time_us=62648.0),
            "nvls/Simple",
        ),
        # stas00, as below
        (row("A100-80GB SXM", 8, op="all_reduce", algorithm="NCCL", bytes=2**34, busbw_gbs=234.89), "ring/Simple"),
        (row("H200-141GB SXM", 8, op="all_reduce", algorithm="NCCL ring", bytes=2**34, busbw_gbs=367.2), "ring/Simple"),
        (row("H200-141GB SXM", 8, op="reduce_scatter", algorithm="NCCL", bytes=2**34, busbw_gbs=362.9), "ring/Simple"),
        (
            row("H200-141GB SXM", 32, op="all_reduce", algorithm="NCCL", bytes=2**34, nodes=4, busbw_gbs=369.06),
            "ring/Simple",
        ),
    ],
)
def test_a_large_collective_of_nccl_is_predicted_within_2_percent(published, algorithm):
    prediction = predict_collective(published)
    assert prediction.algorithm == algorithm
    assert abs(prediction.error) < 0.02


def test_a_bandwidth_without_a_size_is_taken_at_8_gib():
    prediction = predict_collective(row("H100", 8, op="all_reduce", algorithm=None, bytes=None, busbw_gbs=476.0))
    assert prediction.num_bytes == 2**33
    assert abs(prediction.error) < 0.02


def test_a_hop_through_nvlink_and_one_through_infiniband_take_3_4_and_2_7_us():
    nvlink = predict_collective(row("H800", 2, op="p2p", algorithm="NVLink", bytes=64, same_leaf_us=3.33))
    infiniband = predict_collective(row("H800", 2, op="p2p", algorithm="InfiniBand", bytes=64, same_leaf_us=2.8))
    assert (nvlink.predicted_s, infiniband.predicted_s) == (3.4e-6, 2.7e-6)


@pytest.mark.parametrize(
    ("published", "reason"),
    [
        (
            row("H100", 8, op="all_reduce", algorithm="custom 2-stage", bytes=2**20, time_us=17.0),
            "a kernel of inference engines",
        ),
        (
            row("A100", 3072, op="all_reduce", algorithm=None, bytes=None, aggregate_effective_tbs=12.9),
            "neither a time nor a bandwidth",
        ),
        (row("A100", 3072, op="p2p_bisection", algorithm=None, bytes=None), "p2p_bisection is no collective"),
        (row("MI300X", 8, op="all_reduce", algorithm="NCCL", bytes=2**20, time_us=1.0), "no preset describes a MI300X"),
        (row("H800", 2, op="p2p", algorithm="RoCE", bytes=64, same_leaf_us=3.6), "RoCE is not the network of h800-pod"),
    ],
)
def test_a_row_that_is_not_predicted_says_why(published, reason):
    prediction = predict_collective(published)
    assert reason in prediction.refused
    assert prediction.error is None
