"""What is known of one device of each kind, number by number with its source. `core.machine.cluster_presets`
puts devices into nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Facts = Mapping[str, tuple[Any, str]]
"""Field of `ClusterSpec` -> its value and where that comes from."""

ESTIMATE = "estimate, not measured: "
MODELLED = "modelled: "

_MAMF = "measured: stas00/ml-engineering, compute/accelerator, maximum achievable matmul FLOPS"
_SIMUMAX = "measured: SimuMax v1.2 kernel tables (configs/system)"
_FA3 = "measured: Shah et al. 2024 (FlashAttention-3), figures 5 and 6, cuDNN"
_FITTED = "modelled: fitted to the "
_PREDICTABLE = "thonking.ai, 'Strangely, matrix multiplications on GPUs run faster when given predictable data'"

_SEEN = "looked up 2026-11-23"


def reported_bytes(gib: float, by: str) -> tuple[float, str]:
    """Memory of a device as `cudaMemGetInfo` reports its total, in the GiB with two decimals that PyTorch
    prints, and who printed it."""
    return float(round(gib * 2**30)), f"reported: {gib:.2f} GiB in all by cudaMemGetInfo ({by}; {_SEEN})"


_KERNELS: Facts = {
    "memory_efficiency": (0.85, f"{ESTIMATE}large streaming kernels"),
    "kernel_launch_s": (2e-6, f"{ESTIMATE}gap between dependent kernels of one stream"),
    "kernel_floor_s": (2e-6, f"{ESTIMATE}a kernel that does nothing"),
    "sustained_share_by_dtype": ({}, f"{ESTIMATE}none differs"),
    "product_curve": ({}, "products follow their tiles"),
    "memory_curve": ({}, "kernels follow the memory bandwidth"),
    "kernel_curve": ({}, "kernels follow the memory bandwidth"),
    "busy_core_share": (1.0, "every device computes on its own"),
    "rank_skew_root_s": (0.0, "devices are equally fast; see variation"),
    "num_cores": (0, "every device computes on its own"),
    "step_over_kernels": (1.0, "in the efficiencies"),
}
"""What is taken to be the same for every GPU."""

_GEN_4 = (
    24.8e9,
    "measured: nvbandwidth, host_to_device_memcpy_ce, on 8 A100 SXM4 over PCIe 4.0 x16 (NVIDIA developer forum 352186)",
)
_GEN_5 = (
    55.6e9,
    "measured: nvbandwidth, host_to_device_memcpy_ce, over PCIe 5.0 x16 (NVIDIA developer blog, 'NVbandwidth')",
)
_C2C = (
    297e9,
    "measured: device to host over NVLink-C2C on a GH200; 375 GB/s the other way (Schieffer et al. 2024, 'Harnessing "
    "Integrated CPU-GPU System Memory for HPC')",
)

_V100_DATASHEET = "NVIDIA V100 Tensor Core GPU datasheet (2020), SXM"

V100_32G: Facts = {
    **_KERNELS,
    "host_link_bytes_per_s": (12.4e9, f"{ESTIMATE}PCIe 3.0 x16, at the share that PCIe 4.0 reaches on an A100"),
    "num_compute_units": (80, "NVIDIA Tesla V100 GPU architecture whitepaper: 80 streaming multiprocessors"),
    "device_memory_bytes": reported_bytes(31.74, "liucongg/ChatGLM-Finetuning, issue 73"),
    "device_memory_bytes_per_s": (900e9, _V100_DATASHEET),
    "peak_flops_per_s": ({"fp32": 15.7e12, "fp16": 125e12}, _V100_DATASHEET),
    "matmul_efficiency": (
        0.94,
        "measured: NVIDIA developer forum 79781: 101 of 112 TFLOP/s at 8192 x 8192 x 8192 with cuBLAS on a V100 "
        "PCIe, less tiles and waves "
        "of that shape",
    ),
    "matmul_efficiency_by_dtype": ({}, f"{ESTIMATE}none differs"),
    "sustained_share": (1.0, f"{ESTIMATE}no measurement on random data is known"),
    "grouped_matmul_efficiency": (0.94, f"{ESTIMATE}as on an A100"),
    "attention_forward_efficiency": (0.4, f"{ESTIMATE}no FlashAttention-2 for this device"),
    "attention_backward_efficiency": (0.3, f"{ESTIMATE}no FlashAttention-2 for this device"),
    "attention_half_head_dim": (20.0, f"{ESTIMATE}as on an A100"),
    "host_dispatch_s": (8e-6, f"{ESTIMATE}as for an A100"),
    "flash_attention_2_share": (1.0, "in the attention efficiencies"),
    "overlap_compute_share": (0.8, f"{MODELLED}16 channels of NCCL, a processor each, of 80"),
}

_A100_DATASHEET = "NVIDIA A100 Tensor Core GPU datasheet (2021), SXM4, dense"

A100: Facts = {
    **_KERNELS,
    "host_link_bytes_per_s": _GEN_4,
    "memory_efficiency": (
        0.85,
        "measured: triad of cub at 0.74 of the bandwidth on 50 MB, 0.92 on 800 MB, 0.93 on 6.4 GB (NVIDIA/cccl, "
        "issue 2714, a device of "
        "2.04 TB/s), between which tensors of training lie; fits range from 0.71 to 0.98 by stack (docs/validation.md)",
    ),
    "num_compute_units": (108, "NVIDIA A100 Tensor Core GPU architecture whitepaper: 108 streaming multiprocessors"),
    "peak_flops_per_s": ({"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12}, _A100_DATASHEET),
    "matmul_efficiency": (
        0.925,
        (f"{_MAMF}, bf16: 271.2 of 312 TFLOP/s at 1024 x 10240 x 5120, less tiles and waves of that shape"),
    ),
    "matmul_efficiency_by_dtype": ({}, f"{ESTIMATE}none differs"),
    "sustained_share": (0.89, f"measured: {_PREDICTABLE}: 257 TFLOP/s at 8192 x 8192 x 8192 on random bf16 at 400 W"),
    "grouped_matmul_efficiency": (0.94, f"{_SIMUMAX}, A100-PCIe: 11 grouped products, fitted"),
    "attention_forward_efficiency": (0.73, f"{_SIMUMAX}, A100-PCIe: 9 kernels, fitted; the many-block limit"),
    "attention_backward_efficiency": (0.53, f"{_SIMUMAX}, A100-PCIe: 9 kernels, fitted; the many-block limit"),
    "attention_half_head_dim": (
        20.0,
        ("measured: Dao 2023 (FlashAttention-2), figures 4 to 6: head dim 64 at about 0.88 of head dim 128"),
    ),
    "host_dispatch_s": (8e-6, f"{ESTIMATE}eager PyTorch on the host processors of the time"),
    "flash_attention_2_share": (1.0, "FlashAttention-2 (Dao 2023) was written for this device"),
    "overlap_compute_share": (0.85, f"{MODELLED}16 channels of NCCL, a processor each, of 108"),
}

A100_40G: Facts = {
    **A100,
    "device_memory_bytes": reported_bytes(39.41, "tatsu-lab/stanford_alpaca, issue 308"),
    "device_memory_bytes_per_s": (1.555e12, _A100_DATASHEET),
}
A100_80G: Facts = {
    **A100,
    "device_memory_bytes": reported_bytes(79.15, "huggingface/accelerate, issue 1864"),
    "device_memory_bytes_per_s": (2.039e12, _A100_DATASHEET),
}

_H100_DATASHEET = "NVIDIA H100 Tensor Core GPU datasheet (2023), SXM5, dense"
_H200_DATASHEET = "NVIDIA H200 Tensor Core GPU datasheet (2024), SXM"

H100: Facts = {
    **_KERNELS,
    "host_link_bytes_per_s": _GEN_5,
    "num_compute_units": (
        132,
        ("NVIDIA H100 Tensor Core GPU architecture whitepaper: 132 streaming multiprocessors in SXM5"),
    ),
    "device_memory_bytes": reported_bytes(
        79.11, ("NVIDIA-NeMo/Automodel, pull request 2673; Lightning-AI/lightning-thunder, issue 474")
    ),
    "device_memory_bytes_per_s": (3.35e12, _H100_DATASHEET),
    "peak_flops_per_s": (
        {"fp32": 67e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12},
        _H100_DATASHEET,
    ),
    "matmul_efficiency": (
        0.86,
        (f"{_MAMF}, bf16: 794.5 of 989 TFLOP/s at 2048 x 2048 x 13312, less tiles and waves of that shape"),
    ),
    "matmul_efficiency_by_dtype": (
        {"fp8": 0.815},
        f"{_MAMF}: fp8 as a share of bf16 on the GH200, each less tiles and waves of its shape",
    ),
    "sustained_share": (
        0.795,
        f"{_FITTED}dense bf16 rows of dgxc-benchmarking (calibration half, 4 families; 0.78 to 0.81); products on "
        "random data reach the "
        "limit of 700 W",
    ),
    "sustained_share_by_dtype": (
        {"fp8": 0.778},
        f"{_FITTED}dense fp8 rows of dgxc-benchmarking and MLPerf (calibration half, 9 families; 0.75 to 0.80)",
    ),
    "grouped_matmul_efficiency": (
        0.94,
        (f"{ESTIMATE}as on an A100, with the same kernels of cuBLAS in streams side by side"),
    ),
    "attention_forward_efficiency": (0.62, f"{_FA3}, causal: 539 TFLOP/s at 16,384 tokens; the many-block limit"),
    "attention_backward_efficiency": (
        0.50,
        f"{_FA3}, not causal: 516 TFLOP/s at 16,384 tokens; causal less by the forward's 0.91; the many-block limit",
    ),
    "attention_half_head_dim": (70.0, f"{_FA3}, causal: 388 TFLOP/s with head dim 64, 539 with 128"),
    "host_dispatch_s": (7e-6, f"{ESTIMATE}eager PyTorch and Transformer Engine on the host processors of the time"),
    "flash_attention_2_share": (0.62, f"{_FA3}, causal, head dim 128, 16,384 tokens: 335 of 539 TFLOP/s"),
    "overlap_compute_share": (
        0.82,
        f"{MODELLED}24 of 132 processors: an all-gather's blocks (NVIDIA developer forum 337991, nsys of FSDP on an "
        "H100)",
    ),
}

H200: Facts = {
    **H100,
    "device_memory_bytes": reported_bytes(
        139.80, "PyTorch's messages in public repositories, 139.72 to 139.81; 143,771 MiB by nvidia-smi on ours"
    ),
    "device_memory_bytes_per_s": (4.8e12, _H200_DATASHEET),
}

H800: Facts = {
    **H100,
    "device_memory_bytes": (
        H100["device_memory_bytes"][0],
        ("derived: no total is published; as an H100, whose memory it has"),
    ),
}

_GH200_DATASHEET = "NVIDIA GH200 Grace Hopper Superchip datasheet (2023), HBM3"

GH200: Facts = {
    **H100,
    "host_link_bytes_per_s": _C2C,
    "device_memory_bytes": reported_bytes(94.88, "Lightning-AI/litgpt, issue 1892"),
    "device_memory_bytes_per_s": (4e12, _GH200_DATASHEET),
    "host_dispatch_s": (9e-6, f"{ESTIMATE}Grace processors dispatch more slowly than x86 hosts"),
}

_DGX_B200 = "NVIDIA DGX B200 datasheet (2024)"
_NVL72 = "NVIDIA GB200 NVL72 datasheet (2024), dense, of 72"
_NVL72_ULTRA = "NVIDIA GB300 NVL72 datasheet (2025), dense, of 72"
_MIG = "measured: nvidia-smi mig -lgip (NVIDIA/mig-parted issues 166 and 227)"

B200: Facts = {
    **_KERNELS,
    "host_link_bytes_per_s": (_GEN_5[0], f"{ESTIMATE}as an H100's, whose link to the host it has"),
    "num_compute_units": (148, f"{_MIG}; chipsandcheese.com, 'Nvidia's B200': 74 on each of two dies"),
    "device_memory_bytes": reported_bytes(178.35, "stas00/ml-engineering, debug/pytorch.md"),
    "device_memory_bytes_per_s": (8e12, f"{_DGX_B200}: 64 TB/s in 8"),
    "peak_flops_per_s": (
        {"fp32": 75e12, "tf32": 1.1e15, "bf16": 2.25e15, "fp16": 2.25e15, "fp8": 4.5e15},
        f"{_DGX_B200}: fp8 72 PFLOP/s sparse in 8, halves for 16 bits; fp32 and tf32 of HGX B200",
    ),
    "matmul_efficiency": (
        0.873,
        (f"{_MAMF}, bf16: 1745 of 2250 TFLOP/s at 1792 x 16128 x 3072, less tiles and waves of that shape"),
    ),
    "matmul_efficiency_by_dtype": (
        {"fp8": 0.83},
        (f"{_MAMF}, fp8 on the B300: 3353 of 4500 TFLOP/s at 3072 x 6144 x 7168, likewise"),
    ),
    "sustained_share": (
        0.52,
        f"{_FITTED}calibration half of SimuMax's B200 training rows (8 families; 0.51 to 0.54). Its products alone, "
        "of 1 ms and more, stay "
        "at 0.49 of the peak, which is 0.56: training leaves them less power",
    ),
    "sustained_share_by_dtype": (
        {"fp8": 0.80},
        (f"{_FITTED}fp8 rows of MLPerf Training v4.1 and Megatron-Bridge, two models"),
    ),
    "grouped_matmul_efficiency": (0.60, f"{_SIMUMAX}, B200: 77 grouped products, fitted"),
    "attention_forward_efficiency": (0.52, f"{_SIMUMAX}, B200: 19 kernels, fitted; the many-block limit"),
    "attention_backward_efficiency": (0.45, f"{_SIMUMAX}, B200: 22 kernels, fitted; the many-block limit"),
    "attention_half_head_dim": (70.0, f"{ESTIMATE}as on Hopper, whose ratio of products to exponentials is no better"),
    "host_dispatch_s": (8.8e-6, f"{_SIMUMAX}, B200: an expert's product where the host bounds grouped products"),
    "flash_attention_2_share": (
        0.31,
        "measured: FlashAttention-2, whose kernels are Ampere's, at head dim 128: 352 to 362 TFLOP/s at 2,048 to "
        "8,192 tokens "
        "(meta-pytorch/tritonbench, pull request 171), of the 1,170 of the best; backward 334 at head dim 64 "
        "(Dao-AILab/flash-attention, "
        "issue 1589)",
    ),
    "overlap_compute_share": (
        0.57,
        f"{MODELLED}32 channels of NCCL, each in the way of the two processors that a product's tile takes together "
        "on this device "
        "(tcgen05.mma, cta_group::2), of 148",
    ),
}
_DGX_B300 = "NVIDIA DGX B300 datasheet (2025)"

B300: Facts = {
    **B200,
    "host_link_bytes_per_s": (_GEN_5[0], f"{ESTIMATE}PCIe 5.0 of the host processors"),
    "device_memory_bytes": reported_bytes(
        267.69,
        (
            "PyTorch's messages in three public repositories; 275,040 MiB by nvidia-smi, "
            "ai-dynamo/aiconfigurator, b300_sxm.yaml"
        ),
    ),
    "device_memory_bytes_per_s": (8e12, f"{_DGX_B300}: 64 TB/s in 8"),
    "peak_flops_per_s": (
        {"fp32": 75e12, "tf32": 1.1e15, "bf16": 2.25e15, "fp16": 2.25e15, "fp8": 4.5e15},
        f"{_DGX_B300}: fp8 72 PFLOP/s sparse in 8, halves for 16 bits; fp32 and tf32 of HGX B300",
    ),
    "sustained_share": (0.57, f"{ESTIMATE}of a B200, with 1.1 times its power"),
    "sustained_share_by_dtype": ({"fp8": 0.84}, f"{ESTIMATE}of a B200, with 1.1 times its power"),
}

GB200: Facts = {
    **B200,
    "host_link_bytes_per_s": (_C2C[0], f"{ESTIMATE}NVLink-C2C as of a GH200"),
    "num_compute_units": (152, f"{_MIG}: 38 in a quarter, of which a B200 has 36"),
    "device_memory_bytes": reported_bytes(184.31, "vllm-project/vllm, issue 52511"),
    "device_memory_bytes_per_s": (8e12, f"{_NVL72}: 576 TB/s"),
    "peak_flops_per_s": (
        {"fp32": 80e12, "tf32": 1.25e15, "bf16": 2.5e15, "fp16": 2.5e15, "fp8": 5e15},
        f"{_NVL72}: fp32 5.76, tf32 90, bf16 180, fp8 360 PFLOP/s",
    ),
    "sustained_share": (0.62, f"{_FITTED}dense bf16 rows of dgxc-benchmarking, one model"),
    "sustained_share_by_dtype": (
        {"fp8": 0.655},
        f"{_FITTED}dense fp8 rows of dgxc-benchmarking, MLPerf and Megatron-Bridge (calibration half, 4 families; "
        "0.63 to 0.69)",
    ),
    "host_dispatch_s": (9e-6, f"{ESTIMATE}Grace processors dispatch more slowly than x86 hosts"),
}

GB300: Facts = {
    **GB200,
    "device_memory_bytes": reported_bytes(
        276.50, "stas00/ml-engineering, debug/pytorch.md: a DGX Station GB300; 284,208 MiB by nvidia-smi in racks"
    ),
    "device_memory_bytes_per_s": (8e12, f"{_NVL72_ULTRA}: 576 TB/s"),
    "peak_flops_per_s": (
        {"fp32": 80e12, "tf32": 1.25e15, "bf16": 2.5e15, "fp16": 2.5e15, "fp8": 5e15},
        f"{_NVL72_ULTRA}: bf16 180, fp8 360 PFLOP/s; verda.com for fp32 and tf32",
    ),
    "sustained_share": (0.84, f"{ESTIMATE}as much above a GB200's as in fp8"),
    "sustained_share_by_dtype": (
        {"fp8": 0.89},
        (f"{_FITTED}dense fp8 rows of Megatron-Bridge (calibration half, 3 families; 0.85 to 0.93)"),
    ),
}
