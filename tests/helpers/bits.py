"""What a training run leaves on its ranks, put together and compared bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardproof import Plan
from shardproof.backend.base.observe import Observer
from shardproof.backend.trainer import run_steps
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.parameters import parameters
from shardproof.core.plan.sections import ScheduleChoice


class Collect(Observer):
    """Keeps every scalar, and this rank's slices of what the last step left."""

    def __init__(self):
        self.scalars, self.pieces = [], []

    def begin_step(self, step):
        self.pieces.clear()

    def scalar(self, name, value):
        self.scalars.append((name, value))

    def gradient(self, name, slices, tensor):
        self.pieces.append((f"gradient {name}", slices, tensor.numpy().copy()))

    def optimizer_state(self, name, slices, moments):
        self.pieces += [(f"{moment} {name}", slices, values.numpy().copy()) for moment, values in moments.items()]

    def weight(self, name, slices, tensor, *, step=None):
        self.pieces.append((f"weight {name}", slices, tensor.numpy().copy()))


def collect(transport, payload):
    """`(scalars, pieces, result)` of one rank that trains the plan of `(plan, user's block or None)`."""
    plan, model = payload
    observer = Collect()
    result = run_steps(transport, plan, observer=observer, model=model)
    return observer.scalars, observer.pieces, result


def on_one_device(plan: Plan) -> Plan:
    """The same problem on one device, in microbatches of one sample."""
    cluster, batch = cluster_preset("this-host", 1), replace(plan.batch, micro_size=1)
    return replace(plan, layout=Layout(), cluster=cluster, batch=batch, schedule=ScheduleChoice("1F1B"))


def whole_tensors(plan: Plan, ranks) -> dict[str, np.ndarray]:
    """Whole tensors by name, of what `collect` found on all ranks; every rank that holds an element
    must hold the same bits."""
    shapes = {parameter.name: parameter.shape for parameter in parameters(plan.model)}
    whole, seen = {}, {}
    for _, pieces, _ in ranks:
        for name, slices, values in pieces:
            shape = shapes[name.split()[1]]
            full, known = (
                whole.setdefault(name, np.zeros(shape, np.float32)),
                seen.setdefault(name, np.zeros(shape, bool)),
            )
            before, known_before = full[slices], known[slices]
            assert before.shape == values.shape, (name, before.shape, values.shape)
            assert np.array_equal(before[known_before].view(np.int32), values[known_before].view(np.int32)), (
                f"replicas of {name} differ"
            )
            full[slices], known[slices] = values, True
    assert all(known.all() for known in seen.values())
    return whole


def assert_same_bits(one: dict[str, np.ndarray], many: dict[str, np.ndarray]) -> None:
    """Both have the same tensors, and no bit of one differs."""
    assert one.keys() == many.keys()
    assert [name for name in one if not np.array_equal(one[name].view(np.int32), many[name].view(np.int32))] == []
