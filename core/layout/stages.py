"""Which layers a pipeline stage holds: even cuts, and Megatron's layout strings such as `Et*3|(tt|)*29L`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from ..base.bounds import shown
from ..base.divisors import divisors
from ..base.errors import LayoutError
from .layout import Layout

MAX_LENGTH = 100_000
"""Longest expanded layout string: far above any model, so that a typing error cannot fill the memory."""


@dataclass(frozen=True)
class StageLayers:
    """The content of one stage: transformer layers `[first_layer, last_layer)`, and whether it holds
    embedding or output head."""

    stage: int
    first_layer: int
    last_layer: int
    embedding: bool
    head: bool

    @property
    def layers(self) -> range:
        """Global indices of the transformer layers."""
        return range(self.first_layer, self.last_layer)


def assign_layers(num_layers: int, layout: Layout) -> tuple[StageLayers, ...]:
    """The content of every stage, in stage order; which rank holds which is `plan.placement`.

    Without `layout.stages` the layers are cut evenly and pp*vpp must divide them. Raises `LayoutError` otherwise.
    """
    return _assigned(num_layers, layout.num_stages, layout.stages)


@lru_cache(maxsize=4096)
def _assigned(num_layers: int, num_stages: int, written: str | None) -> tuple[StageLayers, ...]:
    counts = _parse(written) if written is not None else _even(num_layers, num_stages)
    problems = []
    if len(counts) != num_stages:
        problems.append(f"stages={shown(written)} describes {len(counts)} stages, but pp*vpp={num_stages}.")
    if sum(counts) != num_layers:
        problems.append(f"stages={shown(written)} holds {sum(counts)} layers, but the model has {num_layers}.")
    if problems:
        raise LayoutError(problems)
    stages, first = [], 0
    for stage, count in enumerate(counts):
        stages.append(StageLayers(stage, first, first + count, embedding=stage == 0, head=stage == len(counts) - 1))
        first += count
    return tuple(stages)


def to_string(stages: tuple[StageLayers, ...]) -> str:
    """The layout-string form of a stage assignment: `Ett|tt|ttL`."""
    return "|".join(f"{'E' if s.embedding else ''}{'t' * len(s.layers)}{'L' if s.head else ''}" for s in stages)


def balanced_stages(num_layers: int, num_stages: int) -> str | None:
    """The layout string of a cut for which embedding and head count as a layer each, the last stages before the
    head having one less where it does not come out even (Llama 3, arXiv 2407.21783, section 3.3.2); None where a
    stage would have no layer.

    >>> balanced_stages(61, 16)
    'Ettt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|ttL'
    """
    size, larger = divmod(num_layers + 2, num_stages)
    if size < 2 or num_stages < 2:
        return None
    counts = [size + (stage < larger) for stage in range(num_stages)]
    cells = ["t" * (count - (stage in (0, num_stages - 1))) for stage, count in enumerate(counts)]
    return f"E{'|'.join(cells)}L"


def _even(num_layers: int, num_stages: int) -> list[int]:
    if num_layers % num_stages:
        raise LayoutError(
            f"pp*vpp={num_stages} does not divide num_layers={num_layers}. Use pp*vpp among {divisors(num_layers)}, "
            'or give an uneven cut such as stages = "Ett|tttL".'
        )
    return [num_layers // num_stages] * num_stages


def _parse(text: str) -> list[int]:
    """Layers per stage. `X*n` repeats a letter, `(...)*n` a group, `|` ends a stage, commas are decoration.

    `m`, a module of multi-token prediction, may be written or left out: it always lies next to the loss.
    """
    expanded = _expand(text.replace(" ", "").replace(",", ""))
    cells = expanded.split("|")
    layers = "".join(cells)
    if re.fullmatch(r"Et*m*L", layers) is None:
        raise LayoutError(
            f"stages={shown(text)} expands to {shown(expanded)}, which must hold E (embedding) first, L (loss) last, "
            "only t (layers) between, and m (multi-token prediction), if anywhere, before L."
        )
    if "E" not in cells[0] or "L" not in cells[-1]:
        wanted = "where the first stage must hold E and the last stage L"
        raise LayoutError(f"stages={shown(text)} expands to {shown(expanded)}, {wanted}.")
    if any("m" in cell for cell in cells[:-1]):
        alone = "puts m (multi-token prediction) on a stage of its own"
        raise LayoutError(f"stages={shown(text)} {alone}. Write it next to L, in the last stage.")
    return [cell.count("t") for cell in cells]


def layers_written(stages: str) -> list[int]:
    """Layers of every stage of a layout string. Raises `LayoutError` for one that is none.

    >>> layers_written("Ett|(ttt|)*2tL")
    [2, 3, 3, 1]
    """
    return _parse(stages)


def num_mtp_written(stages: str) -> int:
    """Modules of multi-token prediction that a legal layout string names."""
    return _expand(stages.replace(" ", "").replace(",", "")).count("m")


def num_stages_written(stages: str) -> int:
    """Stages that a layout string describes. Raises `LayoutError` for one that cannot be expanded."""
    return _expand(stages.replace(" ", "").replace(",", "")).count("|") + 1


def _expand(text: str) -> str:
    original, group = text, re.compile(r"\(([^()]*)\)\*(\d{1,6})(?!\d)|([EtmL|])\*(\d{1,6})(?!\d)")
    while len(text) <= MAX_LENGTH and (match := group.search(text)):
        body, times, letter, letter_times = match.groups()
        repeated, number = (body, int(times)) if body is not None else (letter, int(letter_times))
        if len(text) + len(repeated) * number > 2 * MAX_LENGTH:  # before it is written out, which could fill the memory
            text = " " * (MAX_LENGTH + 1)
        else:
            text = text[: match.start()] + repeated * number + text[match.end() :]
    if len(text) > MAX_LENGTH:
        raise LayoutError(
            f"stages={shown(original)} expands to more than {MAX_LENGTH:,} characters, and no model has so many "
            "layers. "
            "Look for a mistyped number of repeats."
        )
    if strange := set(text) - set("EtmL|"):
        raise LayoutError(
            f"stages={shown(original)} has {shown(''.join(sorted(strange)))}; use E, t, m, L, |, *n and (...)*n."
        )
    return text
