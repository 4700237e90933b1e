"""Keys that a search tries only where it is asked to (`plan --free`): precision, which changes bits, and what would
multiply every search: overlap switches, the order of ranks, groups of hybrid sharding, uneven cuts of the layers.

A free key makes of one space several, which are searched together: in each it has one of its values. A value that
means nothing in a layout (an overlap of tensor-parallel collectives without tensor parallelism) is not looked at there,
so no plan is among the answers twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any

from ...core.base.bounds import shown
from ...core.base.divisors import divisors
from ...core.base.errors import PlanError
from ...core.commands.options import SearchSpace
from ...core.layout.layout import DEFAULT_ORDER, Layout
from ...core.layout.stages import layers_written
from ...core.plan.build import key_complaint
from ...core.plan.keys import Key, key_named
from ...core.plan.plan import Plan
from ..stack.profile import Profile
from ..stack.profiles import PROFILES

STAGES = "layout.stages"
"""Its values are none that could be listed: besides the usual cut that by min-max is tried (`min_max`)."""

ORDERS = (
    DEFAULT_ORDER,
    *("tp-cp-ep-pp-dp", "tp-ep-dp-cp-pp", "tp-ep-dp-pp-cp", "tp-pp-cp-ep-dp", "tp-pp-ep-dp-cp"),
)
"""Every order of the other axes around tensor parallelism, which sends most and most often and so lies inside the node;
experts lie on the ranks of data parallelism."""


@dataclass(frozen=True)
class FreeKey:
    """How a key is freed: its dotted name, the values tried unless some are given, the first being that of the space
    (None: as the stack has it), and whether another one means anything in a layout."""

    key: str
    values: Callable[[SearchSpace], Sequence[Any]]
    matters: Callable[[SearchSpace, Layout], bool]
    needs_zero: bool = False


def _dtypes(space: SearchSpace) -> list[str]:
    """That of the space, and what else the device has products in that people train large models in."""
    rates = space.cluster.peak_flops_per_s
    return [*dict.fromkeys((space.precision.dtype, *(dtype for dtype in ("bf16", "fp8") if dtype in rates)))]


def _switch(key: str, other: Callable[[Profile], bool | None]) -> Callable[[SearchSpace], list[Any]]:
    """As the space has it, and where `other` of the stack knows one the opposite."""
    section, _, name = key.partition(".")

    def values(space: SearchSpace) -> list[Any]:
        own = getattr(getattr(space, section), name)
        changed = other(PROFILES[space.runtime.profile]) if own is None else not own
        return [own] if changed is None else [own, changed]

    return values


def _exchanges(space: SearchSpace) -> list[Any]:
    """The switch of experts' exchanges; without experts there are none."""
    switch = _switch("runtime.ep_comm_overlap", lambda stack: not stack.expert_overlap)(space)
    return switch if space.model.is_moe else switch[:1]


def _pipelined(space: SearchSpace, layout: Layout) -> bool:
    interleaved = PROFILES[space.runtime.profile].p2p_overlap_interleaved_only
    return layout.pp > 1 and (layout.vpp > 1 or not interleaved)


def _copies(_: SearchSpace, layout: Layout) -> bool:
    return layout.dp * layout.cp > 1


KEYS: Mapping[str, FreeKey] = {
    each.key: each
    for each in (
        FreeKey("precision.dtype", _dtypes, lambda space, layout: True),
        FreeKey(
            "data_parallel.overlap_grad_reduce",
            _switch("data_parallel.overlap_grad_reduce", lambda stack: not stack.overlap_grad_reduce),
            _copies,
        ),
        FreeKey(
            "data_parallel.overlap_param_gather",
            _switch("data_parallel.overlap_param_gather", lambda stack: not stack.overlap_param_gather),
            _copies,
            needs_zero=True,
        ),
        FreeKey(
            "runtime.tp_comm_overlap",
            _switch(
                "runtime.tp_comm_overlap",
                lambda stack: True if stack.tensor_overlap == "none" != stack.tensor_overlap_asked else None,
            ),
            lambda space, layout: layout.tp > 1,
        ),
        FreeKey(
            "runtime.p2p_overlap",
            _switch("runtime.p2p_overlap", lambda stack: not stack.p2p_overlap),
            _pipelined,
        ),
        FreeKey(
            "runtime.ep_comm_overlap",
            _exchanges,
            lambda space, layout: space.model.is_moe and layout.ep > 1,
        ),
        FreeKey("layout.order", lambda space: ORDERS, lambda space, layout: True),
        FreeKey(
            "data_parallel.shard",
            lambda space: [*dict.fromkeys((space.data_parallel.shard, *divisors(space.cluster.num_devices)[1:-1]))],
            _copies,
            needs_zero=True,
        ),
        FreeKey(STAGES, lambda space: (), lambda space, layout: True),
    )
}

OVERLAPS = tuple(key for key in KEYS if "overlap" in key)

SHORT = {key.partition(".")[2]: key for key in KEYS}
"""The last part of each key, which stands for it."""

OVERLAP = "overlap"
"""The word that frees all of `OVERLAPS`."""


def free_values(texts: Sequence[str], space: SearchSpace, fixed: Collection[str]) -> dict[str, tuple[Any, ...]]:
    """Free key -> the values to try, as `--free KEY` or `--free KEY=VALUE,VALUE` ask for them. Raises `PlanError` for a
    key that no search frees, one that is fixed too, and values that it cannot have."""
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        word, equals, given = text.partition("=")
        keys = OVERLAPS if word == OVERLAP else (SHORT.get(word, word),)
        if keys[0] not in KEYS:
            known = ", ".join([*SHORT, OVERLAP])
            raise PlanError(f"--free {shown(word)} is nothing that a search frees. Use {known}.")
        for key in keys:
            if key in fixed:
                raise PlanError(f"--free {word}: {key} is fixed by another option. Leave out one of the two.")
            values = _given(key, given) if equals else tuple(KEYS[key].values(space))
            if len(values) > 1 or key == STAGES or equals:
                found[key] = values
    return found


def _given(key: str, text: str) -> tuple[Any, ...]:
    """The values that a text lists."""
    if key == STAGES:
        raise PlanError(f"--free stages takes no values. To try one cut only, --fix stages={shown(text)}.")
    known = key_named(key)
    values = tuple(dict.fromkeys(_value(known, each.strip()) for each in text.split(",")))
    for value in values:
        if complaint := key_complaint(known, value):
            raise PlanError(f"--free {key}: {complaint}")
    return values


def _value(key: Key, word: str) -> Any:
    if key.type == "int" and word.isdecimal() and len(word) < 10:
        return int(word)
    return {"true": True, "false": False}.get(word, word) if key.type == "bool" else word


def spaces_of(space: SearchSpace) -> Iterator[SearchSpace]:
    """The spaces that a space with free keys stands for. In each `free` has the values of a key up to that which is
    tried, so that it says which ones other spaces try before it."""
    listed = {key: values for key, values in space.free.items() if key != STAGES}
    for chosen in product(*(range(len(values)) for values in listed.values())):
        upto = {key: values[: at + 1] for (key, values), at in zip(listed.items(), chosen, strict=True)}
        yield replace(_with(space, upto), free={**space.free, **upto})


def _with(space: SearchSpace, free: Mapping[str, Sequence[Any]]) -> SearchSpace:
    """The space with the last of the values of every key."""
    nouns: dict[str, Any] = {}
    pinned = dict(space.pinned)
    for key, values in free.items():
        section, _, name = key.partition(".")
        if section == "layout":
            pinned[key] = values[-1]
        else:
            nouns[section] = replace(nouns.get(section, getattr(space, section)), **{name: values[-1]})
    return replace(space, **nouns, pinned=pinned)


def is_another(space: SearchSpace, layout: Layout) -> bool:
    """Whether a layout of one of the spaces that free keys make is none of those that others have too."""
    return all(
        _is_new_order(values, layout) if key == "layout.order" else KEYS[key].matters(space, layout)
        for key, values in _changed(space)
    ) and _is_shard(space, layout)


def without_whole(space: SearchSpace, zeros: tuple[int, ...]) -> tuple[int, ...]:
    """The ZeRO stages of which plans of a space are none that others have too."""
    return tuple(zero for zero in zeros if zero or not any(KEYS[key].needs_zero for key, _ in _changed(space)))


def _changed(space: SearchSpace) -> list[tuple[str, tuple[Any, ...]]]:
    """The keys of which a space has another value than the first."""
    return [(key, values) for key, values in space.free.items() if key != STAGES and len(values) > 1]


def _is_new_order(orders: Sequence[str], layout: Layout) -> bool:
    """Whether the last order lays ranks otherwise than those before it."""

    def lies(order: str) -> tuple[tuple[str, ...], ...]:
        axes = order.split("-")
        grids = (layout.sizes, layout.expert_sizes) if layout.ep > 1 or layout.etp is not None else (layout.sizes,)
        return tuple(tuple(axis for axis in axes if sizes[axis] > 1) for sizes in grids)

    return lies(orders[-1]) not in map(lies, orders[:-1])


def _is_shard(space: SearchSpace, layout: Layout) -> bool:
    """Whether a group that is tried is a part of the ranks with copies."""
    values, copies = space.free.get("data_parallel.shard", ()), layout.dp * layout.cp
    return len(values) < 2 or (values[-1] < copies and copies % values[-1] == 0)


def chosen_of(plan: Plan, keys: Iterable[str]) -> dict[str, Any]:
    """What a plan has of keys, by dotted key; None is as the stack has it."""
    found = {}
    for key in keys:
        section, _, name = key.partition(".")
        found[key] = getattr(getattr(plan, section), name)
    return found


def word(value: Any) -> str:
    """A value of a free key as a table shows it; a cut of the layers by those of its stages."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) and "|" in value:
        runs = ((count, len(list(same))) for count, same in groupby(layers_written(value)))
        return "/".join(f"{count}*{times}" if times > 1 else str(count) for count, times in runs)
    return str(value)
