"""The JSON Schema of plan files takes every plan that we have, and refuses what the reader of plans refuses."""

from __future__ import annotations

import json
import operator
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardproof
from shardproof.core.commands.cli import main
from shardproof.core.plan.build import key_complaint
from shardproof.core.plan.json_schema import plan_schema
from shardproof.core.plan.keys import KEYS, MODULE_KEYS, NOUNS, Key
from shardproof.tests.helpers.stored_plans import STORED

SCHEMA = plan_schema()
EXAMPLES = sorted((Path(shardproof.__file__).parent / "examples").glob("*.toml"))
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}
HOLDS: dict[str, Callable[[Any, Any], bool]] = {
    "enum": lambda value, limit: value in limit,
    "required": lambda value, limit: not set(limit) - value.keys(),
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
    "minLength": lambda value, limit: len(value) >= limit,
    "minItems": lambda value, limit: len(value) >= limit,
    "maxItems": lambda value, limit: len(value) <= limit,
}
SAID = {"$schema", "title", "description", "default", "$defs"}
"""Keywords that say something and refuse nothing."""


def problems(schema: dict[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """What a value lacks by the keywords of draft 2020-12 that the schema has; one that is not known here fails."""
    for keyword, limit in schema.items():
        if keyword == "$ref":
            yield from problems(SCHEMA["$defs"][limit.removeprefix("#/$defs/")], value, path)
        elif keyword == "type":
            kinds = [limit] if isinstance(limit, str) else limit
            if not any(
                isinstance(value, TYPES[kind]) and isinstance(value, bool) == (kind == "boolean") for kind in kinds
            ):
                yield f"{path}: {value!r} is no {limit}"
                return
        elif keyword == "properties":
            for name in limit.keys() & value.keys():
                yield from problems(limit[name], value[name], f"{path}.{name}")
        elif keyword == "additionalProperties":
            for name in value.keys() - schema.get("properties", {}).keys():
                yield from [f"{path}.{name} is not known"] if limit is False else problems(limit, value[name], path)
        elif keyword == "items":
            for each in value:
                yield from problems(limit, each, path)
        elif keyword not in SAID and not HOLDS[keyword](value, limit):
            yield f"{path}: {value!r} breaks {keyword} {limit!r}"


def test_every_stored_plan_and_every_example_is_valid() -> None:
    texts = [json.loads(line)["plan"] for line in STORED.read_text(encoding="utf-8").splitlines()]
    texts += [path.read_text(encoding="utf-8") for path in EXAMPLES]
    assert len(texts) > 200 and any("[[modules]]" in text for text in texts)
    for text in texts:
        assert list(problems(SCHEMA, tomllib.loads(text))) == [], text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[layouts]\ntp = 1", ".layouts is not known"),
        ("[layout]\ntpx = 1", ".layout.tpx is not known"),
        ("tp = 1", ".tp is not known"),
        ('[layout]\ntp = "2"', ".layout.tp: '2' is no integer"),
        ("[layout]\ntp = true", ".layout.tp: True is no integer"),
        ("[layout]\ntp = 0", ".layout.tp: 0 breaks minimum 1"),
        ("[layout]\nzero = 4", ".layout.zero: 4 breaks maximum 3"),
        ("[layout]\ntp = 2_000_000", ".layout.tp: 2000000 breaks maximum 1048576"),
        ("[variation]\njitter = 1.0", ".variation.jitter: 1.0 breaks exclusiveMaximum 1"),
        ("[cluster]\nlink_efficiency = 0", ".cluster.link_efficiency: 0 breaks exclusiveMinimum 0"),
        ("[cluster]\npeak_flops_per_s = { bf16 = 0 }", ".cluster.peak_flops_per_s: 0 breaks exclusiveMinimum 0"),
        ("[optimizer]\nbetas = [0.9]", ".optimizer.betas: [0.9] breaks minItems 2"),
        ("[batch]\nglobal = [4]", ".batch.global: [4] is no integer"),
        ("[batch]\nglobal_size = 4", ".batch.global_size is not known"),
        ("[recompute]\nlayers = [0.5]", ".recompute.layers: 0.5 is no integer"),
        ("[[modules]]\nname = 'a'\nranks = '0'\n[modules.layout]\ntp = 0", ".modules.layout.tp: 0 breaks minimum 1"),
        ("[[modules]]\nname = 'a'\nranks = '0'\n[modules.batch]\nmicro = 1", ".modules.batch is not known"),
        ("[modules]\nname = 'a'", ".modules: {'name': 'a'} is no array"),
    ],
)
def test_a_wrong_key_type_or_number_is_refused(text: str, problem: str) -> None:
    assert list(problems(SCHEMA, tomllib.loads(text))) == [problem]


def test_a_wrong_name_is_refused_with_the_legal_ones() -> None:
    (problem,) = problems(SCHEMA, {"precision": {"dtype": "bf15"}})
    assert problem == ".precision.dtype: 'bf15' breaks enum ['fp32', 'bf16', 'fp16', 'fp8']"
    (problem,) = problems(SCHEMA, {"modules": [{"ranks": "0"}]})
    assert problem == ".modules: {'ranks': '0'} breaks required ['name', 'ranks']"


VALUES = (0, 1, 3, -1, 10**30, 0.0, 0.5, 1.0, 1e300, True, "", "x", "8%", [], [1], [0.5, 0.5], ["norm"], ["x"])
VALUES += ([{"match": "x"}], ["tp"], ["dp"], {}, {"bf16": 1e14}, {"bf16": 0}, {"bf16": "x"}, {"tp": 4})


@pytest.mark.parametrize("key", [*KEYS, *MODULE_KEYS], ids=lambda key: key.dotted)
def test_what_the_reader_takes_is_valid_and_a_wrong_type_is_neither(key: Key) -> None:
    schema = SCHEMA["properties"]["modules"]["items"] if key.section == "modules" else SCHEMA["$defs"][key.section]
    legal = [*VALUES, *key.choices, *([choice] for choice in key.choices)]
    taken = [value for value in legal if not key_complaint(key, value)]
    valid = [value for value in legal if not list(problems(schema["properties"][key.name], value))]
    assert taken and [value for value in taken if value not in valid] == []
    assert len(valid) < len(legal)


def test_every_key_is_explained() -> None:
    described = {f"{section}.{name}" for section in NOUNS for name in SCHEMA["$defs"][section]["properties"]}
    assert described == {key.dotted for key in KEYS}
    mode = SCHEMA["$defs"]["recompute"]["properties"]["mode"]
    assert mode["description"].startswith("What the backward pass computes again. `selective` recomputes")
    assert mode["default"] == "none"
    assert SCHEMA["$defs"]["layout"]["properties"]["dp"]["description"].endswith("Default: num_devices / (tp*cp*pp).")


def test_presets_writes_the_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "schema", "-o", str(tmp_path / "plan.schema.json")]) == 0
    assert "#:schema ./plan.schema.json" in capsys.readouterr().out
    assert main(["presets", "schema", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (
        printed
        == json.loads((tmp_path / "plan.schema.json").read_text(encoding="utf-8"))
        == json.loads(json.dumps(SCHEMA))
    )
