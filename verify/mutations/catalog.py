"""All mutants, by subject, and which of them somebody asks for."""

from __future__ import annotations

from ...core.errors import PlanError, did_you_mean
from . import (
    mutants_accumulation,
    mutants_checkpoint,
    mutants_context,
    mutants_copies,
    mutants_data,
    mutants_experts,
    mutants_export,
    mutants_hangs,
    mutants_lifetimes,
    mutants_loss,
    mutants_more,
    mutants_norm,
    mutants_parameters,
    mutants_precision,
    mutants_random,
    mutants_reshard,
    mutants_router,
    mutants_scale,
    mutants_tensor,
)
from .mutant import Mutant

TABLES = (
    mutants_accumulation,
    mutants_checkpoint,
    mutants_context,
    mutants_copies,
    mutants_data,
    mutants_experts,
    mutants_export,
    mutants_hangs,
    mutants_lifetimes,
    mutants_loss,
    mutants_more,
    mutants_norm,
    mutants_parameters,
    mutants_precision,
    mutants_random,
    mutants_reshard,
    mutants_router,
    mutants_scale,
    mutants_tensor,
)

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
