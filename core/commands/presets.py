"""The `presets` verb: what is known by name, and where its numbers come from."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..base.errors import UnknownNameError
from ..base.terminal import table
from ..base.units import format_bytes, format_count
from ..machine.cluster import ClusterSpec
from ..machine.cluster_presets import CLUSTER_PRESETS, cluster_preset
from ..model.model import ModelSpec
from ..model.model_presets import MODEL_PRESETS
from ..model.parameters import count_active_parameters, count_parameters
from ..plan.json_schema import plan_schema
from ..plan.keys import KEYS, Key
from ..plan.stacks import STACKS
from ..schedule import CATALOG
from .commands import Command
from .options import add_output, emit

_NAME_HELP = (
    "one model, cluster, schedule, profile or plan key; or all `models`, `clusters`, `schedules`, `profiles` or "
    "`keys`; or the JSON `schema` of plan files"
)
SCHEMA = "schema"
"""The name of the JSON Schema of plan files."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    parser.add_argument("name", nargs="?", metavar="NAME", help=_NAME_HELP)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Prints everything known by name, or one entry in full. Exit code 0."""
    if args.name == SCHEMA:
        emit(args, _schema_hint, plan_schema())
        return 0
    report = catalog()
    if args.name is None:
        emit(args, _overview, report)
        return 0
    if args.name in report:
        emit(args, partial(_listed, args.name), {args.name: report[args.name]})
        return 0
    for kind, entries in report.items():
        if args.name in entries:
            found = entries[args.name]
            emit(args, partial(_detail, args.name, found), {"kind": kind.removesuffix("s"), "name": args.name, **found})
            return 0
    known = [*report, SCHEMA, *(name for entries in report.values() for name in entries)]
    raise UnknownNameError("preset", args.name, known, "`shardproof presets`")


def catalog() -> dict[str, dict[str, dict[str, Any]]]:
    """`models`, `clusters` (one node each), `schedules` and `profiles` by name, and the `keys` of a
    plan file, as plain data."""
    return {
        "models": {name: _model_report(model) for name, model in MODEL_PRESETS.items()},
        "clusters": {name: _cluster_report(_one_node(name)) for name in CLUSTER_PRESETS},
        "schedules": {
            name: {"name": name, "summary": entry.summary, "legal": entry.legal} for name, entry in CATALOG.items()
        },
        "profiles": {name: {"name": name, "stack": stack} for name, stack in STACKS.items()},
        "keys": {
            key.dotted: {"legal": key.legal, "default": _default(key), "doc": key.doc, **_more(key)} for key in KEYS
        },
    }


def _more(key: Key) -> dict[str, str]:
    return {"more": key.more} if key.more else {}


def _default(key: Key) -> Any:
    if key.required and key.section in ("model", "cluster"):
        return "from the preset"
    return "required" if key.required else key.default_note or key.default


def _one_node(name: str) -> ClusterSpec:
    per_node = cluster_preset(name, 1).devices_per_node
    return cluster_preset(name, per_node)


def _model_report(model: ModelSpec) -> dict[str, Any]:
    counts = {"num_parameters": count_parameters(model)}
    return {
        **dataclasses.asdict(model),
        **counts,
        **({"num_active_parameters": count_active_parameters(model)} if model.is_moe else {}),
    }


def _cluster_report(cluster: ClusterSpec) -> dict[str, Any]:
    fields = {field.name: getattr(cluster, field.name) for field in dataclasses.fields(cluster)}
    return {**fields, "peak_flops_per_s": dict(cluster.peak_flops_per_s), "sources": dict(cluster.sources)}


def _overview(width: int | None) -> str:
    text = "\n\n".join(f"{kind}\n{_listed(kind, width)}" for kind in ("models", "clusters", "schedules"))
    hint = (
        "`shardproof presets NAME` shows one in full, with its sources; `shardproof presets keys` lists the keys of "
        "a plan file, and "
        "`shardproof presets profiles` the software stacks whose memory and overlap can be modelled."
    )
    return f"{text}\n\n{hint}"


def _schema_hint(width: int | None) -> str:
    return (
        f"The JSON Schema of plan files has {len(KEYS)} keys. `shardproof presets {SCHEMA} -o plan.schema.json` writes "
        "it, --json prints it. With `#:schema ./plan.schema.json` as the first line of a plan, editors that know taplo "
        "(Even Better TOML) complete and check its keys."
    )


def _listed(kind: str, width: int | None) -> str:
    """The table of everything of a kind."""
    rows: dict[str, Callable[[], list[tuple[str, ...]]]] = {
        "models": lambda: [_model_row(model) for model in MODEL_PRESETS.values()],
        "clusters": lambda: [_cluster_row(_one_node(name)) for name in CLUSTER_PRESETS],
        "schedules": lambda: [(name, f"{entry.summary} ({entry.legal})") for name, entry in CATALOG.items()],
        "profiles": lambda: list(STACKS.items()),
        "keys": lambda: [_key_row(key) for key in KEYS],
    }
    return _table(rows[kind](), width)


def _model_row(model: ModelSpec) -> tuple[str, ...]:
    heads = f"latent heads {model.num_heads}" if model.is_mla else f"heads {model.num_heads}/{model.num_kv_heads}"
    return (
        model.name,
        f"{format_count(count_parameters(model))} parameters",
        f"{model.num_layers} layers, hidden {model.hidden_size}, {heads}{_experts(model)}",
    )


def _experts(model: ModelSpec) -> str:
    if not model.is_moe:
        return ""
    return (
        f"; {model.experts_per_token} of {model.num_experts} experts, "
        f"{format_count(count_active_parameters(model))} active"
    )


def _cluster_row(cluster: ClusterSpec) -> tuple[str, ...]:
    dtype = next(dtype for dtype in ("bf16", "fp16") if dtype in cluster.peak_flops_per_s)
    return (
        cluster.name,
        format_bytes(cluster.device_memory_bytes),
        f"{cluster.devices_per_node} per node, {dtype} {cluster.peak_flops_per_s[dtype] / 1e12:.4g} TFLOP/s, "
        f"links {cluster.node_link_bytes_per_s / 1e9:.4g} GB/s, node network "
        f"{cluster.node_network_bytes_per_s / 1e9:.4g} GB/s",
    )


def _table(rows: Sequence[Sequence[str]], width: int | None) -> str:
    return "\n".join(table(rows, width))


def _detail(name: str, entry: dict[str, Any], width: int | None) -> str:
    sources = entry.get("sources", {})
    cited = {key: f"({source})" for key, source in sources.items() if source}
    rows = [
        (key, f"{_plain(value)} {cited.get(key, '')}".strip())
        for key, value in entry.items()
        if key not in ("name", "sources")
    ]
    return f"{name}\n{_table(rows, width)}"


def _key_row(key: Key) -> tuple[str, ...]:
    """Name, and in one cell what it is, what it may be, and what it is when left out."""
    default = (
        "" if (value := _default(key)) is None else f"; default {_plain(value)}".replace("default required", "required")
    )
    return key.dotted, f"{key.doc}: {key.legal}{default}"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return ", ".join(map(_plain, value))
    if isinstance(value, dict):
        return " ".join(f"{name}={_plain(item)}" for name, item in value.items())
    return str(value)


PRESETS = Command("presets", "shardproof presets dgx-h100", configure, run)
