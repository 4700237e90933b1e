"""`Key`: one key of a plan file, with its legal values and the module that reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...layout.layout import Layout
from ...machine.cluster import ClusterSpec
from ...machine.variation import Variation
from ...model.model import ModelSpec
from ..module import Module
from ..sections import (
    Batch,
    Checkpoint,
    DataParallel,
    Numerics,
    Optimizer,
    Precision,
    Recompute,
    Runtime,
    ScheduleChoice,
    Train,
)

KeyType = Literal[
    "int",
    "float",
    "size",
    "bool",
    "str",
    "path",
    "two floats",
    "list of ints",
    "list of texts",
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
    "schedule": ScheduleChoice,
    "numerics": Numerics,
    "optimizer": Optimizer,
    "data_parallel": DataParallel,
    "train": Train,
    "checkpoint": Checkpoint,
    "variation": Variation,
}
"""Section -> the noun it fills, in the order in which a plan file is written."""


@dataclass(frozen=True)
class Key:
    """One key. `choices`, `minimum` and `maximum` limit its value; `above` and `below` are exclusive bounds.

    `attribute` is the field of the section's noun that holds the value; None for keys that only choose where the other
    values come from. `read_by` names the module (below `shardproof`) whose behaviour the value changes; a test holds
    that it reads it. `default_note` describes a default that depends on other keys; plain defaults are those of the
    noun. Many choices are `listed`, each with what it is, by `shardproof presets LISTED`.
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

    def __post_init__(self) -> None:
        if self.attribute == "":
            object.__setattr__(self, "attribute", self.name)

    @property
    def dotted(self) -> str:
        """`section.key`, as `--set` spells it."""
        return f"{self.section}.{self.name}"

    @property
    def required(self) -> bool:
        """True when a value must be given (or come from a preset or a file)."""
        return self.attribute is not None and not self.default_note and self._field_default is dataclasses.MISSING

    @property
    def default(self) -> Any:
        """The value when the key is absent; None where there is none or where `default_note` describes it."""
        default = self._field_default
        return None if self.default_note or default is dataclasses.MISSING else default

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

    @property
    def _field_default(self) -> Any:
        for field in dataclasses.fields(Module if self.section == "modules" else NOUNS[self.section]):
            if field.name == self.attribute:
                return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        return None
