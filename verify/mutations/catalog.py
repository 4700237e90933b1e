"""All mutants, by subject, and which of them somebody asks for."""

from __future__ import annotations

from importlib import import_module

from ...core.base.errors import PlanError, did_you_mean
from ..matrix.portions import WHOLE, Part, part_of, smallest_cover
from .mutant import Mutant, Stops

SUBJECTS = (
    "accumulation",
    "batches",
    "causes",
    "checkpoint",
    "context",
    "copies",
    "data",
    "evaluation",
    "experts",
    "export",
    "hangs",
    "lifetimes",
    "loss",
    "mistaken",
    "more",
    "norm",
    "optimizers",
    "parameters",
    "precision",
    "random",
    "reshard",
    "router",
    "scale",
    "tensor",
)
"""Each has a module of this package, `mutants_SUBJECT`, whose `MUTANTS` are its table."""

TABLES = tuple(import_module(f".mutants_{subject}", __package__) for subject in SUBJECTS)

_SUBJECT_OF = {mutant.id: subject for subject, table in zip(SUBJECTS, TABLES, strict=True) for mutant in table.MUTANTS}

MUTANTS: tuple[Mutant, ...] = tuple(mutant for table in TABLES for mutant in table.MUTANTS)


def chosen(only: str | None, *, sampled: bool = False, part: Part = WHOLE) -> tuple[Mutant, ...]:
    """The mutants that `--only ID,ID` names, an entry of the catalog with all its forms, without it all; of them the
    sample where one is asked for, and of that a part. Mutants of one plan are in one part, because they share its right
    run and its reference. Raises `PlanError` for an id that there is not."""
    found = _named(only)
    if sampled:
        found = tuple(smallest_cover(found, shows, _cost))
    problems = {mutant.id: (mutant.plan(), mutant.steps, mutant.scenario) for mutant in found} if part.of > 1 else {}
    return tuple(part_of(found, part, _cost, lambda mutant: problems.get(mutant.id)))


def shows(mutant: Mutant) -> frozenset[tuple[str, object]]:
    """What a sample has to show of every fault: the subject that is broken, the class that the verifier names and the
    phase in which it is first seen (or that the run stops), and what the ranks do meanwhile."""
    expected = mutant.expected
    seen = ("stops", "stops") if isinstance(expected, Stops) else (expected.kinds[0], expected.phase)
    return frozenset(
        {("subject", _SUBJECT_OF[mutant.id]), ("class", seen[0]), ("phase", seen[1]), ("scenario", mutant.scenario)}
    )


def _cost(mutant: Mutant) -> float:
    """Ranks that run, with one device: of one mutant the right run and the broken one take about equally long."""
    return mutant.plan().world_size + 1


def _named(only: str | None) -> tuple[Mutant, ...]:
    if only is None:
        return MUTANTS
    known = {name for mutant in MUTANTS for name in (mutant.id, mutant.bug)}
    asked = [each.strip() for each in only.split(",")]
    for each in asked:
        if each not in known:
            raise PlanError(f"--only {only}: no mutant is called {each!r}{did_you_mean(each, known)}")
    return tuple(mutant for mutant in MUTANTS if mutant.id in asked or mutant.bug in asked)
