"""Values with [[modules]] as given -> the sections of a plan, or one `PlanError` with everything that is
wrong, in file order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..base.errors import did_you_mean
from ..base.names import one_line
from .build import Draft, key_complaint
from .keys import MODULE_KEYS
from .module import OWN_SECTIONS, Module
from .rules import BrokenRule, broken_rules
from .toml import Given, Values, module_section, num_modules

_KEYS = {key.name: key for key in MODULE_KEYS}


def modular_sections(values: Values, source: str) -> dict[str, Any]:
    """Section -> noun of the plan of several models that `values` describe; `modules` is a tuple of `Module`.

    Raises `PlanError` with all problems, each opened by where its value was given.
    """
    numbers = range(num_modules(values))
    shared = {
        section: table
        for section, table in values.items()
        if section.partition(".")[0] not in ("modules", *OWN_SECTIONS)
    }
    tables = [_ModuleTable(values.get(module_section(number), {}), number) for number in numbers]
    world_size = max((table.last_rank for table in tables if table.last_rank is not None), default=0) + 1
    shared["cluster"] = {"num_devices": Given(world_size, "ranks of the modules"), **shared.get("cluster", {})}
    whole = Draft({**shared, **{section: values[section] for section in OWN_SECTIONS if section in values}}, source)
    for section in OWN_SECTIONS:
        if section in values:
            first = next(iter(values[section].values()), None)
            sentence = f"[{section}] stands next to [[modules]], of which each has its own. Write [modules.{section}]."
            whole.problem_at(first, None, sentence)
    nouns = whole.nouns(without=OWN_SECTIONS)
    modules: list[Module] = []
    for number, table in zip(numbers, tables, strict=True):
        draft = Draft({**shared, **_own(values, number, table)}, source)
        for name, sentence in table.problems(earlier=tables[:number]):
            draft.problem_at(table.given.get(name), f"modules.{name}", sentence)
        made = draft.nouns()
        if "model" in made and "layout" in made and table.is_complete:
            assert table.first_rank is not None and table.last_rank is not None
            modules.append(
                Module(
                    table.name,
                    table.first_rank,
                    table.last_rank,
                    made["model"],
                    made["layout"],
                    table.inputs(tables[:number]),
                )
            )
        draft.report_broken_rules({section: noun for section, noun in made.items() if section != "cluster"})
        named = f'module "{table.name}"' if table.name else f"module {number + 1}"
        known = {problem for _, problem in whole.problems}
        whole.problems += [(line, problem.of(named)) for line, problem in draft.problems if problem not in known]
    if len(modules) == len(numbers):
        for broken in broken_rules({**nouns, "modules": tuple(modules)}):
            if not whole.bad.intersection(broken.rule.keys):
                key = whole.first_given(broken.rule.keys)
                whole.problem_at(_place(broken, tables) or whole.find(key), key, broken.sentence)
    whole.raise_problems()
    return {**nouns, "modules": tuple(modules)}


class _ModuleTable:
    """What one [[modules]] says of its own."""

    def __init__(self, given: Mapping[str, Given], number: int):
        self.given, self.number = given, number
        name = given["name"].value if "name" in given else None
        self.name = one_line(name) if isinstance(name, str) else ""
        ranks = str(given["ranks"].value) if "ranks" in given else ""
        match = re.fullmatch(r"\s*(\d{1,7})\s*(?:-\s*(\d{1,7})\s*)?", ranks)
        self.first_rank = int(match[1]) if match else None
        self.last_rank = int(match[2] or match[1]) if match else None

    @property
    def is_complete(self) -> bool:
        """True when it has a name and ranks that can be read."""
        return bool(self.name) and self.first_rank is not None and self.num_ranks > 0

    @property
    def num_ranks(self) -> int:
        """Ranks of its range; 0 where that is missing or ends before it begins."""
        return 0 if self.first_rank is None or self.last_rank is None else max(0, self.last_rank - self.first_rank + 1)

    def inputs(self, earlier: list[_ModuleTable]) -> tuple[str, ...]:
        """The modules that feed it: by default the one before, and none for the first."""
        if "inputs" in self.given:
            value = self.given["inputs"].value
            return tuple(name for name in value if isinstance(name, str)) if isinstance(value, list) else ()
        return (earlier[-1].name,) if earlier else ()

    def problems(self, *, earlier: list[_ModuleTable]) -> list[tuple[str, str]]:
        """The key and a sentence of everything that is wrong with these keys alone."""
        found = []
        for name, given in self.given.items():
            if name not in _KEYS:
                known = [*_KEYS, *OWN_SECTIONS]
                found.append(
                    (
                        name,
                        (f"unknown key {name!r} in [[modules]]{did_you_mean(name, known)} Known: {', '.join(known)}."),
                    )
                )
            elif not (name == "inputs" and given.value == []) and (
                complaint := key_complaint(_KEYS[name], given.value)
            ):
                found.append((name, complaint))
            elif name == "ranks" and not self.num_ranks:
                found.append(
                    (
                        name,
                        (
                            f'ranks = "{given.value}" is no range of ranks. Write the first and the last, as in '
                            '"0-3", or one rank.'
                        ),
                    )
                )
        for name, form in (("name", 'name = "encoder"'), ("ranks", 'ranks = "0-3"')):
            if name not in self.given:
                found.append((name, f"it lacks {name}. Give it, as in {form}."))
        return found


def _place(broken: BrokenRule, tables: Sequence[_ModuleTable]) -> Given | None:
    """Where a module that a sentence names gives what a rule of [[modules]] is about; None for another rule."""
    keys = [name for section, _, name in (key.partition(".") for key in broken.rule.keys) if section == "modules"]
    named = [table for table in tables if f'"{table.name}"' in broken.sentence]
    return (
        next((table.given[key] for table in named for key in (*keys, "name") if key in table.given), None)
        if keys
        else None
    )


def _own(values: Values, number: int, table: _ModuleTable) -> Values:
    """The sections of a module: its model and layout, and as many devices as it has ranks."""
    own = {section: values.get(module_section(number, section), {}) for section in OWN_SECTIONS}
    if not table.num_ranks:
        return own
    ranks = table.given["ranks"]
    return {**own, "cluster": {"num_devices": Given(table.num_ranks, ranks.origin, ranks.place)}}
