"""Megatron's optimizers: AdamW, SGD with momentum and Muon, read and written.

Muon's defaults in Megatron-Core (0.16 to 0.20) are not those of a plan: momentum 0.9 without Nesterov's, updates scaled
by `spectral`, sqrt(max(A, B)), times an extra factor of 1, and coefficients `quintic`. A plan has the two scales that
papers name (`match_rms`: spectral times 0.2; `original`: shape_scaling times 1) and Jordan's coefficients (`simple`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..plan.optimizer import USED_BY
from ..plan.plan import Plan
from .megatron_reading import Reading

NAMES = {
    **dict.fromkeys(("adam", "adamw", "cpu_adam", "fused_adam"), "adamw"),
    "sgd": "sgd",
    "muon": "muon",
    "dist_muon": "muon",
}
"""`--optimizer` -> `optimizer.name`."""

SCALES = {("spectral", 0.2): "match_rms", ("shape_scaling", 1.0): "original"}
"""`--muon-scale-mode` and `--muon-extra-scale-factor` -> `optimizer.muon_scale`."""

MUON_FLAGS = (
    *("--muon-momentum", "--muon-num-ns-steps", "--muon-nesterov", "--muon-use-nesterov", "--muon-scale-mode"),
    *("--muon-extra-scale-factor", "--muon-coefficient-type", "--muon-no-split-qkv", "--muon-scalar-optimizer"),
    *("--muon-tp-mode", "--muon-fp32-matmul-prec"),
)


def read_optimizer(reading: Reading) -> None:
    """Fills the keys of the optimizer besides those that are one flag each."""
    said = reading.text("--optimizer")
    name = "adamw" if said is None else NAMES.get(said, "")
    if not name:
        reading.say("--optimizer", "refused", f"a plan has {', '.join(sorted(set(NAMES.values())))}", "optimizer.name")
        return
    if said is not None:
        reading.put("optimizer.name", name, "--optimizer")
    if name != "sgd":
        beta1, beta2 = reading.number("--adam-beta1"), reading.number("--adam-beta2")
        betas = (0.9 if beta1 is None else beta1, 0.999 if beta2 is None else beta2)
        reading.put("optimizer.betas", list(betas), "--adam-beta1", "--adam-beta2")
    own = reading.values.get("optimizer", {})
    for key in [key for key in own if name not in USED_BY.get(key, (name,))]:
        del own[key]
    if name == "sgd":
        momentum = reading.number("--sgd-momentum")
        reading.put("optimizer.momentum", 0.9 if momentum is None else momentum, "--sgd-momentum")
        reading.say("--adam-eps", "no-effect", "it counts for Adam")
    else:
        reading.say("--sgd-momentum", "no-effect", "it counts for SGD")
    if name == "muon":
        _read_muon(reading)
    else:
        for flag in MUON_FLAGS:
            reading.say(flag, "no-effect", "it counts for Muon")


def _read_muon(reading: Reading) -> None:
    momentum, steps = reading.number("--muon-momentum"), reading.integer("--muon-num-ns-steps")
    reading.put("optimizer.momentum", 0.9 if momentum is None else momentum, "--muon-momentum")
    reading.put("optimizer.muon_steps", 5 if steps is None else steps, "--muon-num-ns-steps")
    flags = "--muon-nesterov", "--muon-use-nesterov"
    reading.put("optimizer.nesterov", any(map(reading.given, flags)), *flags)
    mode, factor = reading.text("--muon-scale-mode") or "spectral", reading.number("--muon-extra-scale-factor")
    scale = SCALES.get((mode, 1.0 if factor is None else factor))
    scaling = "--muon-scale-mode", "--muon-extra-scale-factor"
    reading.put("optimizer.muon_scale", scale or ("original" if mode == "shape_scaling" else "match_rms"), *scaling)
    if scale is None:
        reading.assume(
            f"Muon's updates are scaled by {mode} times {1.0 if factor is None else factor:g}, which a plan does not "
            "have: optimizer.muon_scale is the nearest. Time and memory are the same, weights are not."
        )
    if reading.text("--muon-coefficient-type") != "simple":
        reading.assume(
            "Muon's coefficients are those of Jordan (Megatron's simple), not Megatron's "
            f"{reading.text('--muon-coefficient-type') or 'quintic'}. Time and memory are the same, weights are not."
        )
    else:
        reading.say("--muon-coefficient-type", "no-effect", "a plan has these coefficients")


def optimizer_lines(plan: Plan) -> Iterator[tuple[Any, ...]]:
    """The arguments of a plan's optimizer besides those that are one key each."""
    optimizer = plan.optimizer
    if optimizer.name != "sgd":
        yield "--adam-beta1", optimizer.betas[0]
        yield "--adam-beta2", optimizer.betas[1]
    if optimizer.name != "adamw":
        yield "--optimizer", optimizer.name
        yield f"--{optimizer.name}-momentum", optimizer.own_momentum
    if optimizer.name == "muon":
        mode, factor = next(given for given, scale in SCALES.items() if scale == optimizer.muon_scale)
        yield "--muon-num-ns-steps", optimizer.muon_steps
        yield "--muon-coefficient-type", "simple"
        yield "--muon-scale-mode", mode
        yield "--muon-extra-scale-factor", factor
        if optimizer.own_nesterov:
            yield ("--muon-nesterov",)
