"""Files in general forms: every setting with its line, and texts that are meant to hurt."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest

from shardproof.core.base.errors import FileError, MissingExtraError
from shardproof.core.imports.account import Request
from shardproof.core.imports.given import import_file
from shardproof.core.imports.table import Row, Sheet, index, quiet, same, unless
from shardproof.core.imports.written import Written, json_settings, toml_settings, yaml_settings

EXPECTED = [("a.b", 1, 2), ("a.c.d", [1, {"e": 2}], 3), ("a.f", {}, 5), ("g", "x: y", 6)]


def found(settings: list[Written]) -> list[tuple[str, Any, int]]:
    return [(each.flag, each.value, each.line) for each in settings]


def test_toml_json_and_yaml_give_the_same_settings_with_their_lines():
    toml = '\n[a]\nb = 1\nc.d = [1, { e = 2 },\n]\nf = {}\n'  # fmt: skip
    assert found(toml_settings(toml, "x.toml")) == [("a.b", 1, 3), ("a.c.d", [1, {"e": 2}], 4), ("a.f", {}, 6)]
    json = '{"a": {\n"b": 1,\n"c": {"d": [1, {\n"e": 2}]},\n"f": {}},\n"g": "x: y"}'
    assert found(json_settings(json, "x.json")) == EXPECTED
    yaml = "a:\n  b: 1\n  c: {d: [1, {e: 2}]}\n\n  f: {}\ng: 'x: y'\n"
    assert found(yaml_settings(yaml, "x.yaml")) == EXPECTED


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("a: [", "x.yaml", r"x\.yaml:\d: this is not YAML"),
        ("a: 1\n\tb: 2", "x.yaml", r"x\.yaml:2: this is not YAML"),
        ("!!python/object/apply:os.system ['true']", "x.yaml", r"x\.yaml:1: this is not YAML: could not determine"),
        ("- 1\n- 2", "x.yaml", "this file holds list, where a table of settings is meant"),
        ("a: " + "[" * 5000, "x.yaml", "nested deeper than 64"),
        ("{" + "a: {" * 200 + "}" * 201, "x.yaml", "nested deeper than 64"),
        ("a: 2026-13-45", "x.yaml", "this is not YAML"),
    ],
)
def test_yaml_that_is_none_or_is_code_is_refused_in_a_sentence(text: str, name: str, said: str):
    with pytest.raises(FileError, match=said):
        yaml_settings(text, name)


def test_aliases_that_unfold_without_end_are_refused():
    """Ten lines that mean ten thousand million settings."""
    lines = ["l0: &l0 {a: 1, b: 2}"]
    for level in range(1, 10):
        inner = ", ".join(f"k{number}: *l{level - 1}" for number in range(10))
        lines.append(f"l{level}: &l{level} {{{inner}}}")
    with pytest.raises(FileError, match="more than 4,000 settings"):
        yaml_settings("\n".join(lines), "x.yaml")


def test_without_pyyaml_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "yaml", raising=False)
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"pip install 'shardproof\[import\]'"):
        yaml_settings("a: 1", "x.yaml")


TABLE = index(
    same("run.steps", "train.steps", 5, int),
    Row("run.name", "mapped", "model.name", kind=str),
    *quiet("run", "log", "what is printed"),
    *unless("run", {"slow": False}, "slower"),
    *quiet("", "extra.*", "a section of its own"),
)


def sheet(**settings: Any) -> Sheet:
    written = [Written(flag.replace("__", "."), value, line) for line, (flag, value) in enumerate(settings.items(), 1)]
    return Sheet(TABLE, written, "x.toml", "Peer", {"run.num_steps": "run.steps"})


def outcome(**settings: Any) -> dict[str, tuple[str, str]]:
    return {each.flag: (each.status, each.why) for each in sheet(**settings).imported("peer", "").settings}


def test_a_sheet_accounts_for_known_other_unknown_and_switched_off_settings():
    assert outcome(run__log=1, run__slow=False, extra__deep__x=1) == {
        "run.log": ("no-effect", "what is printed"),
        "run.slow": ("no-effect", "it is off"),
        "extra.deep.x": ("no-effect", "a section of its own"),
    }
    assert outcome(run__slow=True)["run.slow"] == ("not-modelled", "slower")
    status, why = outcome(run__step=3)["run.step"]
    assert (status, "did you mean 'run.steps'?" in why) == ("refused", True)


def test_two_spellings_with_different_values_are_refused_and_with_one_value_are_not():
    assert outcome(run__steps=3, run__num_steps=3)["run.num_steps"][0] == "mapped"
    assert outcome(run__steps=3, run__num_steps=4)["run.num_steps"] == (
        "refused",
        "run.steps says the same thing in line 1, and another value.",
    )


def test_values_have_the_place_of_the_setting_or_are_the_programs_default():
    given = sheet(run__num_steps=7)
    given.put_same()
    assert (given.values["train"]["steps"].value, given.values["train"]["steps"].origin) == (7, "x.toml:1")
    unsaid = sheet()
    unsaid.put_same()
    assert unsaid.values["train"]["steps"].origin == "x.toml (default of Peer)"
    assert [(each.flag, each.line, each.value) for each in unsaid.imported("peer", "").settings] == [
        ("run.steps", 0, "5")
    ]


@pytest.mark.parametrize(
    "text",
    ["def f(:", "x = " + "(" * 3000, "import torchtitan  # Trainer.Config(\n", "\0 torchtitan Trainer.Config("],
)
def test_python_that_is_no_configuration_is_refused_in_a_sentence(text: str):
    request = Request(text + "\n# torchtitan Trainer.Config(", "x.py", 8)
    with pytest.raises(ValueError, match=r"this is not Python|has the configurations none"):
        import_file(request)
