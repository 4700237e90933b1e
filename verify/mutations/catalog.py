"""All mutants, by subject, and which of them somebody asks for."""

from __future__ import annotations

from importlib import import_module

from ...core.base.errors import PlanError, did_you_mean
from .mutant import Mutant

SUBJECTS = (
    "accumulation",
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
    "more",
    "norm",
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

MUTANTS: tuple[Mutant, ...] = tuple(mutant for table in TABLES for mutant in table.MUTANTS)


def chosen(only: str | None) -> tuple[Mutant, ...]:
    """The mutants that `--only ID,ID` names, an entry of the catalog with all its forms; without it all. Raises `PlanError` for an id that
    there is not."""
    if only is None:
        return MUTANTS
    known = {name for mutant in MUTANTS for name in (mutant.id, mutant.bug)}
    asked = [each.strip() for each in only.split(",")]
    for each in asked:
        if each not in known:
            raise PlanError(f"--only {only}: no mutant is called {each!r}{did_you_mean(each, known)}")
    return tuple(mutant for mutant in MUTANTS if mutant.id in asked or mutant.bug in asked)
