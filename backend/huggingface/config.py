"""What must hold before anything is read or written: the plan's model, a folder's `config.json`, and where to write."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...core.base.errors import PlanError
from ...core.base.units import format_bytes
from ...core.model.huggingface import model_from_config
from ...core.model.huggingface_config import NAMES, TRAINING_FIELDS, config_of
from ...core.model.model import ModelSpec
from ...core.plan.plan import Plan
from ..base.urls import check_writable
from .folder import INDEX, Folder
from .stored import StoredFolder, is_stored


def check_load(plan: Plan) -> None:
    """Raises `PlanError` where the folder that the plan loads from, if it loads, holds another
    model by its `config.json`."""
    if plan.train.load is not None:
        if is_stored(plan.train.load):
            StoredFolder(plan.train.load, plan.model)
            return
        with Folder(plan.train.load) as folder:
            family_of(plan.model, folder)


def check_save(plan: Plan, path: str) -> None:
    """Raises `PlanError` where saving would at the end of a training: no family has the model, or
    the folder is not free."""
    config_to_write(plan)
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise PlanError(f"save_huggingface={path!r} is a file. Give a folder that is new or empty.")
    if not folder.parent.is_dir():
        raise PlanError(f"save_huggingface={path!r}: there is no folder {str(folder.parent)!r}. Make it first.")
    check_writable(folder, "save_huggingface")
    if folder.is_dir() and (found := sorted(filter(_of_a_model, folder.iterdir()), reverse=True)):
        raise PlanError(
            f"save_huggingface={path!r} holds a model already ({found[0].name}). Give a folder that is new or empty."
        )


def check_room(plan: Plan, path: str) -> None:
    """Raises `PlanError` where the disk of the folder `path`, whose parent is there, has no room for the weights."""
    needed = plan.num_parameters * (4 if plan.precision.dtype == "fp32" else 2)
    if (free := shutil.disk_usage(Path(path).parent).free) < needed:
        raise PlanError(
            f"save_huggingface={path!r}: the weights have {format_bytes(needed)}, and {format_bytes(free)} are free "
            "there. Make room, or give a folder on another disk."
        )


def _of_a_model(file: Path) -> bool:
    """Whether saving would write over a file, or leave another model's weights next to it."""
    return file.suffix == ".safetensors" or file.name in ("config.json", INDEX)


def config_to_write(plan: Plan) -> dict[str, Any]:
    """The `config.json` of the plan's model: that of the folder it was loaded from, with what this plan has
    otherwise, or a new one.

    Raises `ModelError` when no family has such a model.
    """
    if plan.train.load is None or is_stored(plan.train.load):
        return config_of(plan.model, plan.precision.dtype)
    with Folder(plan.train.load) as folder:
        family_of(plan.model, folder)
        config = dict(folder.config)
    # what `dtype` was called before; weights are written as they are
    for name in ("torch_dtype", "quantization_config"):
        config.pop(name, None)
    changed = {"dtype": NAMES[plan.precision.dtype], "vocab_size": plan.model.vocab_size - plan.model.padding_rows}
    if "num_nextn_predict_layers" in config:
        changed["num_nextn_predict_layers"] = plan.model.num_mtp_layers
    return {**config, **changed}


def family_of(model: ModelSpec, folder: Folder) -> str:
    """The `model_type` of a folder whose `config.json` describes `model`, apart from what does not change
    what its weights compute.

    Raises `PlanError` for another model.
    """
    source = str(folder.path / "config.json")
    theirs = model_from_config(folder.config, name=model.name, source=source)
    differences = {
        name: pair for name, pair in _differences(model, theirs).items() if not _may_differ(model, theirs, name)
    }
    if differences:
        said = "; ".join(f"{name}={ours!r}, in the file {written!r}" for name, (ours, written) in differences.items())
        raise PlanError(
            f"train.load={str(folder.path)!r} is another model than the plan's: {said} (from {source}). "
            f"Use model.config = {source!r}, or the plan's own weights."
        )
    return str(folder.config["model_type"])


def _differences(ours: ModelSpec, theirs: ModelSpec) -> dict[str, tuple[object, object]]:
    """Field -> `(ours, theirs)`; the vocabulary is compared without padding."""
    pairs = {field.name: (getattr(ours, field.name), getattr(theirs, field.name)) for field in fields(ModelSpec)}
    pairs["vocab_size"] = ours.vocab_size - ours.padding_rows, theirs.vocab_size - theirs.padding_rows
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _may_differ(ours: ModelSpec, theirs: ModelSpec, field: str) -> bool:
    """Whether a field leaves what the weights compute as it is, or is chosen for training."""
    if field == "max_positions":  # the length of a table, or what rotary positions are stretched from
        stretched = ours.rope_scaling not in ("none", "linear") and not ours.rope_original_positions
        return ours.position == "alibi" or (ours.position == "rope" and not stretched)
    if field == "num_mtp_layers":  # modules may be left unread
        return ours.num_mtp_layers < theirs.num_mtp_layers
    return field in ("name", "padding_rows", *TRAINING_FIELDS)
