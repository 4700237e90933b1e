"""The arguments of a training command as they are given."""

from __future__ import annotations

from dataclasses import dataclass, field

from .shell_sourced import Unread


@dataclass(frozen=True)
class Occurrence:
    """One flag as given: its name, how it is spelled here, its values, and where `unknown` is not empty why they (or
    whether it is given at all) are not known."""

    flag: str
    spelled: str
    values: tuple[str, ...]
    line: int
    unknown: str = ""

    @property
    def value(self) -> str:
        """Its values as written."""
        return " ".join(self.values)


@dataclass
class TrainingCommand:
    """A training command. `launcher` are the arguments before the program, `program` its name, and `num_devices` what
    the launcher takes, None where it is not known (`devices_unknown` says why). `unread` are the files that its script
    takes in and that are not read."""

    occurrences: list[Occurrence]
    program: str = ""
    program_line: int = 0
    launcher: list[Occurrence] = field(default_factory=list)
    num_devices: int | None = None
    devices_unknown: str = ""
    assumed: list[str] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
