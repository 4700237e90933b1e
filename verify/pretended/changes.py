"""What may be wrong between streams, as changes of our own code in a rank's process: each a race that must be found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...backend.base import offload
from ...backend.checkpoint import background, question
from ...backend.data_parallel import early
from ...backend.gradients import gradients, not_finite, part_sums
from ...backend.model import router
from ...backend.optimizers import offloaded_moments
from ...backend.pipeline import executor, messages
from ...backend.ranks import gradient_sums, training_rank
from ...backend.tensor_parallel import data
from ...backend.transport import overlap, process_group


@dataclass(frozen=True)
class Change:
    """`owner.name` becomes `changed`, and a rule of `races` or `waits` must name it in the plan of that name."""

    what: str
    owner: Any
    name: str
    changed: Any
    rule: str
    plan: str


def _nothing(*given: Any, **named: Any) -> None:
    """Does nothing."""


def _only_waits(tensor: Any, moment: Any) -> Any:
    messages.wait_for(moment, tensor.device)
    return tensor


def _ends_alone(channel: Any, work: Any, data: Any, call: str) -> None:
    with torch.cuda.stream(channel._stream):
        work.wait()


@contextmanager
def _at_once(channel: Any) -> Iterator[Any]:
    caller = torch.cuda.current_stream(channel._device)
    with torch.cuda.stream(channel._stream):
        yield caller


@contextmanager
def _unasked(lane: Any, ready: Any, inputs: Any) -> Iterator[None]:
    with torch.cuda.stream(lane._stream):
        yield


def _finishes_alone(lane: Any) -> None:
    lane._mail.wait_until(lambda: len(lane._times) == len(lane._actions))
    lane._thread.join()


def _looks_at_once(held: Any) -> Any:
    found = not_finite.find(held)
    return lambda: found


def _reads_the_norm(norm: Tensor, max_norm: float) -> Tensor:
    return torch.full_like(norm, min(1.0, max_norm / (float(norm) + 1e-6)))


def _waits_for_the_copy(tensor: Tensor, device: Any) -> Tensor:
    return tensor.to(device)


def _takes_at_once(tensor: Any, moment: Any) -> Any:
    return tensor


def _lets_go_at_once(retained: Any) -> None:
    for stored in retained._sending.values():
        stored.sent = None
    _settle(retained)


def _keeps_and_goes_on(retained: Any) -> None:
    for stored in retained._sending.values():
        if stored.sent is not None:
            with torch.cuda.stream(retained._copies._out):
                offload.wait_for(stored.sent, retained._copies.device)
                stored.on_device.record_stream(torch.cuda.current_stream())
            stored.sent = None
    _settle(retained)


def _spends_buffers(copies: Any, stored: Any) -> Any:
    moment = _fetch(copies, stored)
    for each in stored:
        buffer, each._buffer = each._buffer, copies.empty(len(each._buffer), torch.uint8)
        copies.give_back(buffer)
    return moment


_settle, _fetch = offload.Retained.settle, offload._fetch

CHANGES = (
    Change(
        "what is handed over is taken at once", messages, "take_over", _takes_at_once, "read-before-written", "tp2-pp2"
    ),
    Change("what is handed over is not kept", messages, "take_over", _only_waits, "freed-in-use", "tp2-pp2"),
    Change("a lane begins before it may", messages, "wait_for", _nothing, "read-before-written", "tp2-pp2"),
    Change("a lane is not waited for", messages.Lane, "finish", _finishes_alone, "written-while-read", "tp2-pp2"),
    Change(
        "a message's end is waited for by its own stream alone",
        process_group.ProcessGroupChannel,
        "_end_message",
        _ends_alone,
        "read-before-written",
        "tp2-pp2",
    ),
    Change(
        "a message begins before what it sends is made",
        process_group.ProcessGroupChannel,
        "_own_stream",
        _at_once,
        "read-before-written",
        "tp2-pp2",
    ),
    Change("gradients are not kept", gradients, "used_here", _nothing, "freed-in-use", "dp2-zero1"),
    Change("sums of gradients are not kept", gradient_sums, "used_here", _nothing, "freed-in-use", "dp2-zero1"),
    Change("parts of sums are not kept", part_sums, "used_here", _nothing, "freed-in-use", "dp3-hybrid"),
    Change("counts of experts are not kept", router, "used_here", _nothing, "freed-in-use", "ep2"),
    Change(
        "buckets wait for Python alone", early.EarlyReduction, "_come", _nothing, "read-before-written", "dp2-zero1"
    ),
    Change("gathered weights are used at once", executor, "wait_for", _nothing, "read-before-written", "dp2-zero3"),
    Change(
        "an overlapped collective begins at once",
        overlap.CommunicationLane,
        "_own_stream",
        _unasked,
        "read-before-written",
        "tp2-overlap",
    ),
    Change(
        "gradients are looked at as they are reduced", not_finite, "look", _looks_at_once, "host-waits", "dp2-zero1"
    ),
    Change(
        "the norm is read before the update",
        training_rank,
        "clip_coefficient",
        _reads_the_norm,
        "host-waits",
        "dp2-zero1",
    ),
    Change("the host waits for tokens", data, "to_device", _waits_for_the_copy, "host-waits", "dp2-zero1"),
    Change(
        "a layer's memory is let go of before it is copied",
        offload.Retained,
        "settle",
        _lets_go_at_once,
        "freed-in-use",
        "tp2-offload",
    ),
    Change(
        "what was copied to the host comes back before it is there",
        offload.Retained,
        "settle",
        _keeps_and_goes_on,
        "read-before-written",
        "tp2-offload",
    ),
    Change(
        "a backward does not wait for what comes back",
        offload.Retained,
        "arrive",
        offload.Retained.fetch,
        "read-before-written",
        "tp2-offload",
    ),
    Change(
        "moments are updated before they have come",
        offloaded_moments,
        "wait_for",
        _nothing,
        "read-before-written",
        "tp2-offload",
    ),
    Change(
        "weights are updated before they have come",
        offloaded_moments,
        "wait_for",
        _nothing,
        "read-before-written",
        "dp2-masters",
    ),
    Change(
        "weights are updated while a checkpoint's copies are made",
        background,
        "wait_for",
        _nothing,
        "written-while-read",
        "dp2-saves",
    ),
    Change(
        "the host looks for signals by itself", question, "to_device", _waits_for_the_copy, "host-waits", "dp2-saves"
    ),
    Change(
        "a buffer of the host is used again while it is copied back",
        offload,
        "_fetch",
        _spends_buffers,
        "written-while-read",
        "pairs-offload",
    ),
)


TOP = """
[model]
preset = "tiny-gpt"
{model}
[cluster]
preset = "this-host"
num_devices = {ranks}
[layout]
{layout}
[batch]
global = {ranks}
micro = 1
sequence = 32
[precision]
dtype = "fp32"
[numerics]
mode = "exact"
[data_parallel]
{data}
[train]
steps = 2
"""
EARLY = "overlap_grad_reduce = true\nbucket_bytes = 20000"

PLANS = {
    "tp2-pp2": TOP.format(model="", ranks=4, layout="tp = 2\npp = 2", data=""),
    "dp2-zero1": TOP.format(model="", ranks=2, layout="dp = 2\nzero = 1", data=EARLY),
    "dp2-zero3": TOP.format(model="", ranks=2, layout="dp = 2\nzero = 3", data=""),
    # sums go to a communicator of their own only with hybrid sharding, once the backwards of two microbatches have them
    "dp3-hybrid": TOP.format(model="", ranks=3, layout="dp = 3\nzero = 2", data="shard = 1")
    .replace("global = 3", "global = 6")
    .replace('"exact"', '"fast"'),
    "ep2": TOP.format(
        model="num_experts = 4\nexperts_per_token = 2\nexpert_bias = true", ranks=2, layout="dp = 2\nep = 2", data=""
    ),
    "tp2-overlap": TOP.format(model="", ranks=2, layout="tp = 2\nsequence_parallel = true", data="").replace(
        "[train]", "[runtime]\ntp_comm_overlap = true\n[train]"
    ),
    "tp2-offload": TOP.format(model="num_layers = 4", ranks=2, layout="tp = 2", data="").replace(
        "[train]", "[offload]\nactivations = 3\noptimizer = 1.0\n[train]"
    ),
    "dp2-masters": TOP.format(model="", ranks=2, layout="dp = 2\nzero = 1", data="")
    .replace('"fp32"', '"bf16"')
    .replace("[train]", "[offload]\noptimizer = 1.0\nmasters = true\n[train]"),
    "dp2-saves": TOP.format(model="", ranks=2, layout="dp = 2\nzero = 1", data="").replace(
        "[train]", '[checkpoint]\nfolder = "saved"\nevery = 3\n[train]'
    ),
    "dp2-registered": TOP.format(model="", ranks=2, layout="dp = 2\nzero = 2", data=EARLY)
    .replace('"exact"', '"fast"')
    .replace("[train]", '[communicators]\nregistered = ["dp"]\n[train]'),
    "pairs-offload": TOP.format(model="num_layers = 8", ranks=4, layout="tp = 2\npp = 2\nvpp = 2", data="")
    .replace("global = 4", "global = 8")
    .replace(
        "[train]",
        '[offload]\nactivations = 2\n[schedule]\nname = "DualPipeV"\n[runtime]\nep_comm_overlap = true\n[train]',
    ),
}
"""Small plans in which each change shows."""
