"""Published kernels predicted again: rows typed in here, and the whole set in benchmarks/published/rows."""

import pytest

from shardproof.benchmarks.published.row import Row, read_rows
from shardproof.benchmarks.published.validation.kernels import (
    HEADER,
    KERNELS,
    KernelPrediction,
    device_of,
    kernel_errors,
    predict_kernel,
)


def row(gpu, op, shape, efficiency, peak=312):
    measured = {"op": op, "shape": shape, "efficiency": efficiency, "op_peak_tflops": peak}
    return Row(
        {"id": "x", "source": "s", "family": "f", "hardware": {"gpu": gpu}, "precision": "bf16", "measured": measured}
    )


PRODUCT = "b=1, m=4096, k=5120, n=1536, layout=TN, accumulate=False, out_dtype=bf16"
GROUPED = (
    "ng=20, M=1232, N=3072, K=5120, dtype=bf16, out_dtype=bf16, main_grad_dtype=fp32, stage={}, grad=False, "
    "accumulate={}, "
    "use_split_accumulator=False, single_output=True"
)
ATTENTION = "batch=1, seq_len=4096, head_num={}, kv_head_num=8, qk_head_dim=128, v_head_dim=128, qkv_contiguous=True"


@pytest.mark.parametrize(
    ("published", "most"),
    [
        (row("A100-PCIe", "matmul", PRODUCT, 0.7877), 0.08),
        (row("A100-PCIe", "group_matmul", GROUPED.format("fwd", "False"), 0.7074), 0.1),
        (row("A100-PCIe", "group_matmul", GROUPED.format("bwd_grad_w", "True"), 0.6036), 0.1),
        (row("A100-PCIe", "sdp_fwd", ATTENTION.format(32), 1.132), 0.05),
        (row("B200", "sdp_bwd", ATTENTION.format(64), 0.7294, 2250), 0.1),
    ],
)
def test_a_row_is_predicted_within_its_bound(published, most):
    prediction = predict_kernel(published)
    assert prediction.refused == "" and abs(prediction.error) < most


def test_the_measured_time_of_a_row_is_its_flops_over_efficiency_and_peak():
    prediction = predict_kernel(row("A100-PCIe", "matmul", PRODUCT, 0.5))
    assert prediction.measured_s == pytest.approx(2 * 4096 * 5120 * 1536 / (0.5 * 312e12))
    causal = predict_kernel(row("A100-PCIe", "sdp_fwd", ATTENTION.format(32), 1.0))
    assert causal.measured_s == pytest.approx(4 * 32 * 4096**2 * 128 / 312e12)


def test_a_short_kernel_takes_as_long_as_the_host_to_issue_the_next():
    small = row("B200", "matmul", PRODUCT.replace("4096", "64").replace("5120", "64"), 0.01, 2250)
    assert predict_kernel(small).predicted_s == 15e-6


def test_a_device_or_kernel_that_is_not_modelled_is_refused_by_name():
    assert predict_kernel(row("Gaudi 2", "matmul", PRODUCT, 0.5)).refused == "no preset describes a Gaudi 2"
    assert predict_kernel(row("B200", "conv", "a=1", 0.5)).refused == "kernel conv is not modelled"


def test_an_a100_on_a_pcie_card_keeps_0_74_of_its_peak():
    cluster = device_of("A100-PCIe")
    assert cluster.matmul_efficiency * cluster.sustained_share == pytest.approx(0.74)


def test_errors_are_summed_up_by_device_and_kernel():
    published = row("B200", "matmul", PRODUCT, 0.5)
    errors = [KernelPrediction(published, "matmul", predicted, 1.0) for predicted in (1.1, 0.8, 1.0, 1.3)]
    (found,) = kernel_errors(errors)
    assert (found.device, found.kernel, found.count) == ("B200", "matmul", 4)
    assert (found.mape, found.bias, found.median, found.worst) == pytest.approx((0.15, 0.05, 0.15, 0.3))
    assert len(str(found).split()) == len(HEADER.replace("9 of 10", "9of10").split())


def test_all_published_kernels_together_stay_within_their_bounds():
    """Products of a B200 repeat within 20% only: the same shape runs at full clock or at the sustained one, as its
    run found the device."""
    found = {
        (e.device, e.kernel): e
        for e in kernel_errors(predict_kernel(row) for row in read_rows() if row["kind"] in KERNELS)
    }
    most = {"matmul": (0.05, 0.11), "group_matmul": (0.06, 0.12), "sdp_fwd": (0.07, 0.09), "sdp_bwd": (0.04, 0.07)}
    for kernel, bounds in most.items():
        for device, bound in zip(("A100-PCIe", "B200"), bounds, strict=True):
            assert found[device, kernel].mape < bound
            assert abs(found[device, kernel].bias) < 0.03


@pytest.mark.parametrize(
    ("published", "said"),
    [
        (row("A100-PCIe", "matmul", PRODUCT, 0.5, peak=None), "the rate is not published"),
        (row("A100-PCIe", "matmul", "4096x5120x1536", 0.5), "shape '4096x5120x1536' is no list of name=value"),
        (
            Row({**row("A100-PCIe", "matmul", PRODUCT, 0.5).data, "precision": "nvfp4"}),
            ("precision 'nvfp4' is not modelled on dgx-a100-80g"),
        ),
    ],
)
def test_a_row_that_cannot_be_read_is_refused_with_a_reason(published, said):
    assert predict_kernel(published).refused == said
