"""Which checkpoint a run goes on from, and whether it may: decided before ranks start, and without torch.

`checkpoint.folder` holds one folder per checkpoint, `step-00000020` after 20 steps: the tensors as
`torch.distributed.checkpoint` writes them, `state.json`, and the index that shows whether all of it is as it was saved
(`index`). A folder of that name got its name when everything in it had reached the disk. Small files and the lengths of
all are looked at here; ranks read the rest before they use it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...core.base.errors import PlanError
from ...core.layout.recorded_numerics import PRODUCTS, RecordedNumerics
from ...core.model.huggingface_config import TRAINING_FIELDS
from ...core.plan.batch_sizes import samples_before
from ...core.plan.plan import AnyPlan, recorded_numerics
from ...core.plan.sections import NO_PRODUCTS
from ..base.urls import Place, check_writable, place_of
from ..dcp.files import exists
from ..dcp.index import INDEX_FILE, DamagedError
from .whole import quick_damages, read_state


@dataclass(frozen=True)
class Saved:
    """A checkpoint: its folder, and how many steps had been done."""

    path: Place
    steps: int

    @property
    def state(self) -> Mapping[str, Any]:
        """What `STATE_FILE` says. Raises `DamagedError` when it cannot be read."""
        return read_state(self.path)


@dataclass(frozen=True)
class Resumption:
    """The checkpoint to go on from, and what the run has otherwise than the one that saved it
    (sentences): its bits will differ.

    `damaged` are sentences about newer checkpoints, which are not used. The ranks, which read all of it, may
    find this one damaged too.
    """

    saved: Saved
    changes: tuple[str, ...]
    damaged: tuple[str, ...] = ()


def path_of(folder: Place, steps: int) -> Place:
    """Where the checkpoint after so many steps lies."""
    return folder / f"step-{steps:08d}"


def saved_in(folder: Place) -> list[Saved]:
    """The whole checkpoints of a folder, oldest first; none where there is no such folder. At a URL one is whole that
    has its index, the last object to be written."""
    is_there = folder.is_dir() if isinstance(folder, Path) else True
    found = ((path, re.fullmatch(r"step-(\d{1,18})", path.name)) for path in (folder.iterdir() if is_there else ()))
    saved = [
        Saved(path, int(match[1]))
        for path, match in found
        if match and (isinstance(path, Path) or exists(path / INDEX_FILE))
    ]
    return sorted(saved, key=lambda saved: saved.steps)


def resumption(plan: AnyPlan, *, resume: bool) -> Resumption | None:
    """What a run starts from; None is the beginning, also with `resume` while nothing has been saved.

    Raises `PlanError` where the newest checkpoint is one of another model or of other data, or is beyond the plan's
    last step, where all are damaged, and without `resume` where the folder has checkpoints already.
    """
    if plan.checkpoint.folder is None:
        if resume:
            raise PlanError(
                "resuming needs the folder of the checkpoints, and the plan has none. Set checkpoint.folder."
            )
        return None
    folder = place_of(plan.checkpoint.folder)
    check_writable(folder, "checkpoint.folder")
    if not (found := saved_in(folder)):
        return None
    saved = found[-1]
    if not resume:
        raise PlanError(
            f"checkpoint.folder={str(folder)!r} holds a run already, saved after {saved.steps} steps "
            f"({saved.path.name}). "
            "Use --resume to go on with it, or another folder."
        )
    damaged: list[str] = []
    if plan.checkpoint.copies is not None:
        return _on_this_host(plan, found)
    for saved in reversed(found):
        problems = quick_damages(saved.path)
        if not problems:
            return Resumption(saved, changes_since(plan, saved), tuple(damaged))
        damaged.append(damage_text(saved.path, problems))
    raise NoneWholeError(plan, damaged)


def _on_this_host(plan: AnyPlan, found: Sequence[Saved]) -> Resumption | None:
    """The newest that this host knows of, where each has a part of all: ranks find out together which is whole."""
    for saved in reversed(found):
        try:
            return Resumption(saved, changes_since(plan, saved))
        except DamagedError:
            continue
    return None


def changes_since(plan: AnyPlan, saved: Saved) -> tuple[str, ...]:
    """What a run that goes on from a checkpoint has otherwise than the one that saved it. Raises `PlanError`
    where it may not go on."""
    if saved.steps > plan.train.steps:
        raise PlanError(
            f"{saved.path} was saved after {saved.steps} steps, but the run ends after train.steps={plan.train.steps}. "
            f"Use train.steps={saved.steps} or more."
        )
    theirs = saved.state.get("problem", {})
    if refused := list(_differences(plan, theirs, _must_be_equal)):
        raise PlanError(
            [
                f"{saved.path} is of another run: {difference}. Use the plan that it was saved with, or another "
                "checkpoint.folder."
                for difference in refused
            ]
        )
    samples = samples_before(plan.batch, saved.steps)
    if (had := saved.state.get("samples", samples)) != samples:  # versions without batches that change say nothing else
        raise PlanError(
            f"{saved.path} was saved after {had} samples, but by this plan its {saved.steps} steps take {samples}. Use "
            "the batches that it was saved with, or another checkpoint.folder."
        )
    otherwise = _differences(plan, theirs, lambda section, name: not _must_be_equal(section, name))
    return (*otherwise, *_other_numerics(plan, saved))


def numerics_of(saved: Saved) -> RecordedNumerics:
    """The numerics that a checkpoint has recorded. Raises `PlanError` where that is none that is known."""
    state = saved.state
    try:
        if "numerics" in state:
            return RecordedNumerics.from_json(state["numerics"])
        return RecordedNumerics.of_version_1(state.get("problem", {}).get("numerics", {}))
    except ValueError as error:
        raise PlanError(f"{saved.path}: {error}.") from error


def _other_numerics(plan: AnyPlan, saved: Saved) -> Iterator[str]:
    """`numerics.reduction_token_block=2, saved with 4` for what both record and what differs. Ranks say it
    of products, which they choose (`other_products`)."""
    for name, ours, other in recorded_numerics(plan).differences(numerics_of(saved)):
        if name != PRODUCTS:
            yield f"numerics.{name}={json.dumps(ours)}, saved with {json.dumps(other)}"


def other_products(plan: AnyPlan, saved: Saved) -> list[str]:
    """What is to be said where a run, of `plan` with its products chosen, has others than the one that saved."""
    return [
        f"{saved.path} was saved with numerics.{name}={json.dumps(other)}, and this run has {json.dumps(ours)}, so "
        f"bits will differ from that run's. Set numerics.{name}={json.dumps(other or [NO_PRODUCTS])} to have its bits."
        for name, ours, other in recorded_numerics(plan).differences(numerics_of(saved))
        if name == PRODUCTS
    ]


class NoneWholeError(PlanError):
    """No checkpoint of a folder is as it was saved; the problems say what is wrong with each."""

    def __init__(self, plan: AnyPlan, damaged: Sequence[str]):
        none = f"checkpoint.folder={plan.checkpoint.folder!r} has no whole checkpoint to go on from."
        super().__init__([*damaged, f"{none} Restore one, or start in another folder."])


def damage_text(path: Place, problems: Sequence[str]) -> str:
    """One sentence or more about a checkpoint that is not used."""
    return f"{path} is damaged: {' '.join(problems)}"


def problem_of(plan: AnyPlan) -> dict[str, dict[str, Any]]:
    """Everything besides its recorded numerics that the bits of a run are a function of, by section of a plan, as JSON
    has it. Layout, schedule and microbatches are not among it, and neither is the number of steps. What is each
    module's own begins with its name."""
    models = {
        part.name_in_run(name): value
        for part in plan.parts
        for name, value in asdict(part.model).items()
        if name != "name"
    }
    sections: dict[str, dict[str, Any]] = {
        "model": models,
        "batch": {
            "global": plan.batch.global_size,
            **{name: value for name, value in asdict(plan.batch).items() if name not in ("global_size", "micro_size")},
        },
        "precision": asdict(plan.precision),
        "optimizer": {**asdict(plan.optimizer), **plan.parts[0].rates.recorded},
        "train": {
            name: value
            for name, value in asdict(plan.train).items()
            if name not in ("steps", "validation_data", "load", "timeout_s", "setup_timeout_s", "eval_every")
            and not name.startswith(("sample_", "data"))
        },
    }
    return dict(json.loads(json.dumps(sections)))


def _must_be_equal(section: str, name: str) -> bool:
    """Whether a run cannot go on where this differs: weights have other shapes or meanings, or other
    samples would follow."""
    if section == "model":
        return name.rpartition(".")[2] not in TRAINING_FIELDS
    return section == "batch" or (section, name) in (("optimizer", "name"), ("train", "seed"), ("train", "padded"))


def _differences(plan: AnyPlan, theirs: Mapping[str, Mapping[str, Any]], chosen: Any) -> Iterator[str]:
    """`batch.sequence=32, saved with 16` for every chosen field that differs; one that the file does
    not know is left out."""
    for section, fields in problem_of(plan).items():
        saved = theirs.get(section, {})
        for name, value in fields.items():
            if chosen(section, name) and name in saved and saved[name] != value:
                yield f"{section}.{name}={json.dumps(value)}, saved with {json.dumps(saved[name])}"
