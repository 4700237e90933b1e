"""`Finding`: one thing a check has to say."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from .names import printable

Severity = Literal["error", "warning", "info"]

DEGREES = ("tp", "cp", "pp", "dp", "ep", "etp")
"""Axes with a key of [layout]."""


@dataclass(frozen=True)
class Where:
    """A place in a run, as far as it is known: a rank (of a schedule its row, a pipeline rank), the token of an action
    (of another stack words for it) and its microbatch, the canonical name of a tensor.

    `str` is the text for people: `words` where they say more, else the parts.

    >>> str(Where(3, "1F4", "layers.0.mlp.down", microbatch=4)), str(Where(rank=6, words="ranks 6, 7"))
    ('rank 3, 1F4, layers.0.mlp.down', 'ranks 6, 7')
    """

    rank: int | None = None
    action: str | None = None
    tensor: str | None = None
    microbatch: int | None = None
    words: str = ""

    def __str__(self) -> str:
        rank = None if self.rank is None else f"rank {self.rank}"
        return self.words or ", ".join(part for part in (rank, self.action, self.tensor) if part is not None)


@dataclass(frozen=True)
class Finding:
    """One result of a rule: what is wrong, where, and what to do.

    `where` is the text of a `Where`, whose fields follow; `axis` is what separates right ranks from wrong ones (`tp`,
    `dp`, `edp`), `key` the key of a plan that the finding is about (`layout.tp`). All are None where unknown.
    """

    rule: str
    severity: Severity
    where: str
    what: str
    hint: str = ""
    rank: int | None = None
    action: str | None = None
    axis: str | None = None
    tensor: str | None = None
    microbatch: int | None = None
    key: str | None = None

    @classmethod
    def at(
        cls,
        rule: str,
        severity: Severity,
        where: Where,
        what: str,
        hint: str = "",
        *,
        axis: str | None = None,
        key: str | None = None,
    ) -> Finding:
        """A finding at a place that is data; about the degree of its axis where no other key is given."""
        if key is None and axis in DEGREES:
            key = f"layout.{axis}"
        place = (where.rank, where.action, axis, where.tensor, where.microbatch)
        return cls(rule, severity, str(where), what, hint, *place, key)

    def __str__(self) -> str:
        hint = f"\n    {self.hint}" if self.hint else ""
        return f"{self.severity}: {self.rule} at {self.where}: {self.what}{hint}"

    def to_dict(self) -> dict[str, str | int | None]:
        """The JSON form of the interface: all fields by their names, None (null) where unknown."""
        return asdict(self)


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
