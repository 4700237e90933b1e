"""The rules of [[modules]]: how they lie on ranks, feed each other, and fit together. `table` has them in order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from ...machine.cluster import ClusterSpec
from ..module import Module
from ..runtime import Recompute
from ..sections import ScheduleChoice

Modules = tuple[Module, ...]

JOINED = ("1F1B", "GPipe")
"""Schedules over the stages of all modules (`core.schedule.joined`)."""


def modules_have_names(modules: Modules) -> Iterator[str]:
    """Modules are there, and their names differ."""
    if not modules:
        yield "a plan of modules has none. Write [[modules]], or [model] and [layout]."
    for name, count in Counter(module.name for module in modules).items():
        if count > 1:
            yield (f'name="{name}" is that of {count} modules. Give each module its own.')
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
            yield f'name="{name}" cannot begin the names of parameters. Use letters, digits, _ and -, a letter first.'


def modules_cover_ranks(modules: Modules, cluster: ClusterSpec) -> Iterator[str]:
    """The modules' ranks follow each other without a gap, as many as each layout has, and are the
    devices of the cluster."""
    expected = 0
    for module in modules:
        if module.first_rank != expected:
            last = expected + module.num_ranks - 1
            yield (
                f'ranks="{module.ranks}" of module "{module.name}" do not follow those before it, which end at '
                f"{expected - 1}. "
                f'Use ranks = "{expected}-{last}".'
            )
        expected = module.last_rank + 1
        if (size := module.layout.world_size) != module.num_ranks:
            ranks = f"{module.first_rank}-{module.first_rank + size - 1}" if size > 1 else str(module.first_rank)
            yield (
                f'ranks="{module.ranks}" of module "{module.name}" are {module.num_ranks}, but tp*cp*dp*pp of its '
                f"layout is {size}. "
                f'Use ranks = "{ranks}", or another layout.'
            )
    if modules and cluster.num_devices != expected:
        yield (
            f"num_devices={cluster.num_devices}, but the modules have {expected} ranks. Use "
            f"num_devices={expected}, or leave it out."
        )


def modules_form_a_tree(modules: Modules) -> Iterator[str]:
    """Every module is fed by earlier ones, and all but the last feed one other."""
    fed: Counter[str] = Counter()
    for number, module in enumerate(modules):
        earlier = [each.name for each in modules[:number]]
        for name in module.inputs:
            if name not in earlier:
                known = f"Before it stand {', '.join(earlier)}." if earlier else "It is the first, so it has no inputs."
                yield f'inputs of module "{module.name}" name "{name}", which is no earlier module. {known}'
        fed.update(module.inputs)
    for module in modules[:-1]:
        if fed[module.name] != 1:
            times = "no other module" if not fed[module.name] else f"{fed[module.name]} modules, or one of them twice"
            yield (
                f'module "{module.name}" feeds {times}; every module but the last feeds one. '
                f'Write "{module.name}" into the inputs of one later module.'
            )


def modules_fit_together(modules: Modules) -> Iterator[str]:
    """Hidden states keep their width, and nothing ties one end of the whole to the other."""
    for module in modules:
        model, first = module.model, modules[0]
        if model.hidden_size != first.model.hidden_size:
            yield (
                f'hidden_size={model.hidden_size} of module "{module.name}" is not the {first.model.hidden_size} of '
                f'"{first.name}", whose '
                "hidden states reach it. Use the same hidden_size in all modules."
            )
        if model.shares_table and len(modules) > 1:
            what = "tied_embeddings=true" if model.tied_embeddings else f"num_mtp_layers={model.num_mtp_layers}"
            instead = "tied_embeddings=false" if model.tied_embeddings else "num_mtp_layers=0"
            yield (
                f'{what} of module "{module.name}" needs embedding and head in one model, and no module has both. '
                f"Set {instead}."
            )


def modules_have_a_schedule(modules: Modules, schedule: ScheduleChoice) -> Iterator[str]:
    """One schedule runs the stages of all modules; where they cut the batch differently, all forwards come
    before the backwards."""
    if schedule.file is not None or schedule.name not in JOINED:
        named = f'schedule.file="{schedule.file}"' if schedule.file is not None else f'schedule.name="{schedule.name}"'
        yield f"{named} has no form for [[modules]]. Use schedule.name = {' or '.join(JOINED)}."
    for module in modules:
        if module.layout.vpp > 1:
            yield (
                f'vpp={module.layout.vpp} of module "{module.name}": modules have one stage per pipeline rank. Set '
                "vpp = 1."
            )
    degrees = sorted({module.layout.dp for module in modules})
    if len(degrees) > 1 and schedule.name == "1F1B":
        yield (
            f'schedule.name="{schedule.name}" hands microbatches over one by one, but the modules cut the batch over '
            f"dp={degrees[0]} and "
            f'dp={degrees[-1]} ranks, whose microbatches are others. Use schedule.name = "GPipe", or the same dp.'
        )


def modules_recompute_equally(modules: Modules, recompute: Recompute) -> Iterator[str]:
    """Layers that are recomputed are not named by numbers, which every module begins anew."""
    if recompute.layers is not None and len(modules) > 1:
        yield (
            "recompute.layers names layers by numbers, which every module counts from 0. Use recompute.num_layers, "
            "or all layers."
        )
