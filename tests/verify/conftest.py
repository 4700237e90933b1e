"""Small plans for the verifier: every schedule of the catalog, with a tied table."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardproof import Plan
from shardproof.core.schedule import CATALOG

PLAN = """
[model]
num_layers = 12
hidden_size = 64
ffn_hidden_size = 96
num_heads = 6
num_kv_heads = 6
vocab_size = 384
tied_embeddings = true
[cluster]
preset = "this-host"
num_devices = {devices}
[layout]
tp = {tp}
pp = {pp}
dp = {dp}
vpp = {vpp}
zero = {zero}
sequence_parallel = {sp}
[batch]
global = {samples}
micro = 1
sequence = 32
[precision]
dtype = "fp32"
[schedule]
name = "{name}"
[numerics]
mode = "{mode}"
"""


def _plan_of(
    name: str,
    *,
    tp: int = 2,
    pp: int = 3,
    dp: int = 2,
    zero: int = 0,
    sp: bool = False,
    mode: str = "exact",
    m: int = 6,
) -> Plan:
    vpp = CATALOG[name].nearest_vpp(2)
    if CATALOG[name].problem(pp=pp, vpp=vpp, num_microbatches=m) is not None:
        pp, m = 4, 8
    if 12 % (pp * vpp):
        pp, m = 2, 4
    values = {"name": name, "tp": tp, "pp": pp, "dp": dp, "vpp": vpp, "zero": zero, "sp": str(sp).lower(), "mode": mode}
    return Plan.from_toml(PLAN.format(devices=tp * pp * dp, samples=m * dp, **values))


@pytest.fixture
def plan_of() -> Callable[..., Plan]:
    """`plan_of(schedule name, tp=..., pp=..., dp=..., zero=..., sp=..., mode=..., m=...)`; sizes move to the
    nearest that are legal."""
    return _plan_of
