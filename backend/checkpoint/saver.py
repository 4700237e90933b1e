"""`Checkpoints`: a run's checkpoints as one rank sees them. All ranks make the same calls together, and
all see the same folder.

A checkpoint is written into a folder with another name (`step-00000020.partial`) and renamed when all of it is on the
disk. So whatever ends a run, and whenever, the folders named `step-...` are whole.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...core.base.errors import PlanError
from ...core.base.files import write_text
from ...core.plan.plan import AnyPlan, recorded_numerics
from ..base.environment import environment
from ..data.corpus import Corpus
from ..transport.base import Group
from ..transport.gather_values import gather_values, run_on_all
from ..watch.watch import RankWatch
from .index import INDEX_FILE, DamagedError
from .resume import (
    NoneWholeError,
    Saved,
    changes_since,
    damage_text,
    numerics_of,
    other_products,
    path_of,
    problem_of,
    saved_in,
)
from .state import pieces_of, take_up
from .tensors import Piece, read_tensors, write_tensors
from .whole import STATE_FILE, STATE_FORMAT, has_index, quick_damages, steps_of

if TYPE_CHECKING:
    from ..ranks.training_rank import TrainingRank

PARTIAL, REMOVED = ".partial", ".removed"
"""Ends of the names of checkpoints that are not whole: not yet, or no longer."""
DAMAGED = ".damaged"
"""The end of the name of a checkpoint that was damaged, once a run has saved another after as many steps."""


class Checkpoints:
    """Saves to and restores from the plan's `checkpoint.folder`, which is made where it is not there.

    `corpus` is the training text, which rank 0 of `world` must have. `newest` is the folder of the last checkpoint that
    this run saved or went on from. On the board of `watch` it is seen that ranks save, however long that takes.
    """

    newest: Path | None = None

    def __init__(
        self,
        plan: AnyPlan,
        corpus: Corpus | None,
        world: Group,
        device: torch.device,
        watch: RankWatch | None = None,
    ):
        assert plan.checkpoint.folder is not None
        assert corpus is not None or world.rank > 0, "rank 0 reads the data"
        self._plan = plan
        self._world = world
        self._device = device
        self._watch = watch
        self._folder = Path(plan.checkpoint.folder)
        self._text = None if corpus is None or world.rank > 0 else corpus.record
        if world.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)

    def restore(self, path: Path, rank: TrainingRank) -> int:
        """Makes a rank go on from a checkpoint, or where it is damaged from the newest whole one before it, which
        standard error reports it. Gives the number of steps that were done. Raises `PlanError` on every rank where that
        is one of another model or of another text, and where none is whole."""
        own = [[saved.path.name, saved.steps] for saved in saved_in(path.parent) if saved.steps <= steps_of(path)][::-1]
        damaged: list[str] = []
        for name, steps in gather_values(self._world, own, self._device)[0]:
            saved = Saved(path.with_name(name), steps)
            try:
                notices = self._may_go_on(saved)
                pieces = pieces_of(rank)
                read_tensors(saved.path, pieces, self._world, self._device, self._watch)
            except DamagedError as error:
                damaged.append(damage_text(saved.path, error.problems))
                continue
            take_up(rank, pieces)
            if self._world.rank == 0:
                for notice in [*(f"{text} Going on from {saved.path}." for text in damaged[-1:]), *notices]:
                    print(f"resume: {notice}", file=sys.stderr, flush=True)
            self.newest = saved.path
            return saved.steps
        raise NoneWholeError(self._plan, damaged)

    def _may_go_on(self, saved: Saved) -> list[str]:
        """Sentences that are to be said when a run goes on from a checkpoint. Raises on every rank, as rank 0 finds it,
        `DamagedError`, and `PlanError` where it is of another run or text."""
        answer = run_on_all(self._world, self._device, lambda: self._opening(saved), watch=self._watch, name="check")
        kind, sentences = gather_values(self._world, answer, self._device)[0]
        if kind != "notices":
            raise (DamagedError if kind == "damaged" else PlanError)(sentences)
        return list(sentences)

    def _opening(self, saved: Saved) -> tuple[str, list[str]]:
        """`damaged` or `refused` with problems, or `notices`, on rank 0."""
        if self._text is None:
            return "notices", []
        if problems := quick_damages(saved.path):  # first: what a damaged `state.json` says is not believed
            return "damaged", problems
        try:
            changes_since(self._plan, saved)
            theirs = saved.state.get("text") or self._text
            if theirs != self._text:
                return "refused", [self._other_text(saved.path, theirs)]
            older = f"{saved.path} is of an earlier version, which wrote no digests: not all damage to it can be seen."
            unknown = [] if has_index(saved.path) else [older]
        except DamagedError as error:
            return "damaged", list(error.problems)
        except PlanError as error:
            return "refused", list(error.problems)
        return "notices", unknown + other_products(self._plan, saved) + self._other_machine(saved)

    def _other_text(self, path: Path, theirs: Mapping[str, Any]) -> str:
        return (
            f"{path} was saved while training on {_text_words(theirs)}, but train.data={self._plan.train.data!r} has "
            f"{_text_words(self._text or {})}, so other samples would follow. Use those data, or another "
            "checkpoint.folder."
        )

    def _other_machine(self, saved: Saved) -> list[str]:
        """Where the checkpoint comes from another kind of machine than this one: bits are promised on one alone."""
        here = environment(self._device)
        other = [
            f"{name} is {here.get(name, 'unknown')} and was {value}"
            for name, value in numerics_of(saved).machine.items()
            if here.get(name) != value
        ]
        return [f"{saved.path} was saved on another machine ({'; '.join(other)}): bits may differ."] if other else []

    def is_due(self, steps: int, *, last: bool) -> bool:
        """Whether there is to be a checkpoint after so many steps."""
        every = self._plan.checkpoint.every
        return last or (every is not None and steps % every == 0)

    def save(self, steps: int, rank: TrainingRank) -> None:
        """Saves what the ranks have after so many steps, then removes what is more than `checkpoint.keep`."""
        self.save_pieces(steps, pieces_of(rank))

    def save_pieces(self, steps: int, pieces: Sequence[Piece]) -> None:
        """`save`, of any tensors."""
        path = path_of(self._folder, steps)
        partial = path.with_name(path.name + PARTIAL)
        self._first_rank(lambda: self._begin(partial, steps))
        write_tensors(partial, pieces, self._world, self._device, self._watch)
        self._first_rank(lambda: self._finish(partial, path))
        self.newest = path

    def _first_rank(self, work: Callable[[], None]) -> None:
        """Rank 0 works, and all go on when it is done."""
        leads = self._world.rank == 0
        run_on_all(self._world, self._device, work if leads else lambda: None, watch=self._watch, name="save")

    def _begin(self, partial: Path, steps: int) -> None:
        self._clear()
        partial.mkdir()
        write_text(partial / STATE_FILE, json.dumps(self._state(steps), indent=1) + "\n")

    def _finish(self, partial: Path, path: Path) -> None:
        """Gives a checkpoint its name when it is on the disk; one of that name, which was damaged, gets another."""
        for file in (STATE_FILE, INDEX_FILE):
            _sync(partial / file)
        _sync(partial)
        if path.exists():
            path.rename(_free_name(path.with_name(path.name + DAMAGED)))
        partial.rename(path)
        _sync(self._folder)
        self._remove_old(path)

    def _state(self, steps: int) -> dict[str, Any]:
        samples = steps * self._plan.batch.global_size
        return {
            "format": STATE_FORMAT,
            "steps": steps,
            "samples": samples,
            "text": self._text,
            "problem": problem_of(self._plan),
            "numerics": recorded_numerics(self._plan, environment(self._device)).to_json(),
        }

    def _clear(self) -> None:
        """Removes what runs that were ended while they saved or removed have left behind."""
        for left in self._folder.glob("step-*"):
            if left.suffix in (PARTIAL, REMOVED):
                shutil.rmtree(left)

    def _remove_old(self, newest: Path) -> None:
        """Removes what is more than `checkpoint.keep`. Newer checkpoints than the `newest` of this run
        were damaged, and stay."""
        keep, known = (
            self._plan.checkpoint.keep,
            [saved for saved in saved_in(self._folder) if saved.path.name <= newest.name],
        )
        for old in known[: -keep if keep else 0]:
            removed = old.path.with_name(old.path.name + REMOVED)
            old.path.rename(removed)  # first another name: half of it would be no checkpoint
            shutil.rmtree(removed)


def _text_words(text: Mapping[str, Any]) -> str:
    """What a checkpoint has recorded of the data (`Corpus.record`)."""
    size = f"token files of {text['tokens']} tokens" if "tokens" in text else f"a text of {text.get('bytes')} bytes"
    return f"{size} with SHA-256 {str(text.get('sha256'))[:12]}..."


def _free_name(path: Path) -> Path:
    """The path, or with a number behind it the first that is free."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))
    return next(name for name in names if not name.exists())


def _sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
