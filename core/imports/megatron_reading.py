"""One training command while it is being read: values of flags, keys that are filled, and what became of each flag."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..base.errors import did_you_mean
from ..base.findings import NOWHERE, Location
from ..plan.keys import key_named
from ..plan.toml import Given, Values
from .account import Setting, Status
from .megatron_flags import ALIASES, RELEASES, Direct, Flag, all_flags
from .megatron_occurrences import Occurrence, TrainingCommand
from .shell_sourced import Unread

HINT = "Give --variable {name}=VALUE."
_NAME = re.compile(r"\$\{?([A-Za-z_]\w*|\d)")


class Reading:
    """The flags of a command by name, the last of each. Functions ask for values (`integer`, `text`, `given`), fill
    keys (`put`) and say what became of a flag (`say`); `finish` accounts for the others."""

    def __init__(self, command: TrainingCommand, source: str, version: str | None):
        self.source = source
        self.version = version
        self.command = command
        self.flags = all_flags()
        self.values: Values = {}
        self.assumed = list(command.assumed)
        self.last: dict[str, Occurrence] = {}
        self._said: dict[str, Setting] = {}
        self._defaults: list[Setting] = []
        self._earlier: list[Occurrence] = []
        for each in command.occurrences:
            name = ALIASES.get(each.flag, each.flag)
            if name in self.last:
                self._earlier.append(self.last[name])
            self.last[name] = each

    # -- values ----------------------------------------------------------------------------------------------------

    def is_written(self, flag: str) -> bool:
        """True where the flag is in the command, known or not."""
        return flag in self.last

    def given(self, flag: str) -> bool:
        """True where the flag is given; refuses one of which that is not known."""
        return flag in self.last and not self._is_unknown(flag)

    def value(self, section: str, key: str) -> Any:
        """What a key of the plan has been given so far; None where that is nothing."""
        given = self.values.get(section, {}).get(key)
        return None if given is None else given.value

    def text(self, flag: str) -> str | None:
        """The value of a flag; None where it is not given, or not known, which is refused."""
        if not self.given(flag):
            return None
        occurrence = self.last[flag]
        if not occurrence.values:
            self.say(flag, "refused", "it has no value")
            return None
        return occurrence.value

    def integer(self, flag: str) -> int | None:
        """The value as a whole number; refuses what is none."""
        return self._number(flag, int, "a whole number")

    def number(self, flag: str) -> float | None:
        """The value as a number; refuses what is none."""
        return self._number(flag, float, "a number")

    def _number(self, flag: str, kind: Any, described: str) -> Any:
        if (text := self.text(flag)) is None:
            return None
        try:
            return kind(text.replace("_", "") if kind is int else text)
        except (ValueError, OverflowError):
            self.say(flag, "refused", f"this is not {described}")
            return None

    def _is_unknown(self, flag: str) -> bool:
        occurrence = self.last[flag]
        if not occurrence.unknown:
            return False
        self.say(flag, "refused", unknown_value(occurrence))
        return True

    # -- what becomes of them --------------------------------------------------------------------------------------

    def put(self, key: str, value: Any, *flags: str, why: str = "") -> None:
        """Fills a key. `flags` are those that say it; where none is given, Megatron's default does."""
        section, _, name = key.partition(".")
        written = [flag for flag in flags if flag in self.last and not self.last[flag].unknown]
        if written:
            line = self.last[written[0]].line
            given = Given(value, f"{self.source}:{line}", Location(self.source, line))
        else:
            given = Given(value, f"{self.source} (Megatron's default)", NOWHERE)
        self.values.setdefault(section, {})[name] = given
        for flag in written:
            before = self._said.get(flag)
            keys = dict.fromkeys([*((before.key or "").split(", ") if before and before.key else []), key])
            self.say(flag, "mapped", why or (before.why if before else ""), ", ".join(keys))
        if not written and flags and value != key_named(key).default:
            self._defaults.append(Setting(flags[0], _shown(value), 0, "mapped", key, why or "the default of Megatron"))

    def put_row(self, row: Direct) -> Any:
        """Fills the key of one row from its flag or Megatron's default; the value, None where there is none."""
        value: Any
        if row.kind in ("on", "off"):
            is_given = self.given(row.flag)
            if not is_given and (row.default is None or self.is_written(row.flag)):
                return None
            value = (row.kind == "on") if is_given else row.default
        else:
            value = self.integer(row.flag) if row.kind == "int" else self.number(row.flag)
            if value is None:
                if row.default is None or self.is_written(row.flag):
                    return None
                value = row.default
        self.put(row.key, value, row.flag)
        return value

    def say(self, flag: str, status: Status, why: str, key: str | None = None) -> None:
        """Says what became of a flag that is given."""
        if flag in self.last:
            each = self.last[flag]
            self._said[flag] = Setting(each.spelled, each.value, each.line, status, key, why)

    def assume(self, sentence: str) -> None:
        """Adds what the file leaves open."""
        self.assumed.append(sentence)

    def refuse(self, flag: str, value: str, line: int, why: str, key: str | None = None) -> None:
        """Refuses what is no flag of the command itself."""
        self._defaults.append(Setting(flag, value, line, "refused", key, why))

    def require(self, flag: str, key: str) -> None:
        """Refuses a command without a flag that Megatron needs, and says where else it may be."""
        if self.is_written(flag):
            return
        unread = next(iter(self.command.unread), None)
        elsewhere = f"; line {unread.line} takes in {unread.written}, which is not read" if unread else ""
        self.refuse(flag, "", 0, f"it is not given, and Megatron needs it{elsewhere}", key)

    def drop_defaults(self, *sections: str) -> None:
        """Takes back what only Megatron's defaults filled in some sections: another stack has others."""
        for setting in [each for each in self._defaults if each.key and each.key.partition(".")[0] in sections]:
            if setting.status == "mapped":
                self._defaults.remove(setting)
                section, _, name = (setting.key or "").partition(".")
                self.values.get(section, {}).pop(name, None)

    def finish(self) -> tuple[Setting, ...]:
        """What became of every flag, in the order of the lines."""
        settings = [*self._defaults, *_taken_in(self.command.unread)]
        for each in self._earlier:
            name = ALIASES.get(each.flag, each.flag)
            why = f"it is given again on line {self.last[name].line}, which counts"
            settings.append(Setting(each.spelled, each.value, each.line, "no-effect", None, why))
        for name in self.last:
            settings.append(self._said.get(name) or self._by_table(name))
        return tuple(sorted(settings, key=lambda setting: setting.line))

    def _by_table(self, name: str) -> Setting:
        each = self.last[name]
        status, why = self._status(name, each)
        return Setting(each.spelled, each.value, each.line, status, None, why)

    def _status(self, name: str, each: Occurrence) -> tuple[Status, str]:
        flag = self.flags.get(name)
        if flag is None:
            return "refused", self._strange(each)
        if self.version is not None and not in_release(flag, self.version):
            return "refused", f"Megatron {self.version} does not have it, only {flag.first} to {flag.last}"
        if flag.status == "mapped":
            return "no-effect", "nothing else that is given makes it count"
        if flag.status == "no-effect":
            return "no-effect", flag.why
        if not each.unknown and flag.default is not None and _same(each.value, flag.default):
            return "no-effect", "this is Megatron's default, without which a plan is the same"
        if flag.status == "refused" and each.unknown:
            return "refused", f"{flag.why}; {unknown_value(each)}"
        return flag.status, flag.why

    def _strange(self, each: Occurrence) -> str:
        if each.flag.startswith("-") and not each.unknown.startswith("$"):
            nearby = [name for name in self.flags if name[:5] == each.flag[:5]]  # all of them take long to compare
            near = did_you_mean(each.flag, nearby)
            return "no release of Megatron-LM in the table, nor a fork in it, has this argument" + near
        if each.unknown:
            names = _NAME.findall(each.flag)
            hint = f" Give --variable {names[0]}='', or what it holds." if names else ""
            return f"it may hold any arguments: {each.unknown}.{hint}"
        if not each.flag.strip():
            return "a backslash with a blank behind it ends the command here, not the line"
        return "no argument takes it as a value"


def _taken_in(files: Iterable[Unread]) -> Iterator[Setting]:
    """The files of a script that it takes in and that are not read. Those that lie elsewhere, mostly the environment of
    programs, are only said: variables that are theirs alone are refused where they decide something."""
    for each in files:
        status: Status = "refused" if each.is_needed else "not-modelled"
        yield Setting("source", each.written, each.line, status, None, f"{each.why}; what it sets is not known")


def unknown_value(each: Occurrence) -> str:
    """Why a value is not known, and what helps."""
    names = _NAME.findall(each.unknown) or _NAME.findall(each.value)
    return f"{each.unknown}. {HINT.format(name=names[0])}" if names else f"{each.unknown}"


def in_release(flag: Flag, version: str) -> bool:
    """True where a release has a flag."""
    return RELEASES.index(flag.first) <= RELEASES.index(version) <= RELEASES.index(flag.last)


def detected_version(flags: Mapping[str, Flag], given: Mapping[str, Occurrence]) -> tuple[str, str]:
    """The releases that have all of these flags, in words, and a sentence where there is none."""
    known = [flags[name] for name in given if name in flags]
    newest = max(known, key=lambda flag: RELEASES.index(flag.first), default=None)
    oldest = min(known, key=lambda flag: RELEASES.index(flag.last), default=None)
    if newest is None or oldest is None:
        return "", ""
    if RELEASES.index(newest.first) > RELEASES.index(oldest.last):
        return "", (
            f"{newest.name} is of release {newest.first} and later, {oldest.name} of {oldest.last} and before: no one "
            "release has both. Name it by --from megatron:VERSION."
        )
    if oldest.last == RELEASES[-1]:
        return ("" if newest.first == RELEASES[0] else f"{newest.first} or later"), ""
    return (newest.first if newest.first == oldest.last else f"{newest.first} to {oldest.last}"), ""


def _same(value: str, default: str) -> bool:
    try:
        return float(value) == float(default)
    except ValueError:
        return value == default


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
