"""A Megatron training command -> the values of a plan, with every flag accounted for."""

from __future__ import annotations

import math

from ..base.errors import UnknownNameError
from ..base.findings import NOWHERE
from ..plan.toml import Given
from .account import Imported, Request, Setting
from .megatron_command import LAUNCHER, training_command
from .megatron_data import read_data
from .megatron_flags import RELEASES
from .megatron_layout import read_layout
from .megatron_model import read_model
from .megatron_occurrences import TrainingCommand
from .megatron_optimizer import read_optimizer
from .megatron_rates import read_batches, read_length, read_rates
from .megatron_reading import Reading, detected_version
from .megatron_runtime import read_runtime

ASSUMED_CLUSTER = "dgx-h100"
"""Scripts do not say what they run on."""

_OTHER_PROGRAMS = {
    "bert": "a BERT is no decoder",
    "t5": "a T5 has an encoder",
    "ict": "retrieval models have two encoders",
    "retro": "retrieval adds an encoder and cross attention",
    "vision": "a model of images is no decoder of text",
    "vit": "a model of images is no decoder of text",
    "vlm": "a model of images and text is not one decoder",
    "multimodal": "a model of images and text is not one decoder",
    "llava": "a model of images and text is not one decoder",
    "mimo": "a model of several inputs is not one decoder",
    "mamba": "layers of state-space models are not those of a plan",
    "hybrid": "layers of several kinds are not those of a plan",
    "chatglm": "this model has positions and attention of its own",
}


def imported_from(request: Request) -> Imported:
    """What the file says. Raises `PlanError` where it has no training command, or several that differ;
    `UnknownNameError` for a release that there is not."""
    if request.version is not None and request.version not in RELEASES:
        raise UnknownNameError("release of Megatron", request.version, RELEASES)
    command = training_command(request)
    reading = Reading(command, request.source, request.version)
    version, mixture = detected_version(reading.flags, reading.last)
    if mixture and request.version is None:
        reading.assume(mixture)
    _refuse_program(reading, command)
    devices = _devices(reading, command, request.num_devices)
    model = read_model(reading)
    read_layout(reading, model, devices)
    _batch(reading, devices)
    read_runtime(reading, release=request.version)
    read_optimizer(reading)
    read_rates(reading, reading.value("batch", "global"))
    read_data(reading)
    _cluster(reading, devices)
    settings = (*_launcher(command, request), *reading.finish())
    return Imported(
        "megatron",
        request.version or version,
        request.source,
        reading.values,
        tuple(sorted(settings, key=lambda setting: setting.line)),
        tuple(dict.fromkeys(reading.assumed)),
    )


def _refuse_program(reading: Reading, command: TrainingCommand) -> None:
    words = command.program.removesuffix(".py").lower()
    why = next((why for name, why in _OTHER_PROGRAMS.items() if name in words.replace("-", "_").split("_")), None)
    if why is not None:
        reading.refuse(command.program, "", command.program_line, why)


def _devices(reading: Reading, command: TrainingCommand, asked: int | None) -> int | None:
    if asked is not None:
        return asked
    if (world := reading.integer("--world-size") if reading.is_written("--world-size") else None) is not None:
        return world
    if command.num_devices is None:
        why = command.devices_unknown or "the file does not say on how many devices it runs"
        reading.refuse("devices", "", 0, f"{why}. Give --devices N.", "cluster.num_devices")
    return command.num_devices


def _launcher(command: TrainingCommand, request: Request) -> list[Setting]:
    """What became of the launcher's own flags."""
    settings = []
    for each in command.launcher:
        if not each.flag.startswith("-"):
            continue
        name = {"-N": "--nodes"}.get(each.flag, each.flag.replace("_", "-"))
        if name not in LAUNCHER:
            why = "how processes are started does not change a step"
            settings.append(Setting(each.flag, each.value, each.line, "no-effect", None, why))
        elif request.num_devices is not None:
            why = "--devices says how many there are"
            settings.append(Setting(each.flag, each.value, each.line, "no-effect", None, why))
        elif command.num_devices is None:
            why = "the number of devices is given otherwise, or refused"
            settings.append(Setting(each.flag, each.value, each.line, "no-effect", None, why))
        else:
            settings.append(Setting(each.flag, each.value, each.line, "mapped", "cluster.num_devices", ""))
    return settings


def _batch(reading: Reading, devices: int | None) -> None:
    """Sequences of a step, and how many steps there are."""
    micro = reading.value("batch", "micro")
    size, replicas = reading.integer("--global-batch-size"), None
    if devices is not None:
        degrees = [reading.value("layout", axis) or 1 for axis in ("tp", "pp", "cp")]
        replicas = max(1, devices // math.prod(degrees))
    if size is None and not reading.is_written("--global-batch-size") and micro is not None and replicas is not None:
        size = micro * replicas
    size = read_batches(reading, size, replicas)
    if size is not None:
        reading.put(
            "batch.global",
            size,
            "--global-batch-size",
            why="" if reading.given("--global-batch-size") else "micro batch times dp, Megatron's default",
        )
    reading.require("--micro-batch-size", "batch.micro")
    reading.require("--seq-length", "batch.sequence")
    read_length(reading, size)


def _cluster(reading: Reading, devices: int | None) -> None:
    cluster = reading.values.setdefault("cluster", {})
    cluster["preset"] = Given(ASSUMED_CLUSTER, f"{reading.source} (assumed)", NOWHERE)
    reading.assume(f"the file does not name its hardware: cluster.preset = {ASSUMED_CLUSTER} is assumed (--cluster).")
    if devices is not None:
        per_node = next(
            (
                int(each.value)
                for each in reading.command.launcher
                if each.flag.replace("_", "-") in ("--nproc-per-node", "--num-gpus", "--ntasks-per-node")
                and each.value.isdigit()
            ),
            None,
        )
        cluster["num_devices"] = Given(devices, f"{reading.source} (launcher)", NOWHERE)
        if (
            per_node is not None
            and 0 < per_node != 8
            and devices % per_node == 0
            and (devices > per_node or per_node > 8)
        ):
            cluster["devices_per_node"] = Given(per_node, f"{reading.source} (launcher)", NOWHERE)
