"""Named causes of errors beyond 12%: what in the data, or outside the model, explains a whole class of rows.

A cause is a property of a class of rows that can be checked without their prediction. It excuses nothing by itself: the
page prints it next to every outlier, and outliers without a cause are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..row import Row
from .predictions import Prediction

OUTLIER = 0.12
"""Errors beyond this share are listed."""


@dataclass(frozen=True)
class Cause:
    """A class of rows, and why they are off; `evidence` is what in the data says so."""

    name: str
    holds: Callable[[Row], bool]
    why: str
    evidence: str


def _of(source: str, *, when: Callable[[Row], bool] = lambda row: True) -> Callable[[Row], bool]:
    return lambda row: row.source.startswith(source) and when(row)


def _capacity_gb(row: Row) -> float:
    """GB of a device, from its name."""
    return 40.0 if "40GB" in str(row["hardware.gpu"]) else 80.0


CAUSES: tuple[Cause, ...] = (
    Cause(
        "suspect-row",
        lambda row: bool(row["flags.suspect"]),
        "the collection marks the row as suspect",
        "flags.suspect",
    ),
    Cause(
        "unpublished-layout",
        lambda row: row["tier"] == "D",
        "a layout or batch field is unknown and was assumed",
        "tier D",
    ),
    Cause(
        "zero3-of-2021",
        _of("SC21", when=lambda row: "ZeRO-3" in str(row["parallel.sharding"])),
        "DeepSpeed's first ZeRO-3 went tensor by tensor without prefetching; what its hooks cost the host is not "
        "counted",
        "the step takes the same 67 s with 768 and 1,536 devices: nothing but communication is left",
    ),
    Cause(
        "vtrain-cut-two-or-four",
        _of(
            "vTrain",
            when=lambda row: (
                row.family == "vtrain_multi" and row["parallel.tp"] in (2, 4) and row["hardware.count"] > 64
            ),
        ),
        "rows with several replicas in one node are slow by chance, none is fast",
        "the same layer and microbatch takes up to 34% longer in one number of stages than in another at tp2, 31% at "
        "tp4, in no order; 5% "
        "at tp8 (table Noise of the data); tp2 pp8: 21.9, 19.1, 23.1 s for micro 2, 3, 6, where the bubble grows; "
        "Calculon and SimuMax "
        "miss the same rows by 40%",
    ),
    Cause(
        "vtrain-two-samples",
        _of(
            "vTrain",
            when=lambda row: row.family == "vtrain_multi" and row["batch.micro"] == 2 and row["hardware.count"] == 64,
        ),
        "the smallest microbatch breaks its series",
        "tp8: 5.0, 5.2, 5.6, then 8.9 s for micro 16, 8, 4, 2",
    ),
    Cause(
        "vtrain-one-microbatch",
        _of("vTrain", when=lambda row: row["batch.micro"] == 64),
        "the largest microbatch breaks its series",
        "9.8 s against 5.0 s with half of it; the README names it",
    ),
    Cause(
        "vtrain-composed",
        _of("vTrain", when=lambda row: row.family == "vtrain_single"),
        "the seconds of these rows are put together from 32 times of a layer and 32 of the rest, which carry the "
        "noise of the host",
        "they are affine in microbatches to the last bit (180 series) and their slopes equal over dp to the last "
        "bit; a layer "
        "takes 3.6, then 3.2 ms for twice the samples (hidden 1024, tp2, micro 2 and 4), 5.0, 4.0, 3.7 ms at tp8",
    ),
    Cause(
        "bloom-heads",
        _of(
            "BLOOM",
            when=lambda row: bool(row["model.heads"]) and row["model.hidden"] / row["model.heads"] in (108, 128),
        ),
        "heads that are 108 or 128 wide: the first begin at no multiple of 16 bytes; why the second are slow is not "
        "known",
        "13,824 wide: 162.7 and 156.8 s with 128 heads of 108, 124.8 and 118.1 s with 96 of 144; heads of 128: 138.7 "
        "and 145.4 s, against "
        "124.9 and 129.4 s for heads of 112 and 96",
    ),
    Cause(
        "single-snapshot",
        _of("BLOOM"),
        "one iteration, read off a log; the machine was tuned meanwhile",
        "the same layout takes 130.4 and 119.2 s (18B), 121.5 to 114.0 s on four days (72 layers, pp6)",
    ),
    Cause(
        "release-drift",
        _of("Megatron-Bridge", when=lambda row: bool(row["model.moe"])),
        "kernels for experts changed between releases",
        "rows equal in every published field differ by 77%; Qwen3 30B on eight GB200 takes 11.5, 10.0, 6.4 s from "
        "release to release",
    ),
    Cause(
        "alternating-window",
        lambda row: row["model.name"] == "GPT OSS 120B",
        "every layer is priced with full attention, where every second has a window of 128 tokens, and the clamps of "
        "the experts' "
        "activation are not priced; releases from 26.06 fuse the experts' biases too",
        "with the window in half of the layers the step is 6% shorter at 4,096 tokens and 12% at 8,192; the clamps "
        "move 18 bytes an "
        "element (megatron/core/fusions/fused_bias_geglu.py at core_v0.15.0), about 4% of the step",
    ),
    Cause(
        "sailor-layers",
        _of("Sailor"),
        "layers of its own in fp32, of which host and backward take something else than Megatron's",
        "its profile of a layer (profiles/OPT-350/GH-96/profile.json, micro 8, tp4): backward 6.5 ms, 2.4 times the "
        "forward; with one "
        "sequence a microbatch a layer takes 3.0 ms, which is the host",
    ),
    Cause(
        "first-recipe",
        lambda row: row.family == "dgxc_dsv3_gb200",
        "a first recipe for this model and machine, bound by something other than devices and links, probably its "
        "host: no CUDA graphs "
        "(deepseek_v3/pretraining/launch.sh at v25.05), rotation in steps (apply_rope_fusion=False, NeMo 7a8f1cc)",
        "34.17, 34.19 and 34.27 s with experts over 32 and 64 ranks, within and beyond a rack; Megatron-Bridge 25.11 "
        "prints 782 TFLOP/s "
        "for the same model and device, this source 249",
    ),
    Cause(
        "memory-pressure",
        lambda row: (
            row.source.startswith("llm-foundry")
            and 16 * row["model.params_b"] / row["hardware.count"] > 0.4 * _capacity_gb(row)
        ),
        "weights, gradients and optimizer state fill more than 40% of the devices, so that the allocator frees and "
        "asks again",
        "13B trains 1,668 tokens a second and device on 8 x 40 GB, 1,993 on 16",
    ),
    Cause(
        "newer-triton",
        lambda row: row.family == "llmfoundry_A100_80GB" and row["model.seq"] >= 16384,
        "attention in Triton became faster after its published rates, between the two tables for A100",
        "125M on sequences of 32,768 tokens, nothing but attention: 1.00 s a sequence with 40 GB and torch 1.13, "
        "0.90 s with 80 GB and 2.1",
    ),
    Cause(
        "power-limited",
        lambda row: row.source == "torchtitan mxfp8 doc",
        "devices limited in power, to how much is not published, under a nightly build of PyTorch's first months on "
        "them",
        "8,308, 10,417 and 8,641 tokens a second in bf16, with a scale per tensor and per row are 1.35, 1.35 and "
        "1.28 times those of an "
        "H100 limited to 500 W, of 44% of the arithmetic and 30% of the bandwidth (torchao/float8/README.md at "
        "6243040); on another B200 "
        "the step with a scale per block trained 12,211 (torchtitan, pull request 1196), where 9,969 are printed",
    ),
    Cause(
        "xla-fp8",
        lambda row: row.family in ("dgxc_maxtext", "dgxc_paxml") and "fp8" in str(row["precision"]),
        "how the compiler of the release casts operands to fp8 and in which format it gathers weights is not known",
        "bf16 rows of the same MaxText configuration are within 5%; PaxML is of March 2024, MaxText of January 2025",
    ),
    Cause(
        "capacity-dispatch",
        lambda row: row.family.startswith(("dgxc2504_grok", "dgxc_gb200_grok")),
        "one expert after the other, tokens padded to a capacity, none of it fused (moe_grouped_gemm: false, "
        "cfg/grok1_314b.yaml at "
        "v25.04.01); on GB200 the README's expert tensor parallelism of 4 is 8 in its launch.sh at v25.05",
        "fp8 saves three quarters of what is predicted, on H100 and on GB200; H100: what is missing of a layer "
        "(1.2 ms in 21) depends "
        "on neither stages, replicas nor experts of a rank",
    ),
    Cause(
        "flat-zero1",
        _of("InternEvo", when=lambda row: "all DP ranks" in str(row["parallel.sharding"])),
        "the optimizer broadcasts parameter by parameter over all ranks",
        "with 1,024 devices 7.2 s, against 4.5 s where groups of eight shard",
    ),
    Cause(
        "one-microbatch",
        lambda row: row.source.startswith("MLPerf") and row["batch.num_microbatches"] == 1,
        "nothing hides what a step costs once besides what is counted: data, callbacks, an allocator near its limit",
        "notes of the rows; '#fix OOM' above max_split_size_mb:128 and CUBLAS_WORKSPACE_CONFIG=:16:8 in Cisco's "
        "config_DGXH100_*.sh",
    ),
)
"""Checked in order; every cause that holds is printed."""


def causes_of(prediction: Prediction) -> list[Cause]:
    """The named causes that hold for a row."""
    return [cause for cause in CAUSES if cause.holds(prediction.row)]


def outliers(predictions: list[Prediction]) -> list[Prediction]:
    """Rows whose step time is off by more than `OUTLIER`, the worst first."""
    found = [one for one in predictions if one.error is not None and abs(one.error) > OUTLIER]
    return sorted(found, key=lambda one: -abs(one.error or 0.0))
