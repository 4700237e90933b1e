"""`Log`: what a training run writes down about its steps, and where."""

from __future__ import annotations

from ..base.option import Bounded, noun, option


@noun()
class Log(Bounded, section="log"):
    """What `train` shows and writes of a run's steps (`backend.monitoring`). None of it changes a bit of the result."""

    every: int = option(
        "steps between two lines of progress",
        default=1,
        minimum=1,
        more="A terminal has a live display instead. The file of metrics has every step.",
        read_by="backend.monitoring.run_log",
    )
    file: str | None = option(
        "the file of metrics, one JSON object a step",
        default=None,
        kind="path",
        default_note="metrics.jsonl in checkpoint.folder, else train-metrics.jsonl where `train` is started",
        more="A run that is resumed goes on with it; one from the start begins it anew.",
        read_by="backend.monitoring.metrics",
    )
    energy: bool = option(
        "joules of processors (RAPL) and GPUs (NVML), where they can be read",
        default=True,
        more="They are read every `log.every` steps; GPUs need the extra `energy`.",
        read_by="backend.monitoring.run_log",
    )
    tensorboard: str | None = option(
        "the folder of an event file for TensorBoard",
        default=None,
        kind="path",
        default_note="none",
        more="Needs the extra `tensorboard`.",
        read_by="backend.monitoring.services",
    )
    wandb: str | None = option(
        "the project that Weights & Biases files the run under",
        default=None,
        default_note="none",
        more="Needs the package `wandb`. Where it sends the run to, or that it sends nothing, are its own settings "
        "(WANDB_MODE=offline).",
        read_by="backend.monitoring.services",
    )
    timers: int = option(
        "0: none; 1: seconds by kind of action over all ranks, and who is slow; 2: by stage too",
        default=0,
        minimum=0,
        maximum=2,
        more="They are taken every `log.every` steps. On 0 no rank takes or sends anything.",
        read_by="backend.monitoring.run_log",
    )
