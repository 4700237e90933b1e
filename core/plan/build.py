"""Values as given -> the sections of a plan, or one `PlanError` with everything that is wrong, in file order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..base.bounds import LONGEST_NAME, LONGEST_TEXT, beyond, shown, text_complaint
from ..base.errors import PlanError, Problem, ShardproofError, did_you_mean
from ..base.files import read_text
from ..base.findings import NOWHERE
from ..base.names import one_line
from ..base.option import limit_complaint
from ..base.units import SIZE_RULE, size_of
from ..base.urls import is_url
from ..layout.layout import Layout
from ..machine.cluster import ClusterSpec
from ..machine.cluster_presets import cluster_preset
from ..model.huggingface import read_config
from ..model.model import ModelSpec
from ..model.model_presets import model_preset
from .data_names import data_from
from .keys import KEYS, NOUNS, Key, keys_of
from .optimizer import Optimizer
from .parameter_groups import group_complaints, group_of
from .rules import broken_rules
from .toml import Given, Values, num_modules, read_values

DEFAULT_CLUSTER = "this-host"
"""The preset of a plan that says nothing about its devices but their number."""

SET_IN_PLAN = "set in the plan"
"""The source of a cluster number that a plan overrides."""


def plan_sections(values: Values, source: str) -> dict[str, Any]:
    """Section -> noun of the plan that `values` describe, all sections; the rules have been asked about them.

    Raises `PlanError` with all problems, each opened by where its value was given.
    """
    refuse_modules(values, source)
    draft = Draft(values, source)
    nouns = draft.nouns()
    draft.report_broken_rules(nouns)
    draft.raise_problems()
    return nouns


def refuse_modules(values: Values, source: str) -> None:
    """Raises `PlanError` for a plan of several models, for verbs that take one."""
    if num_modules(values):
        raise PlanError(
            f"{source}: here [[modules]] have no meaning. They are taken by fit, simulate, verify, draw and train."
        )


class Draft:
    """A plan under construction: values that passed their own key's checks, and the problems found so far."""

    def __init__(self, values: Values, source: str):
        self.given = values
        self.source = source
        self.problems: list[tuple[int, Problem]] = []
        self.bad: set[str] = set()
        self.valid: dict[str, dict[str, Any]] = {section: self._valid(section) for section in NOUNS}
        for section in values:
            if section not in NOUNS:
                self._unknown_section(section, values[section])

    def nouns(self, *, without: Collection[str] = ()) -> dict[str, Any]:
        """Section -> noun, without the sections that have problems of their own, and without model and layout
        where those are reported."""
        own = {"model": self.model, "layout": self.layout}
        found: dict[str, Any] = {section: make() for section, make in own.items() if section not in without}
        found |= {section: self._plain(section) for section in NOUNS if section not in _COMPOSED}
        found["cluster"] = self.cluster(found.get("layout"))
        return {section: noun for section, noun in found.items() if noun is not None}

    def model(self) -> ModelSpec | None:
        """The model of a preset, a config.json or the fields themselves; fields override."""
        fields = dict(self.valid["model"])
        preset, config = fields.pop("preset", None), fields.pop("config", None)
        if preset is not None and config is not None:
            self._problem("model.config", "model.preset and model.config both describe a model. Give one of them.")
            return None
        try:
            if preset is not None:
                return dataclasses.replace(model_preset(preset), **fields)
            if config is not None:
                return dataclasses.replace(read_config(config), **fields)
        except (ShardproofError, OSError) as error:
            self._failed(error, "model.preset" if preset is not None else "model.config")
            return None
        if "sequence" in self.valid["batch"]:
            fields.setdefault("max_positions", self.valid["batch"]["sequence"])
        if "num_heads" in fields:
            fields.setdefault("num_kv_heads", fields["num_heads"])
            if fields.get("kv_lora_rank"):
                fields.setdefault(
                    "head_dim", max(1, fields.get("qk_nope_head_dim", 0) + fields.get("qk_rope_head_dim", 0))
                )
            elif "hidden_size" in fields:
                fields.setdefault("head_dim", max(1, fields["hidden_size"] // fields["num_heads"]))
        fields.setdefault("name", "custom")
        return self._noun("model", ModelSpec, fields, "or model.preset, or model.config")

    def cluster(self, layout: Layout | None) -> ClusterSpec | None:
        """The cluster of a preset, a cluster file or the fields themselves; fields override and say so in `sources`."""
        self._merge_cluster_file()
        fields = dict(self.valid["cluster"])
        preset = fields.pop("preset", None if fields.keys() - _OF_ANY_DEVICE else DEFAULT_CLUSTER)
        if self.bad & {"cluster.num_devices", "cluster.file"} or ("num_devices" not in fields and layout is None):
            return None
        num_devices = fields.pop("num_devices", layout.world_size if layout is not None else 0)
        if preset is None:
            fields.setdefault("name", "custom")
            return self._noun(
                "cluster", ClusterSpec, {"num_devices": num_devices, **fields}, ("or cluster.preset, or cluster.file")
            )
        try:
            base = cluster_preset(preset, num_devices)
            own_sources = fields.pop("sources", {})
            sources = {**base.sources, **dict.fromkeys(fields.keys() - {"name"}, SET_IN_PLAN), **own_sources}
            return dataclasses.replace(base, **fields, sources=sources)
        except ShardproofError as error:
            self._failed(error, "cluster.preset")
            return None

    def layout(self) -> Layout | None:
        """The layout; an omitted dp is what the other degrees leave of the devices."""
        self._merge_cluster_file()
        fields = dict(self.valid["layout"])
        devices = self.valid["cluster"].get("num_devices")
        if "dp" not in fields and self.bad & {"layout.tp", "layout.cp", "layout.pp"}:
            self.bad.add("layout.dp")  # it cannot be derived, so no rule may judge it
        if "dp" not in fields and devices is not None and "layout.dp" not in self.bad:
            model_size = math.prod(fields.get(axis, 1) for axis in ("tp", "cp", "pp"))
            dp, rest = divmod(devices, model_size)
            if rest or not dp:
                self._problem(
                    "cluster.num_devices",
                    f"num_devices={devices} is no multiple of tp*cp*pp={model_size}, so dp cannot be derived. "
                    f"Use {max(1, dp) * model_size} devices, or other degrees.",
                )
                return None
            fields["dp"] = dp
        return self._noun("layout", Layout, fields)

    def missing(self, dotted: str, sentence: str) -> None:
        """Adds the problem that a key was not given; it is not reported once more when its noun is made."""
        if dotted not in self.bad:
            self.bad.add(dotted)
            self.problem_at(None, dotted, sentence)

    def problem_at(self, given: Given | None, key: str | None, sentence: str) -> None:
        """Adds a problem of a value that may lie in no section of this draft, and the key that it is about."""
        if given is None:
            self.problems.append((10**9, Problem(sentence, key, origin=self.source)))
        else:
            self.problems.append((given.line, Problem(sentence, key, given.place, origin=given.origin)))

    def report_broken_rules(self, nouns: Mapping[str, Any]) -> None:
        """Adds the problems of every cross-key rule whose own keys are fine."""
        for broken in broken_rules(nouns):
            if not self.bad.intersection(broken.rule.keys):
                self._problem(self.first_given(broken.rule.keys), broken.sentence)

    def first_given(self, keys: Sequence[str]) -> str:
        """The first of some keys that is given; where none is, the first."""
        return next((key for key in keys if self.find(key) is not None), keys[0])

    def find(self, dotted: str | None) -> Given | None:
        """Where a key is given; None where it is not, or no key is known."""
        section, _, name = (dotted or "").partition(".")
        return self.given.get(section, {}).get(name)

    def raise_problems(self) -> None:
        """Raises `PlanError` in file order if anything was found."""
        if self.problems:
            raise PlanError(dict.fromkeys(text for _, text in sorted(self.problems, key=lambda problem: problem[0])))

    def _plain(self, section: str) -> Any:
        fields = {str(keys_of(section)[name].attribute): value for name, value in self.valid[section].items()}
        if section == "batch":
            fields.setdefault("micro_size", 1)
        made = self._noun(section, NOUNS[section], fields)
        if isinstance(made, Optimizer):  # which knows no default from a value that is given
            for name, sentence in made.unused(fields):
                self._problem(f"{section}.{name}", sentence)
        return made

    def _noun(self, section: str, noun: type, fields: Mapping[str, Any], alternative: str = "") -> Any:
        missing = [key for key in keys_of(section).values() if key.required and key.attribute not in fields]
        reported = [key for key in missing if key.dotted not in self.bad]
        if reported:
            names = ", ".join(key.name for key in reported)
            first = next((f"{section}.{name}" for name in self.given.get(section, {})), None)
            self._problem(first, f"[{section}] lacks {names}{'. Give them, ' + alternative if alternative else ''}.")
        unfilled = [
            field.name for field in dataclasses.fields(noun) if _is_required(field) and field.name not in fields
        ]
        if missing or unfilled:
            return None  # a derived default lacks the value it is derived from, which is a problem of its own
        try:
            return noun(**fields)
        except PlanError as error:
            self._failed(error, None)
            return None

    def _failed(self, error: Exception, fallback: str | None) -> None:
        for problem in error.problems if isinstance(error, ShardproofError) else (Problem(_os_text(error)),):
            given = self.find(problem.key) or self.find(fallback)
            self.problem_at(given, problem.key or fallback, problem)

    def _merge_cluster_file(self) -> None:
        path = self.valid["cluster"].pop("file", None)
        if path is None:
            return
        try:
            file_values = read_values(read_text(path), path)
        except (ShardproofError, OSError) as error:
            self._failed(error, "cluster.file")
            self.bad.add("cluster.file")
            return
        given = file_values.get("cluster", {})
        inner = Draft({"cluster": given}, path)
        for section, table in file_values.items():
            if section != "cluster":
                inner._unknown_section(section, table, known=("cluster",))
        if inner.valid["cluster"].pop("file", None) is not None:
            inner._problem("cluster.file", "a cluster file cannot name another one. Copy its keys.")
        if not (given.keys() | (self.valid["cluster"].keys() if given else ())) - _SAYS_NO_DEVICE:
            self._describes_nothing(inner, file_values)
        self.problems += [(0, text) for _, text in sorted(inner.problems, key=lambda problem: problem[0])]
        self.bad |= inner.bad
        sources = {**inner.valid["cluster"].get("sources", {}), **self.valid["cluster"].get("sources", {})}
        overridden = {
            name: SET_IN_PLAN for name in self.valid["cluster"] if name in inner.valid["cluster"] and name != "sources"
        }
        self.valid["cluster"] = {
            **inner.valid["cluster"],
            **self.valid["cluster"],
            "sources": {**sources, **overridden},
        }

    def _describes_nothing(self, inner: Draft, file_values: Values) -> None:
        """Adds the problem of a cluster file that would leave every number to the default cluster."""
        self.bad.add("cluster.file")
        lacks = "has no preset and no number of a device" if "cluster" in file_values else "has no [cluster] section"
        inner.problem_at(
            None,
            "cluster.file",
            f"this cluster file {lacks if file_values else 'is empty'}. `shardproof calibrate -o {inner.source}` "
            "measures this "
            'machine and writes it; or begin it with [cluster] and preset = "dgx-h100", say (`shardproof presets` '
            "lists them).",
        )

    def _valid(self, section: str) -> dict[str, Any]:
        known, found = keys_of(section), {}
        for name, given in self.given.get(section, {}).items():
            if name not in known:
                self._unknown_key(section, name)
            elif complaint := key_complaint(known[name], given.value):
                self.bad.add(known[name].dotted)
                self._problem(known[name].dotted, complaint)
            else:
                found[name] = _converted(known[name], given)
        return found

    def _unknown_section(self, section: str, table: Mapping[str, Given], *, known: Iterable[str] = NOUNS) -> None:
        line = min((given.line for given in table.values()), default=0)
        origin, place = next(((given.origin, given.place) for given in table.values()), (self.source, NOWHERE))
        name = one_line(section.partition(".")[0])  # of a module's sections that of the list
        sentence = f"unknown section [{name}]{did_you_mean(name, known)} Known: {', '.join(known)}."
        self.problems.append((line, Problem(sentence, place=place, origin=origin)))

    def _unknown_key(self, section: str, name: str) -> None:
        elsewhere = [key.section for key in KEYS if key.name == name]
        hint = f"; it belongs to [{elsewhere[0]}]." if elsewhere else did_you_mean(name, keys_of(section))
        if hint == ".":
            hint = f". Known: {', '.join(keys_of(section))}."
        self._problem(f"{section}.{name}", f"unknown key {name!r} in [{section}]{hint}")

    def _problem(self, dotted: str | None, sentence: str) -> None:
        self.problem_at(self.find(dotted), dotted, sentence)


_COMPOSED = ("model", "cluster", "layout")

_OF_ANY_DEVICE = {"num_devices", "sources", "collective_library"}
"""Keys of [cluster] that go with the default as well."""

_SAYS_NO_DEVICE = {"name", "num_devices", "sources", "file"}
"""Keys of [cluster] that leave what a device is to the default."""


def key_complaint(key: Key, value: Any) -> str:
    """What is wrong with `value` for `key`, as one or two sentences; empty when it is fine."""
    written = f"{key.name} = {shown(value)}"
    expected = {
        "int": "a whole number",
        "float": "a number",
        "size": 'a share such as "8%" or bytes such as "4GiB"',
        "bool": "true or false",
        "str": "a text in quotes",
        "path": "a path in quotes",
        "data": "a path in quotes, or weights and paths",
        "two floats": "a list of two numbers",
        "list of ints": "a list of whole numbers in square brackets",
        "list of texts": "a list of texts in square brackets",
        "list of groups": "one table or more, [[optimizer.groups]]",
        "table of rates": "a table of positive numbers such as { bf16 = 3.12e14 }",
        "table of texts": "a table of texts",
    }[key.type]
    if (
        key.type == "size"
        and isinstance(value, str | int | float)
        and not isinstance(value, bool)
        and not _has_type(key, value)
    ):
        return f"{written}: {SIZE_RULE}"
    if not _has_type(key, value):
        return f"{written} must be {expected} ({key.doc})."
    longest = LONGEST_TEXT if key.dotted in ("layout.stages", "variation.failed_links") else LONGEST_NAME
    for text in _texts(value):
        if complaint := text_complaint(text, longest=longest):
            return f"{written} {complaint} ({key.doc})."
    if key.type == "list of groups":
        return next((complaint for table in value for complaint in group_complaints(table)), "")
    for choice in value if key.type == "list of texts" else [value]:
        if key.choices and choice not in key.choices:
            what = written if key.type != "list of texts" else f"{written}: {choice!r}"
            legal = key.legal if key.listed else f"one of {', '.join(key.choices)}"
            return f"{what} is not {legal}{did_you_mean(str(choice), key.choices)}"
    complaint = limit_complaint(value, vars(key)) or beyond(key.attribute or key.name, value, key.bound)
    return f"{written} {complaint} ({key.doc})." if complaint else ""


def _texts(value: Any) -> Iterator[str]:
    """The names and texts in a value, which must be plain."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):  # sources may have several lines
        yield from value
        yield from (text.replace("\n", " ") for text in value.values() if isinstance(text, str))
    elif isinstance(value, list):
        yield from (text for text in value if isinstance(text, str))


def _has_type(key: Key, value: Any) -> bool:
    if key.type == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if key.type == "float":
        return _is_number(value)
    if key.type == "size":
        return size_of(_size_text(value), 1.0) is not None if isinstance(value, str) or _is_number(value) else False
    if key.type == "bool":
        return isinstance(value, bool)
    if key.type in ("str", "path", "data"):
        return isinstance(value, str) and value != ""
    if key.type == "two floats":
        return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
    if key.type == "list of ints":
        return isinstance(value, list) and all(
            isinstance(number, int) and not isinstance(number, bool) for number in value
        )
    if key.type == "list of groups":
        return isinstance(value, list) and bool(value) and all(isinstance(table, dict) for table in value)
    if key.type == "list of texts":
        return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)
    if not isinstance(value, dict):
        return False
    if key.type == "table of rates":
        return (bool(value) or not key.required) and all(_is_number(rate) and rate > 0 for rate in value.values())
    return all(isinstance(text, str) for text in value.values())


def _size_text(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) < 1e18 else ""


def _is_number(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _converted(key: Key, given: Given) -> Any:
    value = given.value
    if key.type == "float":
        return float(value)
    if key.type == "size":
        return _size_text(value)
    if key.type == "two floats":
        return (float(value[0]), float(value[1]))
    if key.type in ("list of ints", "list of texts"):
        return tuple(value)
    if key.type == "list of groups":
        return tuple(map(group_of, value))
    if key.type == "table of rates":
        return {name: float(rate) for name, rate in value.items()}
    if key.type == "path" and given.folder is not None and not is_url(str(value)):
        return str(given.folder / value)
    if key.type == "data" and given.folder is not None:
        return data_from(given.folder, value)
    return value


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _os_text(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    return str(error)
