"""What an imported file says, setting by setting, and what became of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..base.errors import PlanError, Problem
from ..base.findings import Location
from ..plan.toml import Given, Values

Status = Literal["mapped", "no-effect", "not-modelled", "refused"]
"""What became of a setting. `mapped`: it is a key of the plan. `no-effect`: bits, time and memory of a step do not
depend on it. `not-modelled`: one of them does, and the plan has no key for it. `refused`: without its meaning the plan
would be another run."""

STATUSES: tuple[Status, ...] = ("mapped", "no-effect", "not-modelled", "refused")


@dataclass(frozen=True)
class Setting:
    """One setting of the file: how it is spelled there (`--tensor-model-parallel-size`, `training.seq_len`), its value
    as written, its line (0: the file does not have it, it is a default of the framework), and what became of it.

    `key` is the plan's (`layout.tp`; several are joined by commas), None where it has none. `why` is a sentence, empty
    for a plain `mapped`.
    """

    flag: str
    value: str
    line: int
    status: Status
    key: str | None = None
    why: str = ""

    def report(self) -> dict[str, Any]:
        """The JSON form."""
        return {name: getattr(self, name) for name in ("flag", "value", "line", "status", "key", "why")}


@dataclass(frozen=True)
class Request:
    """What a reader is given: the file's text, its name, and what the command line adds.

    `num_devices` is that of --devices, `model` the keys of [model] that options give in the place of the file's,
    `variables` what --variable gives the file's unset variables, and `version` the
    framework's version where the user names one.
    """

    text: str
    source: str
    num_devices: int | None = None
    model: Mapping[str, Given] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    version: str | None = None


@dataclass(frozen=True)
class Imported:
    """What a reader made of a file: the plan's values, each with the line it comes from, and all settings.

    `version` is the framework's as far as the file tells, empty where it does not. `assumed` are sentences on what the
    file leaves open and a plan needs, such as its hardware.
    """

    format: str
    version: str
    source: str
    values: Values
    settings: tuple[Setting, ...]
    assumed: tuple[str, ...] = ()

    def of_status(self, status: Status) -> Iterator[Setting]:
        """The settings of which this became."""
        return (each for each in self.settings if each.status == status)

    def raise_refused(self) -> None:
        """Raises `PlanError` with every refused setting and its line."""
        if refused := [self._problem(each) for each in self.of_status("refused")]:
            raise PlanError(refused)

    def _problem(self, setting: Setting) -> Problem:
        origin = f"{self.source}:{setting.line}" if setting.line else self.source
        written = f"{setting.flag} {setting.value}".strip()
        return Problem(
            f"{written}: {setting.why}", setting.key, Location(self.source, setting.line or None), origin=origin
        )

    def report(self) -> dict[str, Any]:
        """The JSON form, but for the plan's text."""
        return {
            "format": self.format,
            "version": self.version,
            "assumed": list(self.assumed),
            "flags": [each.report() for each in self.settings],
        }
