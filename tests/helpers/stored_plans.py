"""200 plans drawn once, and what the simulator and the program say of each: moves and merges of the code that describes
layers change no byte, no count and no second of them.

`tests/test_stored_plans.py --write-goldens` computes the numbers anew for the stored plans. `python -m
shardproof.tests.helpers.stored_plans` draws other plans.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardproof import Plan, fit, simulate
from shardproof.core.base.errors import ShardproofError
from shardproof.core.model.parameters import count_parameters
from shardproof.core.plan.runtime import RECOMPUTE_MODULES
from shardproof.core.plan.stacks import STACKS
from shardproof.core.program import Collective, Message, Product, operations
from shardproof.core.schedule.action import Kind
from shardproof.simulator.cost.flops import step_flops
from shardproof.tests.helpers.paths import DATA

STORED = DATA / "plans_200.jsonl"
NUM_PLANS = 200
KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.SEND_F, Kind.REDUCE_GRAD, Kind.UNSHARD, Kind.STEP)
HOST = "files_of_2026_11/cluster.toml"
"""A cluster file of `calibrate`, whose kernels are priced by curves."""

LARGE = (
    "gpt2-xl",
    "gpt3-6.7b",
    "megatron-22b",
    "llama2-7b",
    "llama3-8b",
    "llama3.2-3b",
    "qwen2.5-7b",
    "qwen3-8b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "nemotron4-15b",
    "grok-1",
)
TINY = ("tiny-gpt", "tiny-gpt-6h", "tiny-llama", "tiny-moe", "tiny-deepseek")
CLUSTERS = ("dgx-a100-80g", "dgx-h100", "dgx-h200", "dgx-b200", "gb200-nvl72", "alps-gh200", "dgx-2")


def numbers_of(plan: Plan) -> dict[str, Any]:
    """What is stored of a plan: bytes and counts exactly, seconds to 12 digits."""
    memory, step, flops = fit(plan).report, simulate(plan).report, step_flops(plan)
    return {
        "parameters": count_parameters(plan.model),
        "flops": [flops.model, flops.model_causal, flops.hardware],
        "operations": _operations(plan),
        "memory_bytes": [[rank["peak_memory_action"], *rank["memory_bytes"].values()] for rank in memory["per_rank"]],
        "reserved_memory_bytes": [rank["reserved_memory_bytes"] for rank in memory["per_rank"]],
        "step_time_s": step["step_time_s"],
        "time_s": step["time_s"],
    }


def _operations(plan: Plan) -> dict[str, list[Any]]:
    """Of every kind of action how many operations the stages have, their products' FLOPs, the bytes that they send, and
    a digest of all their fields in order."""
    found: dict[str, list[Any]] = {}
    for kind in KINDS:
        number, flops, sent, digest = 0, 0, 0, hashlib.blake2b(digest_size=8)
        for stage in _stages(plan, kind):
            for tp_rank in {0, plan.layout.tp - 1}:
                for operation in operations(plan, kind, stage, tp_rank):
                    number += 1
                    match operation:
                        case Product(layer, m, n, k, count, grouped, dtype):
                            flops += operation.flops
                            fields = ["product", layer, m, n, k, count, grouped, dtype]
                        case Collective(layer, op, axis, group_size, sent_bytes):
                            sent += sent_bytes
                            fields = ["collective", layer, op, axis, group_size, sent_bytes]
                        case Message(layer, num_bytes):
                            sent += num_bytes
                            fields = ["message", layer, num_bytes]
                    digest.update(json.dumps(fields).encode())
        found[kind.name] = [number, flops, sent, digest.hexdigest()]
    return found


def _stages(plan: Plan, kind: Kind) -> Iterator[int]:
    if kind is not Kind.STEP:
        yield from range(plan.layout.num_stages)
    else:
        yield from (min(stages) for stages in plan.placement.stages_of_ranks)


def stored(which: slice = slice(None)) -> list[tuple[Plan, dict[str, Any]]]:
    """Some of the stored plans with their numbers: only these are read."""
    rows = [json.loads(line) for line in STORED.read_text(encoding="utf-8").splitlines()[which]]
    return [(plan_of(row["plan"]), row["numbers"]) for row in rows]


def plan_of(text: str) -> Plan:
    """The plan of a stored text, in which a cluster file is named as it lies in `tests/data`."""
    return Plan.from_toml(text.replace(HOST, str(DATA / HOST)))


def write(texts: list[str], path: Path = STORED) -> None:
    """Computes the numbers and writes the table."""
    rows = [{"plan": text, "numbers": numbers_of(plan_of(text))} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def drawn(seed: int = 20) -> Iterator[str]:
    """Texts of plans that hold together, out of random ones; every fourth is tiny and on a measured host."""
    draw = random.Random(seed)
    number = 0
    while True:
        text = _large(draw) if number % 4 else _tiny(draw)
        try:
            simulate(plan_of(text))
        except ShardproofError:
            continue
        number += 1
        yield text


def _large(draw: random.Random) -> str:
    tp, pp, cp, dp = (draw.choice(sizes) for sizes in ((1, 2, 4, 8), (1, 1, 2, 3, 4, 8), (1, 1, 1, 2, 4), (1, 2, 4, 6)))
    vpp = draw.choice((1, 1, 2)) if pp > 1 else 1
    model = draw.choice(LARGE)
    moe = model in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "grok-1")
    micro = draw.choice((1, 1, 2, 4))
    schedules = ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS") if vpp > 1 else ("1F1B", "GPipe", "ZBH1")
    lines = [
        f'[model]\npreset = "{model}"',
        f'[cluster]\npreset = "{draw.choice(CLUSTERS)}"\nnum_devices = {tp * pp * cp * dp}',
        f"[layout]\ntp = {tp}\npp = {pp}\ncp = {cp}\ndp = {dp}\nvpp = {vpp}\nzero = {draw.choice((0, 0, 1, 1, 2, 3))}",
        f"sequence_parallel = {str(tp > 1 and draw.random() < 0.6).lower()}",
        f"ep = {draw.choice((1, 2, 4))}\netp = {draw.choice((1, tp))}" if moe else "",
        f"[batch]\nglobal = {micro * dp * draw.choice((4, 8, 12))}\nmicro = {micro}",
        f"sequence = {draw.choice((2048, 4096))}",
        f'[runtime]\nprofile = "{draw.choice(tuple(STACKS))}"',
        f'[precision]\ndtype = "{draw.choice(("bf16", "bf16", "fp16", "fp8"))}"',
        f'[schedule]\nname = "{draw.choice(schedules)}"',
        _recompute(draw),
    ]
    return "\n".join(filter(None, lines))


def _tiny(draw: random.Random) -> str:
    tp, pp, cp, dp = (draw.choice(sizes) for sizes in ((1, 2, 3), (1, 2), (1, 1, 2), (1, 2, 3)))
    exact = draw.random() < 0.5
    lines = [
        f'[model]\npreset = "{draw.choice(TINY)}"',
        f'[cluster]\nfile = "{HOST}"\nnum_devices = {tp * pp * cp * dp}',
        f"[layout]\ntp = {tp}\npp = {pp}\ncp = {cp}\ndp = {dp}\nzero = {draw.choice((0, 1, 2, 3))}",
        f"sequence_parallel = {str(tp > 1 and draw.random() < 0.6).lower()}",
        f"[batch]\nglobal = {dp * 4}\nmicro = {draw.choice((1, 2))}\nsequence = 48",
        f'[precision]\ndtype = "{draw.choice(("fp32", "bf16"))}"',
        '[numerics]\nmode = "exact"\ngradient_token_block = 8\nreduction_token_block = 4' if exact else "",
        _recompute(draw),
    ]
    return "\n".join(filter(None, lines))


def _recompute(draw: random.Random) -> str:
    mode = draw.choice(("none", "none", "selective", "full"))
    modules = draw.sample(RECOMPUTE_MODULES, draw.choice((1, 2)))
    return f'[recompute]\nmode = "{mode}"' + (f"\nmodules = {json.dumps(modules)}" if mode == "selective" else "")


if __name__ == "__main__":
    texts = drawn()
    write([next(texts) for _ in range(NUM_PLANS)])
    print(f"{NUM_PLANS} plans written to {STORED}", file=sys.stderr)
