"""The recorded numerics: what the bits of a run follow from besides its model, its data and its training, as
checkpoints and ledgers carry it.

Two kinds of facts are kept apart. *Pinned* ones belong to the problem: which numerics, and into which leaves its sums
are cut. With exact numerics and equal pinned facts two runs have equal bits, whatever their layouts; so a file says
them in full, and nobody derives them from the defaults of the version that reads it. The facts about the *machine*
(kind of device, kernels, versions of libraries) say where equal bits are promised, and what fast numerics depend on.

Version 1, before 2026-11-23, was no record: a checkpoint had mode and leaves among its problem, and a ledger its plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..base.bounds import shown
from ..base.names import is_plain, is_plain_table
from .products import PRODUCT_FORMS, in_order

VERSION = 2
"""Of the record that is written; the next is due when a field gets another meaning."""

MOST_FACTS = 10_000
"""Leaves of a record that is read: a model has seven, and a plan at most a thousand modules."""
LARGEST = 2**62

PRODUCTS = "triton_products"
"""The name of that field, which is its key of `[numerics]`."""

Leaf = dict[str, int] | int | None
"""How one axis is cut: `num_items` in blocks of `block`, or a number of tokens; None for an axis that the model has
not."""


@dataclass(frozen=True)
class RecordedNumerics:
    """`leaves` by name, of several modules behind the module's name (`encoder.ffn`); fast numerics, whose bits depend
    on the layout, have none. `mode` is empty where a file of version 1 does not say it. `machine` is
    `backend.base.environment`, empty where a file does not say it. `triton_products` are the `PRODUCT_FORMS` that our
    kernels make, which add up the inside of a leaf in another order than the library; none where a file has no such
    field."""

    mode: str
    leaves: Mapping[str, Leaf] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    version: int = VERSION
    triton_products: tuple[str, ...] = ()

    @property
    def pinned(self) -> dict[str, Any]:
        """What has to be equal for equal bits, by name."""
        products = {PRODUCTS: list(self.triton_products)} if self.mode == "exact" and self.version > 1 else {}
        return {**({"mode": self.mode} if self.mode else {}), **products, **self.leaves}

    def differences(self, theirs: RecordedNumerics) -> Iterator[tuple[str, Any, Any]]:
        """(name, own, theirs) of every pinned fact that differs. A leaf that one record of version 2 lacks is that of
        an axis which the run did not cut. Version 1 did not say all leaves, and fast numerics have none: there only
        what both have counts."""
        own, other = self.pinned, theirs.pinned
        full = self.mode == theirs.mode and self.version == theirs.version == VERSION
        names = own | other if full else [name for name in own if name in other]
        for name in names:
            if own.get(name) != other.get(name):
                yield name, own.get(name), other.get(name)

    def to_json(self) -> dict[str, Any]:
        """The record as JSON has it."""
        products = {PRODUCTS: list(self.triton_products)} if self.triton_products else {}
        return {
            "version": self.version,
            "mode": self.mode,
            "leaves": dict(self.leaves),
            "machine": dict(self.machine),
            **products,
        }

    @classmethod
    def from_json(cls, value: Any) -> RecordedNumerics:
        """The inverse of `to_json`. Raises `ValueError` with words that follow a file's name, for what is no record and
        for one of a version that is not known here."""
        if not isinstance(value, dict):
            raise ValueError(f"its numerics are {shown(value)}, no record")
        if type(version := value.get("version")) is not int or version != VERSION:
            raise ValueError(
                f"its numerics are recorded as version {shown(version)}, and this shardproof reads 1 and {VERSION}. "
                "Use the version that wrote it"
            )
        unknown = value.keys() - {"version", "mode", "leaves", "machine", PRODUCTS}
        if unknown:
            raise ValueError(f"its numerics have {shown(sorted(unknown, key=str)[0])}, which version {VERSION} has not")
        mode, leaves = _mode(value.get("mode")), _leaves(value.get("leaves"))
        if mode == "fast" and leaves:
            raise ValueError(f"its numerics are fast and have the leaf {shown(next(iter(leaves)))}, as exact ones have")
        products = _products(value.get(PRODUCTS, []))
        if mode == "fast" and products:
            raise ValueError(f"its numerics are fast and have {PRODUCTS}, as exact ones have")
        return cls(mode, leaves, _machine(value.get("machine")), triton_products=products)

    @classmethod
    def of_version_1(cls, value: Any) -> RecordedNumerics:
        """The mode and the leaves that the problem of a checkpoint had. Raises `ValueError` as `from_json`."""
        if not isinstance(value, dict):
            raise ValueError(f"its numerics are {shown(value)}, no table")
        leaves = _leaves({name: each for name, each in value.items() if name != "mode"})
        return cls(_mode(value["mode"]) if "mode" in value else "", leaves, version=1)


def _mode(value: Any) -> str:
    if value not in ("exact", "fast"):
        raise ValueError(f"the mode of its numerics is {shown(value)}, neither exact nor fast")
    return str(value)


def _leaves(value: Any) -> dict[str, Leaf]:
    if not isinstance(value, dict) or len(value) > MOST_FACTS:
        raise ValueError(f"the leaves of its numerics are {shown(value)}, no table of at most {MOST_FACTS:,}")
    for name, leaf in value.items():
        numbers = leaf.values() if isinstance(leaf, dict) and leaf.keys() == {"num_items", "block"} else (leaf,)
        if not is_plain(name) or not (leaf is None or all(map(_is_count, numbers))):
            raise ValueError(f"the leaf {shown(name)} of its numerics is {shown(leaf)}, no number of items and block")
    return dict(value)


def _products(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) and each in PRODUCT_FORMS for each in value):
        raise ValueError(f"the {PRODUCTS} of its numerics are {shown(value)}, no list of {', '.join(PRODUCT_FORMS)}")
    return in_order(value)


def _machine(value: Any) -> dict[str, str]:
    if not is_plain_table(value) or len(value) > MOST_FACTS:
        raise ValueError(f"the machine of its numerics is {shown(value)}, not a table of texts")
    return dict(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= LARGEST
