"""What NVIDIA's published recipes switch on, for rows of tables that print only layouts: by release,
model, device and precision.

Read from the repositories at the tag of each release, not from any measurement: Megatron-Bridge
(scripts/performance/configs and src/megatron/bridge/perf_recipes; v0.1 is container 25.09, v0.2 25.11, v0.3 26.02, v0.4
26.04, v0.6 26.06), and the benchmarks of the authors of MoE Parallel Folding in the month of their paper
(yanring/Megatron-MoE-ModelZoo, 78fd4d6, model_configs/benchmarking).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .row import Row


@dataclass(frozen=True)
class Recipe:
    """Switches of the runtime, and the modules that are computed again."""

    runtime: Mapping[str, Any] = field(default_factory=dict)
    modules: tuple[str, ...] = ()

    def __or__(self, other: Recipe) -> Recipe:
        return Recipe({**self.runtime, **other.runtime}, other.modules or self.modules)


NOTHING_SAID = Recipe()


@dataclass(frozen=True)
class _Rule:
    """A recipe and the rows it holds for: models whose name contains `model`, devices that contain one of `devices`,
    releases from `first` to before `until`, precisions that contain `precision`."""

    model: str
    devices: tuple[str, ...]
    recipe: Recipe
    first: float = 0.0
    until: float = 99.0
    precision: str = ""

    def holds(self, row: Row, release: float) -> bool:
        named = self.model in str(row["model.name"]) and any(word in str(row["hardware.gpu"]) for word in self.devices)
        return named and self.first <= release < self.until and self.precision in str(row["precision"])


_ALL, _RACKS, _BLACKWELL, _HOPPER = ("",), ("GB200", "GB300"), ("B200", "B300"), ("H100",)
_ONCE, _GRAPHS = {"dispatch_once": True}, {"cuda_graphs": True}
_OVERLAPPED = {"dispatch_once": True, "ep_comm_overlap": True}

MEGATRON_BRIDGE: tuple[_Rule, ...] = (
    _Rule("LLAMA3", _ALL, Recipe({"tp_comm_overlap": True})),  # tp_comm_overlap_cfg = userbuffers_*; 8B: where tp > 1
    _Rule("LLAMA3_8B", _BLACKWELL, Recipe(_GRAPHS), first=25.11),  # cuda_graph_scope = full_iteration
    _Rule("DeepSeekV3", _ALL, Recipe(modules=("mla_up_proj",))),
    _Rule("DeepSeekV3", _HOPPER, Recipe(modules=("mla_up_proj", "mlp"))),
    _Rule("DeepSeekV3", _HOPPER, Recipe(_OVERLAPPED), until=26.0),  # deepep, moe_a2a_overlap; run_script.py of v0.1
    _Rule("DeepSeekV3", _HOPPER, Recipe(_ONCE), first=26.0),  # hybridep
    # hybridep; scope attn, moe_router, moe_preprocess
    _Rule("DeepSeekV3", _RACKS, Recipe(_ONCE | _GRAPHS), first=25.11),
    _Rule("DeepSeekV3", ("DGX-B200", "DGX-B300"), Recipe(_ONCE), first=26.0),  # hybridep
    _Rule("DeepSeekV3", ("GB300",), Recipe(modules=("moe_act",)), precision="bf16"),
    _Rule("DeepSeekV3", ("GB200",), Recipe(modules=("mlp",)), first=26.04, precision="fp8"),
    _Rule(
        "DeepSeekV3",
        ("DGX-B200",),
        Recipe(_OVERLAPPED | _GRAPHS, ("mla_up_proj", "mlp")),
        first=26.041,
        precision="fp8",
    ),
    _Rule("DeepSeekV3", _BLACKWELL, Recipe(_OVERLAPPED | _GRAPHS), first=26.06, precision="mxfp8"),  # full iteration
    _Rule("Qwen3_30B", ("GB200", "DGX-B200"), Recipe(_GRAPHS), until=25.11),  # with token drop, cuda_graphs: true
    _Rule("Qwen3_30B", ("GB200", "GB300", "B300"), Recipe(_ONCE), first=25.11),  # hybridep
    _Rule("Qwen3_30B", ("GB200",), Recipe(_GRAPHS), first=25.11),  # scope with attn
    _Rule("Qwen3_30B", ("DGX-B200",), Recipe(_ONCE | _GRAPHS), first=26.04),
    # alltoall, moe_a2a_overlap
    _Rule("Qwen3_30B", _HOPPER, Recipe({"ep_comm_overlap": True}), first=25.11, until=26.0),
    _Rule("Qwen3_30B", _HOPPER, Recipe(_OVERLAPPED), first=26.0, until=26.04),  # deepep, moe_a2a_overlap
    _Rule("Qwen3_30B", _HOPPER, Recipe(_ONCE), first=26.04),  # hybridep
    _Rule("Qwen3_30B", _HOPPER, Recipe(_GRAPHS), first=26.06, precision="fp8"),
    _Rule("Qwen3_30B", _BLACKWELL, Recipe(_OVERLAPPED | _GRAPHS), first=26.06, precision="mxfp8"),  # full iteration
    _Rule("GPT OSS", ("GB300", "B300"), Recipe(_GRAPHS)),  # scope attn, moe_router, moe_preprocess
    _Rule("GPT OSS", ("GB200", "DGX-B200", "H100"), Recipe(modules=("norm", "moe_act"))),
    _Rule("GPT OSS", ("DGX-B200", "DGX-B300"), Recipe(_ONCE), first=26.04),  # hybridep
    _Rule("GPT OSS", ("GB200",), Recipe(_OVERLAPPED), first=26.04),  # hybridep, moe_a2a_overlap
    _Rule("GPT OSS", _RACKS, Recipe(_OVERLAPPED | _GRAPHS), first=26.06, precision="mxfp8"),  # full iteration
)
"""Later rules add to earlier ones; modules replace."""


MODEL_ZOO: Mapping[str, Recipe] = {"Mixtral-8x22B": Recipe({"tp_comm_overlap": True})}
"""Model -> what its configuration switches on. That of Qwen2-57B-A14B has no `--tp-comm-overlap`; its
`--moe-shared-expert-overlap`, exchanges during the shared experts, is not modelled."""


def recipe_of(row: Row) -> Recipe:
    """What the recipe of a row switches on besides its layout; nothing where no recipe is known."""
    if row.source.startswith("MoE Parallel Folding"):
        return next((recipe for model, recipe in MODEL_ZOO.items() if model in str(row["model.name"])), NOTHING_SAID)
    if not row.source.startswith("Megatron-Bridge"):
        return NOTHING_SAID
    release = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", row.family)
    if release is None:
        return NOTHING_SAID
    number = float(f"{release[1]}.{release[2]}{(release[3] and release[3][-1]) or ''}")
    found = NOTHING_SAID
    for rule in MEGATRON_BRIDGE:
        if rule.holds(row, number):
            found |= rule.recipe
    return found
