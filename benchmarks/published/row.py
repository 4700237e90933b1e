"""Published measurements as data: rows, what they measured in seconds and bytes, and which rows are near-duplicates.

A row is one JSON object (fields and tiers: the README next to the files). Sources print rates rather than seconds; they
are turned back with the formula that the source itself used, so that an error of a prediction is an error in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...core.base.errors import MOST_NAMED, ShardproofError
from ...core.base.files import read_lines
from ...core.base.parsing import parse_json
from .forms import wrong_forms
from .models import size_of

DEFAULT_DATA = Path(__file__).resolve().parent / "rows"
"""Where the rows lie: in the repository, and not in the installed package."""

GB, GIB, MIB = 1e9, 2.0**30, 2.0**20

MFU_PEAK = {"A100": 312e12, "H100": 989.4e12, "H800": 989.4e12, "B200": 2250e12}
"""Dense bf16 peak that a published model FLOPs utilisation is a share of (NVIDIA datasheets)."""


class RowError(ShardproofError, ValueError):
    """A row that no plan describes: something it needs is not published, or the simulator does not model it."""


@dataclass(frozen=True)
class Row:
    """One published measurement. `data` is the JSON object as published."""

    data: Mapping[str, Any]

    def __getitem__(self, dotted: str) -> Any:
        """A field, such as `model.layers`; None when it is null or absent. Sizes that a table leaves out are
        `models.size_of`."""
        found: Any = self.data
        section, _, field = dotted.partition(".")
        for name in dotted.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return size_of(self.data.get("model") or {}, field) if found is None and section == "model" else found

    @property
    def id(self) -> str:
        """The row's name in its file."""
        return str(self.data["id"])

    @property
    def source(self) -> str:
        """The publication."""
        return str(self.data["source"])

    @property
    def family(self) -> str:
        """The table or series within its source."""
        return str(self.data["family"])

    @cached_property
    def setting_key(self) -> tuple[Any, ...]:
        """Rows that share it are near-duplicates: same source, model and cut of the model. vTrain's single-node
        rows are put together from one time per hidden size, tp and microbatch (`validate.noise.layer_seconds`),
        which is what they share."""
        if self.family == "vtrain_single":
            return (self.source, *(self[name] for name in ("family", "model.hidden", "parallel.tp", "batch.micro")))
        names = (
            "model.name",
            "model.layers",
            "model.hidden",
            "parallel.tp",
            "parallel.pp",
            "parallel.vpp",
            "parallel.cp",
            "parallel.ep",
        )
        return (self.source, *(self[name] for name in names))

    def need(self, dotted: str) -> Any:
        """A field that must be there. Raises `RowError` when it was not published."""
        if (value := self[dotted]) is None:
            raise RowError(f"{dotted} is not published")
        return value


@dataclass(frozen=True)
class Measured:
    """What a row measured. `step_rule` says how a printed rate became seconds; `memory_kind` what was read.

    `oom` rows ran out of memory: they have neither, but a prediction must not claim that they fit.
    """

    step_s: float | None
    step_rule: str
    memory_bytes: float | None
    memory_kind: str
    oom: bool


def read_rows(folder: Path = DEFAULT_DATA) -> list[Row]:
    """Every row of every file of a folder, in file order. Raises `RowError` when there is none, or with the line and
    field of what is no row; `FileError` for a file that is no JSON."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise RowError(
            f"{folder} holds no published rows (*.jsonl): they belong to shardproof's repository, in "
            "benchmarks/published/rows, and not to "
            "the installed package. Give that folder of a checkout with --data."
        )
    return [row for file in files for row in _rows_of(file)]


def _rows_of(file: Path) -> Iterator[Row]:
    problems = []
    for number, line in enumerate(read_lines(file), start=1):
        if line.strip():
            row = parse_json(line, f"{file}:{number}")
            problems += [f"{file}:{number}: {problem}" for problem in wrong_forms(row)]
            yield Row(row)
        if len(problems) >= MOST_NAMED:
            break
    if problems:
        raise RowError("\n".join(problems[:MOST_NAMED]))


def measured_of(row: Row) -> Measured:
    """Seconds and bytes of a training row."""
    step_s, rule = next(_step_readings(row), (None, ""))
    num_bytes, kind = next(_memory_readings(row), (None, ""))
    return Measured(step_s, rule, num_bytes, kind, oom=bool(row["measured.oom"]))


def _step_readings(row: Row) -> Iterator[tuple[float, str]]:
    """Seconds of a step, the most direct reading first."""
    measured = row["measured"] or {}
    for name, scale in (("step_s", 1.0), ("step_ms", 1e-3), ("derived_step_s", 1.0)):
        if measured.get(name):
            yield measured[name] * scale, name
    devices, sequences, seq = row["hardware.count"], row["batch.global"], row["model.seq"]
    if not (devices and sequences and seq):
        return
    if measured.get("samples_per_gpu_s"):
        yield sequences / measured["samples_per_gpu_s"] / devices, "samples_per_gpu_s"
    if measured.get("tokens_per_gpu_s"):
        yield sequences * seq / measured["tokens_per_gpu_s"] / devices, "tokens_per_gpu_s"
    if any(row[f"model.{name}"] is None for name in ("layers", "hidden", "ffn", "vocab")):
        return
    if measured.get("tflops_per_gpu_hw"):
        yield sc21_flops(row) / (measured["tflops_per_gpu_hw"] * 1e12 * devices), "tflops_per_gpu_hw by SC21 equation 3"
    if measured.get("tflops_per_gpu_model"):
        yield (
            model_flops(row) / (measured["tflops_per_gpu_model"] * 1e12 * devices),
            ("tflops_per_gpu_model, full attention"),
        )
    peak = next((rate for gpu, rate in MFU_PEAK.items() if gpu in str(row["hardware.gpu"])), None)
    if measured.get("mfu_pct") and peak:
        yield model_flops(row) / (measured["mfu_pct"] / 100 * peak * devices), "mfu_pct, full attention"


def sc21_flops(row: Row) -> float:
    """FLOPs of a step with full recomputation (Narayanan et al. 2021, equation 3; the MLP is 4h wide there)."""
    layers, hidden, seq, vocab = (row.need(f"model.{name}") for name in ("layers", "hidden", "seq", "vocab"))
    return (
        96
        * row.need("batch.global")
        * seq
        * layers
        * hidden**2
        * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    )


def model_flops(row: Row) -> float:
    """Model FLOPs of a step, full score square, logits included (Korthikanti et al. 2022, appendix A, for any MLP and
    GQA; experts that a token visits). Three passes of two FLOPs per weight and token."""
    layers, hidden, seq, vocab, ffn = (
        row.need(f"model.{name}") for name in ("layers", "hidden", "seq", "vocab", "ffn")
    )
    heads = row["model.heads"] or hidden // 128
    width = (row["model.head_dim"] or hidden // heads) * heads
    kv_width = width * (row["model.kv_heads"] or heads) // heads
    moe = row["model.moe"] or {}
    expert = moe.get("moe_ffn") or ffn
    shared = moe.get("shared_ffn") or (moe.get("shared") or 0) * expert
    dense = (moe.get("dense_layers") or 0) if moe else layers
    widths = dense * ffn + (layers - dense) * ((moe.get("topk") or 0) * expert + shared)
    mlps = (3 if is_gated(row) else 2) * hidden * widths
    per_token = layers * (2 * hidden * width + 2 * hidden * kv_width + 2 * seq * width) + mlps + hidden * vocab
    return float(6 * row.need("batch.global") * seq * per_token)


def is_gated(row: Row) -> bool:
    """True for models whose MLP has a gate half: all but those of the GPT, MPT, OPT and Nemotron families."""
    name = str(row["model.name"]).lower()
    return not any(family in name for family in ("gpt", "mpt", "opt", "nemotron")) or "oss" in name


def _memory_readings(row: Row) -> Iterator[tuple[float, str]]:
    """Bytes of the worst rank, the most exact reading first."""
    measured = row["measured"] or {}
    if isinstance(measured.get("per_rank_max_allocated_mb"), list):
        yield max(measured["per_rank_max_allocated_mb"]) * MIB, "allocated"
    names = (
        ("peak_alloc_gib", GIB, "allocated"),
        # eth-easl/sailor, ae_scripts/clariden_scripts/process_results.py: all of the device's memory that is used.
        ("peak_mem_bytes", 1.0, "nvidia-smi" if row.source.startswith("Sailor") else "allocated"),
        ("peak_mem_gib", GIB, "reserved"),
        # sail-sg/zero-bubble-pipeline-parallelism prints max_memory_allocated() // 1000000
        # (zerobubble/runtime.py); the others print GiB.
        ("peak_mem_gb", GB if row.source.startswith("Zero Bubble") else GIB, "allocated"),
        ("max_gpu_mem_gb_nvidia_smi", GIB, "nvidia-smi"),
    )
    for name, scale, kind in names:
        if measured.get(name):
            yield measured[name] * scale, kind
