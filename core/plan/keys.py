"""The keys of a plan file: section, name, type, legal values, meaning, and the module that reads the value.

They are the options of the sections' nouns (`core.base.option`), and a few that only choose where other values come
from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..base.bounds import Bound
from ..base.option import option_choices, option_types
from ..layout.layout import Layout
from ..machine.cluster import ClusterSpec
from ..machine.variation import Variation
from ..model.model import ModelSpec
from .communicators import Communicators
from .experimental import Experimental
from .log import Log
from .optimizer import Optimizer
from .parameter_groups import ParameterGroup
from .runtime import Offload, Recompute, Runtime
from .sections import Batch, DataParallel, Numerics, Precision, ScheduleChoice
from .train import Checkpoint, Train

KeyType = Literal[
    "int",
    "float",
    "size",
    "bool",
    "str",
    "path",
    "data",
    "two floats",
    "list of ints",
    "list of texts",
    "list of groups",
    "table of rates",
    "table of texts",
]

NOUNS: Mapping[str, type] = {
    "model": ModelSpec,
    "cluster": ClusterSpec,
    "runtime": Runtime,
    "layout": Layout,
    "batch": Batch,
    "precision": Precision,
    "recompute": Recompute,
    "offload": Offload,
    "schedule": ScheduleChoice,
    "numerics": Numerics,
    "optimizer": Optimizer,
    "data_parallel": DataParallel,
    "communicators": Communicators,
    "train": Train,
    "checkpoint": Checkpoint,
    "log": Log,
    "experimental": Experimental,
    "variation": Variation,
}
"""Section -> the noun it fills, in the order in which a plan file is written."""


@dataclass(frozen=True)
class Key:
    """One key: what `core.base.option.About` says of an option, with its section, its name in a plan file and its type.

    `attribute` is the field of the section's noun that holds the value; None for keys that only choose where the other
    values come from. `required` ones must be given, or come from a preset or a file; `default` is the value of an
    absent key, None where there is none or where `default_note` describes it.
    """

    section: str
    name: str
    type: KeyType
    doc: str
    read_by: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    attribute: str | None = ""
    default_note: str = ""
    listed: str = ""
    more: str = ""
    bound: Bound | None = None
    required: bool = False
    default: Any = dataclasses.field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.attribute == "":
            object.__setattr__(self, "attribute", self.name)

    @property
    def dotted(self) -> str:
        """`section.key`, as `--set` spells it."""
        return f"{self.section}.{self.name}"

    @property
    def legal(self) -> str:
        """Type and limits in words, for help texts and documentation."""
        if self.listed:
            return f"a name of `shardproof presets {self.listed}`"
        if self.choices:
            return " | ".join(self.choices) if self.type == "str" else f"{self.type} among {', '.join(self.choices)}"
        bounds = [
            f"at least {self.minimum:g}" if self.minimum is not None else "",
            f"at most {self.maximum:g}" if self.maximum is not None else "",
            f"above {self.above:g}" if self.above is not None else "",
            f"below {self.below:g}" if self.below is not None else "",
        ]
        return ", ".join([self.type, *filter(None, bounds)])


_KEY_TYPES: Mapping[Any, KeyType] = {
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    tuple[float, float]: "two floats",
    tuple[int, ...]: "list of ints",
    tuple[str, ...]: "list of texts",
    tuple[ParameterGroup, ...]: "list of groups",
    Mapping[str, float]: "table of rates",
    Mapping[str, str]: "table of texts",
}


def _own_keys(section: str) -> Iterator[Key]:
    """The keys of a section that are fields of its noun, in their order."""
    noun = NOUNS[section]
    types, choices = option_types(noun), option_choices(noun)
    for field in dataclasses.fields(noun):
        about = dict(field.metadata)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        described = "default_note" in about
        yield Key(
            section,
            about.pop("key", field.name),
            about.pop("kind", _KEY_TYPES.get(types[field.name], "str")),
            attribute=field.name,
            required=default is dataclasses.MISSING and not described,
            default=None if default is dataclasses.MISSING or described else default,
            **{"choices": choices.get(field.name, ()), **about},
        )


_LISTED = (
    *("model", "cluster", "layout", "runtime", "batch", "precision", "recompute", "offload", "schedule", "numerics"),
    *("optimizer", "train", "checkpoint", "log", "experimental"),
    *("data_parallel", "communicators", "variation"),
)
"""The sections in the order in which `shardproof presets keys` lists them."""

_BUILD = "core.plan.build"

_BASES: Mapping[str, tuple[Key, ...]] = {
    "model": (
        Key("model", "preset", "str", "name of a known model; other keys override its fields", _BUILD, attribute=None),
        Key("model", "config", "path", "path of a Hugging Face config.json", _BUILD, attribute=None),
    ),
    "cluster": (
        Key(
            "cluster",
            "preset",
            "str",
            "name of a known cluster (this-host if nothing else is said)",
            _BUILD,
            attribute=None,
        ),
        Key("cluster", "file", "path", "a TOML file with a [cluster] section", _BUILD, attribute=None),
    ),
}
"""Section -> the keys that choose where its other values come from."""

KEYS: tuple[Key, ...] = tuple(key for section in _LISTED for key in (*_BASES.get(section, ()), *_own_keys(section)))
"""Every key of a plan file."""

MODULE_KEYS: tuple[Key, ...] = (
    Key("modules", "name", "str", "what begins the names of its parameters", "core.plan.module", required=True),
    Key(
        "modules",
        "ranks",
        "str",
        "its first and last rank: 0-3, or 0",
        "core.plan.module",
        attribute="first_rank",
        required=True,
    ),
    Key(
        "modules",
        "inputs",
        "list of texts",
        "modules whose hidden states it takes, added up",
        "core.plan.module",
        default_note="the one before",
    ),
)
"""Every key of a module of its own; those of its model and layout are in `KEYS`."""


def keys_of(section: str) -> dict[str, Key]:
    """The keys of one section by name."""
    return {key.name: key for key in KEYS if key.section == section}


def key_named(dotted: str) -> Key:
    """The key `section.name`. Raises KeyError."""
    section, _, name = dotted.partition(".")
    return keys_of(section)[name]
