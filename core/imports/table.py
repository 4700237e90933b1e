"""Settings of somebody else's program as a table, and a sheet on which a file's settings are accounted for by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base.bounds import shown
from ..base.errors import did_you_mean
from ..base.findings import Location
from ..plan.toml import Given, Values
from .account import Imported, Setting, Status
from .written import NoLiteral, Written, written_text

Kind = type | tuple[type, ...] | None


@dataclass(frozen=True)
class Row:
    """One setting of the program: its name, what becomes of it, the plan's key, why, the value that an unsaid one has,
    the Python types that its value may have (None: any), and its legal values where they are few.

    `plain` are values with which the setting changes nothing: whatever its status, such a one has no effect, because of
    `plain_why`.
    `same` is true where the plan's key takes the value as it is: such a row is read, and written, without more.
    """

    flag: str
    status: Status
    key: str | None = None
    why: str = ""
    default: Any = None
    kind: Kind = None
    choices: tuple[str, ...] = ()
    same: bool = False
    plain: tuple[Any, ...] | None = None
    plain_why: str = "it is off"


def same(flag: str, key: str, default: Any, kind: Kind) -> Row:
    """A setting whose value is that of one key of the plan."""
    return Row(flag, "mapped", key, default=default, kind=kind, same=True)


def quiet(section: str, names: str, why: str, status: Status = "no-effect") -> tuple[Row, ...]:
    """Settings of a section that become the same for the same reason."""
    return tuple(Row(f"{section}.{name}" if section else name, status, why=why) for name in names.split())


def unless(section: str, values: Mapping[str, Any], why: str, status: Status = "not-modelled") -> tuple[Row, ...]:
    """Settings of a section that have no effect with the given value, or null, and become something with another."""
    return tuple(Row(f"{section}.{name}", status, why=why, plain=(value, None)) for name, value in values.items())


@dataclass
class Sheet:
    """A file's settings by a table of rows. `spellings` are other names of settings -> the name in the table. With
    `takes_unknown_off` a setting that the table lacks is let pass where it is false or null: files that programs dump
    have every setting of their release.

    Each written setting has a row or is refused. Functions that know what several settings mean together ask for their
    `value`, `put` keys of the plan, and `say` what became of a setting where the table's word is not the last.
    """

    table: Mapping[str, Row]
    written: Iterable[Written]
    source: str
    framework: str
    spellings: Mapping[str, str] = field(default_factory=dict)
    takes_unknown_off: bool = False

    def __post_init__(self) -> None:
        self.values: Values = {}
        self.assumed: list[str] = []
        self._given: dict[str, Written] = {}
        self._settings: dict[str, Setting] = {}
        self._unsaid: dict[str, Setting] = {}
        for each in self.written:
            self._account(each)

    def _account(self, each: Written) -> None:
        name = self.spellings.get(each.flag, each.flag)
        row = self.table.get(name) or self._row_of_section(name)
        setting = Setting(each.flag, written_text(each.value), each.line, "refused")
        if row is None and self.takes_unknown_off and each.value in (None, False):
            setting = replace(setting, status="not-modelled")
            why = "this setting is not known; it is off"
        elif row is None and each.value == {} and any(flag.startswith(f"{name}.") for flag in self.table):
            setting, why = replace(setting, status="no-effect"), "a section without settings"
        elif row is None and isinstance(each.value, NoLiteral):
            why = "this is no setting of literals, and nothing is executed."
        elif row is None:
            why = self._unknown(each.flag)
        elif name in self._given and self._given[name].value != each.value:
            why = f"{self._given[name].flag} says the same thing in line {self._given[name].line}, and another value."
        elif complaint := complaint_about(row, each.value):
            why = complaint
        else:
            is_off = row.plain is not None and any(each.value == plain for plain in row.plain)
            status: Status = "no-effect" if is_off else row.status
            setting, why = replace(setting, status=status, key=row.key), row.plain_why if is_off else row.why
            self._given[name] = each
        self._settings[each.flag] = replace(setting, why=why)

    def _row_of_section(self, name: str) -> Row | None:
        """The row `section.*` of the innermost section that has one: what is in it becomes one thing."""
        while name := name.rpartition(".")[0]:
            if (row := self.table.get(f"{name}.*")) is not None:
                return row
        return None

    def is_written(self, *flags: str) -> bool:
        """Whether the file has one of these, with a value that is legal."""
        return any(flag in self._given for flag in flags)

    def value(self, flag: str) -> Any:
        """What the file says, else, and where it says null, the program's default."""
        written = self._given[flag].value if flag in self._given else None
        return self.table[flag].default if written is None else written

    def is_null(self, flag: str) -> bool:
        """Whether the file says null, none or the like, which here is not the default."""
        return flag in self._given and self._given[flag].value is None

    def spelled(self, flag: str) -> str:
        """The name under which the file has a setting; its usual one where the file does not."""
        return self._given[flag].flag if flag in self._given else flag

    def put(self, key: str, value: Any, *flags: str) -> None:
        """Gives a key of the plan a value that comes from these settings, the first written one being its place. One
        that the file leaves out counts with the program's default, and is listed without a line."""
        section, _, name = key.partition(".")
        first = next((self._given[flag] for flag in flags if flag in self._given), None)
        if first is None:
            origin, place = f"{self.source} (default of {self.framework})", Location(self.source, None)
        else:
            origin, place = f"{self.source}:{first.line}", Location(self.source, first.line)
        self.values.setdefault(section, {})[name] = Given(value, origin, place, Path(self.source).parent)
        for flag in flags:
            row = self.table[flag]
            if flag not in self._given and row.default is not None:
                self._unsaid[flag] = Setting(
                    flag, written_text(row.default), 0, "mapped", row.key, f"not said: the default of {self.framework}"
                )

    def put_same(self) -> None:
        """Gives every key of the plan that takes one setting's value as it is that value, said or not."""
        for row in self.table.values():
            if row.same and row.key is not None and self.value(row.flag) is not None:
                self.put(row.key, self.value(row.flag), row.flag)

    def say(self, flag: str, status: Status, why: str) -> None:
        """What became of a setting in this file, in place of what its row says."""
        spelled = self.spelled(flag)
        if flag in self._given:
            self._settings[spelled] = replace(self._settings[spelled], status=status, why=why)
        elif status == "refused" or flag in self._unsaid:
            row = self.table[flag]
            self._unsaid[flag] = Setting(flag, written_text(row.default), 0, status, row.key, why)

    def refuse(self, flag: str, why: str) -> None:
        """Refuses a setting of this file, or the default of one that it lacks."""
        self.say(flag, "refused", why)

    def lacks(self, flag: str, key: str | None, why: str) -> None:
        """Refuses the file because nothing says what a plan needs."""
        self._unsaid[flag] = Setting(flag, "", 0, "refused", key, why)

    def leave(self, each: Written, why: str) -> None:
        """Accounts for a setting whose value the file leaves to somebody else."""
        known = self.spellings.get(each.flag, each.flag)
        row = self.table.get(known) or self._row_of_section(known)
        setting = Setting(each.flag, written_text(each.value), each.line, "refused")
        if row is None:
            self._settings[each.flag] = replace(setting, why=self._unknown(each.flag))
        else:
            self._settings[each.flag] = replace(setting, status="no-effect", key=row.key, why=why)

    def _unknown(self, flag: str) -> str:
        known = (*self.table, *self.spellings)
        return f"{self.framework} has no such setting in the releases that are read{did_you_mean(flag, known)}"

    @property
    def is_refused(self) -> bool:
        """Whether anything is refused so far."""
        return any(each.status == "refused" for each in (*self._settings.values(), *self._unsaid.values()))

    def imported(self, name: str, version: str) -> Imported:
        """The account of the file: its settings in file order, then the defaults that count."""
        settings = (*self._settings.values(), *self._unsaid.values())
        return Imported(name, version, self.source, self.values, settings, tuple(self.assumed))


def complaint_about(row: Row, value: Any) -> str:
    """Why a value is none that this setting can have; empty for a legal one."""
    if value is None or (row.kind is None and not isinstance(value, NoLiteral)):
        return ""
    if isinstance(value, NoLiteral):
        return f"this is {shown(str(value))} and no literal, and nothing is executed." if row.status == "mapped" else ""
    assert row.kind is not None
    kinds = row.kind if isinstance(row.kind, tuple) else (row.kind,)
    is_kind = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if not is_kind and not (float in kinds and isinstance(value, int) and not isinstance(value, bool)):
        return f"this is {shown(value)}, and {row.flag} takes {' or '.join(_WORDS[kind] for kind in kinds)}."
    if row.choices and value not in row.choices:
        return f"this is none of {', '.join(row.choices)}{did_you_mean(str(value), row.choices)}"
    return ""


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "a table",
}


def index(*parts: Iterable[Row] | Row) -> dict[str, Row]:
    """Name -> row of a table that is written in parts."""
    rows = [row for part in parts for row in ((part,) if isinstance(part, Row) else part)]
    found = {row.flag: row for row in rows}
    assert len(found) == len(rows), "a setting has one row"
    return found
