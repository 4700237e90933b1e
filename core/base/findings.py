"""`Finding`: one thing a check has to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .names import printable

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One result of a rule: what is wrong, where, and what to do.

    `where` is text that names rank, action and tensor as far as they are known, e.g. `rank 3, 1F4, layers.0.mlp.down`.
    """

    rule: str
    severity: Severity
    where: str
    what: str
    hint: str = ""

    def __str__(self) -> str:
        hint = f"\n    {self.hint}" if self.hint else ""
        return f"{self.severity}: {self.rule} at {self.where}: {self.what}{hint}"

    def to_dict(self) -> dict[str, str]:
        """The JSON form of the interface: `rule`, `severity`, `where`, `what`, `hint`."""
        return {"rule": self.rule, "severity": self.severity, "where": self.where, "what": self.what, "hint": self.hint}


@dataclass(frozen=True)
class Location:
    """Where a finding belongs in what the user wrote: a file, as the user named it, and a line, counted
    from 1; None where unknown."""

    file: str | None = None
    line: int | None = None


NOWHERE = Location()


class ProofFailed(AssertionError):
    """A proof that a test asserts does not hold: the message is for people, `findings` are its parts with the
    places they belong to."""

    def __init__(self, text: str, findings: tuple[tuple[Finding, Location], ...]):
        super().__init__(printable(text))
        self.findings = findings


def has_errors(findings: list[Finding]) -> bool:
    """True when any finding has severity `error` (exit code 1)."""
    return any(finding.severity == "error" for finding in findings)
