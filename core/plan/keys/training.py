"""The keys of `[optimizer]`, `[train]` and `[checkpoint]`."""

from __future__ import annotations

from typing import Any

from .key import Key


def training_keys() -> tuple[Key, ...]:
    """Of `[optimizer]` and `[train]`."""
    adamw, rank, data, loss = (
        "backend.base.optimizer",
        "backend.ranks.training_rank",
        "backend.ranks.batches",
        "backend.tensor_parallel.cross_entropy",
    )
    router: dict[str, Any] = {"section": "train", "type": "float", "minimum": 0, "read_by": "backend.model.router"}
    return (
        Key("optimizer", "name", "str", "the optimizer", adamw, choices=("adamw",)),
        Key("optimizer", "betas", "two floats", "decay of the moment estimates", adamw, minimum=0, below=1),
        Key("optimizer", "eps", "float", "added to the root of the second moment", adamw, above=0),
        Key("optimizer", "weight_decay", "float", "decoupled weight decay", adamw, minimum=0),
        Key(
            "optimizer",
            "clip_grad_norm",
            "float",
            ("largest global gradient norm; 0 turns clipping off"),
            rank,
            minimum=0,
        ),
        Key("train", "steps", "int", "optimizer steps", "backend.trainer", minimum=0),
        Key("train", "data", "path", "a text file, a folder, or python-stdlib", data),
        Key(
            "train",
            "load",
            "path",
            ("a Hugging Face folder (config.json, safetensors): its weights"),
            rank,
            default_note="drawn from seed",
        ),
        Key("train", "seed", "int", "seed of weights and data order", data, minimum=0),
        Key("train", "learning_rate", "float", "constant learning rate", rank, minimum=0),
        Key("train", "packed", "bool", "attention and positions begin again with every document", data),
        Key("train", "padded", "bool", "a sequence is one document, filled up with ignore_token", data),
        Key(
            "train",
            "ignore_token",
            "int",
            "an id that is not learned: tokens with this target count for nothing",
            loss,
            minimum=0,
            default_note="all count",
        ),
        Key(
            "train",
            "mtp_loss_weight",
            "float",
            ("weight of multi-token prediction's mean loss"),
            "backend.model.multi_token",
            minimum=0,
        ),
        Key(
            "train",
            "label_smoothing",
            "float",
            ("share of the target spread over the whole vocabulary"),
            loss,
            minimum=0,
            below=1,
        ),
        Key(
            "train",
            "z_loss",
            "float",
            ("factor of (log Z)^2 in every token's loss, Z the sum of exp(logits)"),
            loss,
            minimum=0,
        ),
        Key(name="router_aux_loss", doc="factor of the loss for unequally busy experts, per sequence", **router),
        Key(name="router_z_loss", doc="factor of (log Z)^2 of every router's logits", **router),
        Key(name="router_jitter", doc="a router's inputs are scaled by up to 1 - and 1 + this", below=1, **router),
        Key(
            name="expert_bias_rate",
            doc=("what a step adds to or takes from an expert's bias"),
            **{**router, "read_by": rank},
        ),
        Key(
            "train",
            "timeout_s",
            "float",
            ("without any rank ending an action, after which all are ended"),
            "backend.trainer",
            above=0,
        ),
    )


def checkpoint_keys() -> tuple[Key, ...]:
    """Of `[checkpoint]`."""
    count: dict[str, Any] = {
        "section": "checkpoint",
        "type": "int",
        "minimum": 1,
        "read_by": "backend.checkpoint.saver",
    }
    return (
        Key(
            "checkpoint",
            "folder",
            "path",
            "where training saves what it can go on from",
            "backend.checkpoint.resume",
            default_note="nowhere",
        ),
        Key(name="every", doc="steps between two checkpoints", default_note="one after the last step", **count),
        Key(name="keep", doc="how many of the newest stay", default_note="all", **count),
    )
