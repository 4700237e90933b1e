"""`Checkpoints`: a run's checkpoints as one rank sees them. All ranks make the same calls together, and
all see the same folder.

Where they lie, and that only whole ones are found there, is `storage`'s matter. One is written while training goes on
(`background`), unless the plan says otherwise: one that waits takes the same way and is waited for.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...core.base.errors import PlanError
from ...core.base.files import write_text
from ...core.plan.batch_sizes import samples_before
from ...core.plan.plan import AnyPlan, recorded_numerics
from ..base.environment import environment
from ..base.streams import Moment
from ..base.urls import Place
from ..data.corpus import Corpus
from ..dcp.index import DamagedError
from ..transport.base import Group
from ..transport.gather_values import gather_values, run_on_all
from ..watch.stop import StopRequest
from ..watch.watch import RankWatch
from .again import Frames
from .background import PendingSave, Snapshots, Task
from .host_storage import HostStorage
from .question import DONE, LATE, UNDER_WAY, Answer, asked
from .resume import (
    NoneWholeError,
    Saved,
    changes_since,
    damage_text,
    numerics_of,
    other_products,
    problem_of,
    saved_in,
)
from .state import pieces_of, take_up
from .storage_choice import storage_of
from .tensors import Piece, Share, check_written, finish_folder, read_tensors, share_of, write_share
from .whole import STATE_FILE, STATE_FORMAT, has_index, quick_damages, steps_of

if TYPE_CHECKING:
    from ..ranks.training_rank import TrainingRank


class Checkpoints:
    """Saves to and restores from the plan's `checkpoint.folder`, which is made where it is not there.

    `corpus` is the training text, which rank 0 of `world` must have. `newest` is the folder of the last checkpoint that
    this run saved or went on from, `events` what came of checkpoints and of requests to stop, for JSON. On the board of
    `watch` it is seen that ranks save, however long that takes.
    """

    newest: Place | None = None

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
        self.events: list[dict[str, Any]] = []
        self._pending: PendingSave | None = None
        self._share: Share | None = None
        self._snapshots, self._frames = Snapshots(device), Frames()
        self._storage = storage_of(plan.checkpoint, world, device)
        self._text = None if corpus is None or world.rank > 0 else corpus.record
        if world.rank == 0:
            self._storage.prepare()

    def restore(self, path: Place, rank: TrainingRank) -> int:
        """Makes a rank go on from a checkpoint, or where it is damaged from the newest whole one before it, which
        standard error reports it. Gives the number of steps that were done. Raises `PlanError` on every rank where that
        is one of another model or of another text, and where none is whole."""
        if isinstance(self._storage, HostStorage):
            return self._restore_from_hosts(self._storage, rank)
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
            return self._resumed(saved, damaged, notices)
        raise NoneWholeError(self._plan, damaged)

    def _restore_from_hosts(self, storage: HostStorage, rank: TrainingRank) -> int:
        """`restore`, from what hosts have on their own disks."""
        pieces = pieces_of(rank)
        saved, lost = storage.bring(pieces, self._plan.train.steps, self._watch)
        notices = self._may_go_on(saved, is_checked=True)
        read_tensors(saved.path, pieces, self._world, self._device, self._watch, is_checked=True)
        take_up(rank, pieces)
        return self._resumed(saved, lost, notices)

    def _resumed(self, saved: Saved, damaged: Sequence[str], notices: Sequence[str]) -> int:
        """What is to be said when ranks go on from a checkpoint; gives its steps."""
        if self._world.rank == 0:
            for notice in [*(f"{text} Going on from {saved.path}." for text in damaged[-1:]), *notices]:
                print(f"resume: {notice}", file=sys.stderr, flush=True)
        self.newest = saved.path
        self.events.append({"step": saved.steps, "event": "resumed", "path": str(saved.path)})
        return saved.steps

    def _may_go_on(self, saved: Saved, *, is_checked: bool = False) -> list[str]:
        """Sentences that are to be said when a run goes on from a checkpoint, whose files were compared with their
        digests already where it `is_checked`. Raises on every rank, as rank 0 finds it,
        `DamagedError`, and `PlanError` where it is of another run or text."""
        answer = run_on_all(
            self._world, self._device, lambda: self._opening(saved, is_checked), watch=self._watch, name="check"
        )
        kind, sentences = gather_values(self._world, answer, self._device)[0]
        if kind != "notices":
            raise (DamagedError if kind == "damaged" else PlanError)(sentences)
        return list(sentences)

    def _opening(self, saved: Saved, is_checked: bool) -> tuple[str, list[str]]:
        """`damaged` or `refused` with problems, or `notices`, on rank 0."""
        if self._text is None:
            return "notices", []
        # first: what a damaged `state.json` says is not believed
        if problems := [] if is_checked else quick_damages(saved.path):
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

    def _other_text(self, path: Place, theirs: Mapping[str, Any]) -> str:
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

    def before_steps(self, steps: int, rank: TrainingRank, stop: StopRequest) -> str | None:
        """The name of the signal that came to a rank before training went on after so many steps. From now on every
        step of the `rank` asks for the next one."""

        def asks() -> torch.Tensor:
            self._snapshots.settle()  # the step's update comes behind
            return asked(self._world, self._device, stop.number, self._progress())

        rank.asks = asks
        number = Answer.of(asks().tolist()).signal
        return self._stopped(steps, number) if number else None

    def after_step(self, steps: int, rank: TrainingRank, *, last: bool) -> str | None:
        """What is to be done after so many steps: saves where that is due, takes a checkpoint further that is on its
        way, and saves what there is when a rank was asked to stop. All is on the disk after the last step, and when the
        run is to be left: the signal's name says that. Raises on every rank what went wrong with a checkpoint."""
        answer = Answer.of(rank.answers)
        stops = bool(answer.signal) and not last
        if answer.any_late:
            self._check_in_time(self._states())
        if answer.all_done:
            self._advance()
        if last or stops or self._is_due(steps):
            self.begin(steps, pieces_of(rank), snapshot=self._plan.checkpoint.asynchronous and not (last or stops))
        if not self._plan.checkpoint.asynchronous or last or stops:
            self.finish()
        return self._stopped(steps, answer.signal) if stops else None

    def is_busy(self, steps: int) -> bool:
        """Whether `after_step` may have more to do after so many steps than to look at their answer."""
        return self._pending is not None or self._is_due(steps)

    def _states(self) -> list[int]:
        """How the parts of all ranks are getting on; the host waits for it."""
        own = torch.tensor([self._progress()], dtype=torch.int64, device=self._device)
        return [int(state) for state in self._world.all_gather(own)]

    def _progress(self) -> int:
        """How this rank's part of what is on its way is getting on."""
        if self._pending is None:
            return UNDER_WAY
        if self._pending.task.is_done:
            return DONE
        return LATE if self._pending.task.elapsed_s > self._plan.checkpoint.timeout_s else UNDER_WAY

    def _check_in_time(self, states: Sequence[int]) -> None:
        """Raises `PlanError` where a rank's part takes longer than it may."""
        if self._pending is not None and LATE in states:
            late = ", ".join(str(rank) for rank, state in enumerate(states) if state == LATE)
            raise PlanError(
                f"{self._pending.partial}: rank {late} has not written its part within checkpoint.timeout_s="
                f"{self._plan.checkpoint.timeout_s:g}. Look at its disk or network, or give it more time."
            )

    def _stopped(self, steps: int, number: int) -> str:
        name = signal.Signals(number).name
        self.events.append({"step": steps, "event": "stopped", "signal": name})
        return name

    def _is_due(self, steps: int) -> bool:
        every = self._plan.checkpoint.every
        return every is not None and steps % every == 0

    def save(self, steps: int, rank: TrainingRank) -> None:
        """Saves what the ranks have after so many steps, then removes what is more than `checkpoint.keep`. It is on the
        disk when this returns."""
        self.save_pieces(steps, pieces_of(rank))

    def save_pieces(self, steps: int, pieces: Sequence[Piece]) -> None:
        """`save`, of any tensors."""
        self.begin(steps, pieces, snapshot=False)
        self.finish()

    def begin(self, steps: int, pieces: Sequence[Piece], *, snapshot: bool) -> None:
        """Begins to save, after the checkpoint before it is on the disk. Pieces may change from now on where there is a
        `snapshot` of them, else when `finish` has returned. Raises as `finish` does, and `ValueError` when the pieces
        of a tensor overlap or leave parts out."""
        self.finish()
        folder = self._storage.staging(steps)
        share = self._share = share_of(pieces, self._world, self._device, self._share)
        copied: Moment = None
        if snapshot:
            pieces, copied = self._snapshots.of(share.pieces)
            share = replace(share, pieces=pieces)

        def write() -> dict[str, Any]:
            if copied is not None:
                copied.synchronize()  # the host's, in this thread
            folder.mkdir(exist_ok=True)
            if self._world.rank == 0:
                write_text(folder / STATE_FILE, json.dumps(self._state(steps), indent=1) + "\n")
            written = self._frames.write(folder, share)
            if written is None:
                written = write_share(folder, share)
                if snapshot:  # more will come
                    self._frames.learn(folder, share, written)
            self._storage.upload_files(steps, written["files"])
            return written

        task = Task(self._lane, write)
        self._pending = PendingSave(steps, folder, self._storage.place(steps), share, task)

    def finish(self) -> None:
        """Returns when what is on its way is on the disk. Raises on every rank `OSError` with the file that could not
        be written, or what else went wrong on any of them."""
        while self._pending is not None:
            pending = self._pending
            limit_s = self._plan.checkpoint.timeout_s - pending.task.elapsed_s
            run_on_all(self._world, self._device, partial(pending.task.wait, limit_s), watch=self._watch, name="save")
            states = self._states()
            self._check_in_time(states)
            if all(state == DONE for state in states):
                self._advance()

    def _advance(self) -> None:
        """The next part of what is on its way, when every rank has done the one before."""
        pending, self._pending = self._pending, None
        assert pending is not None, "something is done"
        answers = gather_values(self._world, pending.task.answer, self._device)
        if errors := [f"rank {rank}: {each['error']}" for rank, each in enumerate(answers) if "error" in each]:
            folder = self._plan.checkpoint.folder
            before = "there is none before it" if self.newest is None else f"--resume goes on from {self.newest}"
            raise OSError(
                f"the checkpoint after {pending.steps} steps was not saved: {'; '.join(errors)}. See to it that "
                f"{folder} can be written to; {before}"
            )
        rest = pending.rest
        if rest is None:
            written = [each["value"] for each in answers]
            check_written(pending.partial, pending.share, written)
            finish = partial(finish_folder, pending.partial, pending.share, written)
            rest = self._storage.rest(pending.steps, written, finish)
        if (work := next(rest, None)) is not None:
            self._pending = replace(pending, task=Task(self._lane, work), rest=rest)
            return
        self.newest = pending.path
        self.events.append({"step": pending.steps, "event": "saved", "path": str(pending.path)})

    @property
    def _lane(self) -> str:
        return f"rank {self._world.ranks[self._world.rank]} lane save"

    def _state(self, steps: int) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT,
            "steps": steps,
            "samples": samples_before(self._plan.batch, steps),
            "text": self._text,
            "problem": problem_of(self._plan),
            "numerics": recorded_numerics(self._plan, environment(self._device)).to_json(),
        }


def agreed_place(plan: AnyPlan, place: str | None, world: Group, device: torch.device) -> str | None:
    """The checkpoint that all ranks of `world` go on from, of what each found on its host. Hosts may see a shared
    folder differently for a while, so rank 0 decides; of their own folders (`checkpoint.copies`) one may be gone."""
    found = gather_values(world, place, device)
    if plan.checkpoint.copies is None:
        return found[0]
    return next((each for each in found if each is not None), None)


def _text_words(text: Mapping[str, Any]) -> str:
    """What a checkpoint has recorded of the data (`Corpus.record`)."""
    size = f"token files of {text['tokens']} tokens" if "tokens" in text else f"a text of {text.get('bytes')} bytes"
    return f"{size} with SHA-256 {str(text.get('sha256'))[:12]}..."
