"""Published measurements of single kernels predicted again: products by shape, grouped products, fused attention.

A kernel repeated alone differs from the same kernel in training in two ways that are modelled here. The clock falls
only as far as this kernel's own power demands: an inefficient shape runs at full clock, an efficient one at the
sustained rate. And a short kernel takes as long as the host needs to issue the next one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ....core.machine.cluster import ClusterSpec
from ....core.machine.cluster_presets import cluster_preset
from ....core.program import Product
from ....simulator.compute.compute import (
    AttentionShape,
    attention_s,
    grouped_product_s,
    product_s,
    sustained_rate,
)
from ..row import Row, RowError

KERNELS = ("matmul", "kernel_efficiency")
"""Kinds of rows that measure one kernel."""

PRESETS = {
    "A100 SXM": "dgx-a100-80g",
    "A100-PCIe": "dgx-a100-80g",
    "H100 SXM": "dgx-h100",
    "H200 SXM": "dgx-h200",
    "B200 SXM": "dgx-b200",
    "B200": "dgx-b200",
    "B300 SXM": "dgx-b300",
}
"""Device of a row -> the preset that describes it."""

PCIE_SHARE, PCIE_MEMORY_BYTES_PER_S = 0.80, 1.935e12
"""An A100 on a PCIe card has the same chip, 300 W rather than 400, and slower memory (A100 80GB PCIe product brief).
Its sustained share is fitted to its own rows: long products stay at 0.74 of the peak."""

B200_ALONE_SHARE = 0.56
"""Sustained share of a B200 that runs one product over and over: long ones stay at 0.49 of the peak. In training, where
memory and links draw power too, the device is given less."""

PRODUCT_CALL_S, GROUPED_CALL_S, ATTENTION_CALL_S = 15e-6, 8.8e-6, 95e-6
"""Least time between two calls from the host: one GEMM of Transformer Engine, one expert's product inside its grouped
GEMM, and one forward of flash-attn from Python. Read off the smallest kernels of the B200 rows, whose times stop
falling with their size."""


@dataclass(frozen=True)
class KernelPrediction:
    """One kernel's time predicted next to the measured one. `refused` says why there is no prediction."""

    row: Row
    kernel: str
    predicted_s: float | None = None
    measured_s: float | None = None
    refused: str = ""

    @property
    def error(self) -> float | None:
        """Relative error of the time; positive is too slow."""
        return self.predicted_s / self.measured_s - 1 if self.predicted_s and self.measured_s else None


@dataclass(frozen=True)
class KernelErrors:
    """Errors of one kind of kernel on one device: mean absolute, mean, median absolute, nine tenths
    stay below, and worst."""

    device: str
    kernel: str
    count: int
    mape: float
    bias: float
    median: float
    ninth_decile: float
    worst: float

    def __str__(self) -> str:
        return (
            f"{self.device:12s} {self.kernel:14s} {self.count:4d} {self.mape:7.1%} {self.bias:+7.1%} "
            f"{self.median:7.1%} "
            f"{self.ninth_decile:7.1%} {self.worst:+8.1%}"
        )


HEADER = (
    f"{'device':12s} {'kernel':14s} {'rows':>4s} {'MAPE':>7s} {'bias':>7s} {'median':>7s} {'9 of 10':>7s} {'worst':>8s}"
)
"""What the columns of `KernelErrors` as text are."""


def predict_kernel(row: Row) -> KernelPrediction:
    """The time of a published kernel."""
    kernel = str(row["measured.op"] or "best matmul")
    try:
        device = str(row["hardware.gpu"])
        if device not in PRESETS:
            raise RowError(f"no preset describes a {device}")
        flops, predicted_s = _predicted(device_of(device), row, kernel)
        if (
            not (peak_tflops := row["measured.op_peak_tflops"] or row["measured.peak_tflops"])
            or not row["measured.efficiency"]
        ):
            raise RowError("the rate is not published")
        return KernelPrediction(row, kernel, predicted_s, flops / (row["measured.efficiency"] * peak_tflops * 1e12))
    except RowError as error:
        return KernelPrediction(row, kernel, refused=str(error))


def device_of(name: str) -> ClusterSpec:
    """The device of a row."""
    cluster = cluster_preset(PRESETS[name], 8)
    if name == "B200":
        return replace(cluster, sustained_share=B200_ALONE_SHARE)
    if name != "A100-PCIe":
        return cluster
    return replace(cluster, sustained_share=PCIE_SHARE, device_memory_bytes_per_s=PCIE_MEMORY_BYTES_PER_S)


def kernel_errors(predictions: Iterable[KernelPrediction]) -> list[KernelErrors]:
    """Errors by device and kernel."""
    groups: dict[tuple[str, str], list[float]] = {}
    for prediction in predictions:
        if (error := prediction.error) is not None:
            groups.setdefault((str(prediction.row["hardware.gpu"]), prediction.kernel), []).append(error)
    return [_errors(device, kernel, errors) for (device, kernel), errors in sorted(groups.items())]


def _errors(device: str, kernel: str, errors: list[float]) -> KernelErrors:
    sizes = sorted(map(abs, errors))
    return KernelErrors(
        device,
        kernel,
        count=len(errors),
        mape=statistics.fmean(sizes),
        bias=statistics.fmean(errors),
        median=statistics.median(sizes),
        ninth_decile=sizes[(9 * len(sizes)) // 10 - (len(sizes) % 10 == 0)],
        worst=max(errors, key=abs),
    )


def _predicted(cluster: ClusterSpec, row: Row, kernel: str) -> tuple[float, float]:
    """FLOPs as the source counted them, and predicted seconds."""
    dtype, full_clock = row.need("precision"), replace(cluster, sustained_share=1.0, sustained_share_by_dtype={})
    if dtype not in cluster.peak_flops_per_s:
        raise RowError(f"precision {dtype!r} is not modelled on {cluster.name}")
    if kernel == "best matmul":
        m, n, k = (int(size) for size in row.need("measured.shape_mnk").split("x"))
        product = Product("", m, n, k)
        # the best of a search: too short to meet the power limit
        return product.flops, product_s(full_clock, dtype, product)
    shape = _shape(str(row.need("measured.shape")))
    if kernel == "matmul":
        product = Product("", int(shape["m"]), int(shape["n"]), int(shape["k"]), int(shape["b"]))
        alone_s = product_s(full_clock, dtype, product, output_bytes=_output_bytes(shape))
        return product.flops, _alone(cluster, dtype, product.flops, alone_s, PRODUCT_CALL_S)
    if kernel == "group_matmul":
        product = _grouped(shape)
        alone_s = grouped_product_s(full_clock, dtype, product, output_bytes=_output_bytes(shape))
        return product.flops, _alone(cluster, dtype, product.flops, alone_s, product.count * GROUPED_CALL_S)
    if kernel in ("sdp_fwd", "sdp_bwd"):
        return _attention(cluster, full_clock, dtype, shape, backward=kernel == "sdp_bwd")
    raise RowError(f"kernel {kernel} is not modelled")


def _shape(said: str) -> dict[str, str]:
    parts = [part.partition("=") for part in said.split(", ")]
    if not all(value for _, _, value in parts):
        raise RowError(f"shape {said!r} is no list of name=value")
    return {name: value for name, _, value in parts}


def _output_bytes(shape: Mapping[str, str]) -> int | None:
    """Bytes that an output element moves where the product adds to it."""
    if shape["accumulate"] != "True":
        return None
    return 8 if (shape.get("main_grad_dtype") or shape["out_dtype"]) == "fp32" else 4


def _grouped(shape: Mapping[str, str]) -> Product:
    experts, m, n, k = (int(shape[name]) for name in ("ng", "M", "N", "K"))
    stages = {"fwd": (m, n, k), "bwd_grad_act": (m, k, n), "bwd_grad_w": (n, k, m)}
    return Product("", *stages[shape["stage"]], count=experts, grouped=True)


def _attention(
    cluster: ClusterSpec, full_clock: ClusterSpec, dtype: str, shape: Mapping[str, str], *, backward: bool
) -> tuple[float, float]:
    """The source counts all of the square, and 5/2 of the forward's products backward."""
    names = ("batch", "head_num", "kv_head_num", "seq_len", "qk_head_dim", "v_head_dim")
    batch, heads, kv_heads, tokens, qk_head_dim, v_head_dim = (int(shape[name]) for name in names)
    core = AttentionShape(batch, heads, kv_heads, tokens, tokens, qk_head_dim, v_head_dim)
    counted = core.scores * (core.qk_head_dim + core.v_head_dim) * (5 if backward else 2)
    alone_s = attention_s(full_clock, dtype, core, backward=backward)
    return counted, _alone(
        cluster, dtype, core.flops(backward=backward), alone_s, 0.0 if backward else ATTENTION_CALL_S
    )


def _alone(cluster: ClusterSpec, dtype: str, flops: float, full_clock_s: float, call_s: float) -> float:
    """Seconds of a kernel repeated alone: at full clock, at the rate that power sustains, or as
    fast as the host issues it."""
    return max(full_clock_s, flops / sustained_rate(cluster, dtype), call_s)
