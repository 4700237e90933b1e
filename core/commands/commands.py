"""The registry of verbs, whose packages register entry points, and the lookup of services that verbs call."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from ..base.services import load, service

__all__ = ["QUESTIONS", "Command", "command", "service"]

QUESTIONS = {
    "demo": "show me everything in about two minutes: plan, Gantt, proof and a short real training run on this machine",
    "check": "is this run as it should be? settings, memory, schedule, step, and what would be better",
    "plan": "which layout should I use? ranked, with why the others lost",
    "fit": "does it fit? worst rank named, memory by component",
    "simulate": "how long is a step, and where does it go?",
    "import": "what is this Megatron-LM script, torchtitan file, ... as a plan? --explain accounts for every setting",
    "export": "what is this plan in the words of Megatron-LM, torchtitan, torchrun, Slurm, Kubernetes, ...?",
    "verify": "is it right? static rules; --dynamic proves bits against one device",
    "draw": "show me: a Gantt chart, where ranks lie and what they send, loss curves; in the terminal, SVG, PNG, HTML",
    "train": "run it: real processes, here or under torchrun",
    "tokenize": "what are the tokens of this text? text or JSONL files to a token file that train reads",
    "calibrate": "what does this machine take? measures products, kernels and collectives into a cluster file",
    "doctor": "what runs on this machine? compiled parts, transports, bits, speeds; --gpus: its GPUs too",
    "presets": "which models, clusters and schedules are known by name?",
}
"""Verb -> the question it answers, so that `--help` needs to import no verb."""


@dataclass(frozen=True)
class Command:
    """One verb. `configure` adds its options to a parser, `run` returns the exit code (0 fine, 1 findings); what it
    raises ends with 2 or 3 (`cli.exit_code`)."""

    name: str
    example: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def command(name: str) -> Command:
    """The verb `name`, loaded now."""
    found: Command = load("shardproof.commands", "command", name)
    return found
