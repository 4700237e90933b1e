"""`draw`: a timeline to text, SVG, PNG, a Chrome trace or the recorded format, chosen by the file's suffix."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..core.base.errors import UnknownNameError
from ..core.base.files import write_bytes
from ..core.schedule.timeline import Timeline
from .page.content import Extra
from .picture import Picture, enlarged, fitting_width, lay_out, plot_width
from .picture_file import picture_bytes
from .scene.axis import TimeUnit
from .scene.panels import Scene
from .scene.scene import By, Resolution, Scale, build_scene
from .svg import to_svg
from .text import MARGIN, TEXT_WIDTH, to_text
from .trace import to_trace

SUFFIXES = (".txt", ".svg", ".png", ".html", ".json", ".json.gz", ".timeline.json", ".timeline.json.gz")
"""Text, pictures, a page to zoom in, Chrome trace, recorded timeline."""


def draw(
    timeline: Timeline,
    path: str | Path | None = None,
    *,
    memory: bool = True,
    width: int | None = None,
    compare: Timeline | None = None,
    scale: Scale = "auto",
    by: By = "lane",
    time_unit: TimeUnit = "s",
    color: bool = False,
    extras: Sequence[Extra] = (),
) -> str:
    """Text of the Gantt chart, or with `path` the path of the file written.

    `width` is in characters (default 100) or in pixels (default 1200 to 1600, so that labels fit; a PNG has two dots
    per pixel). `compare` is drawn below on the same time scale, unless `scale` says `own`, or is `auto` and the
    makespans differ by more than a factor of three; a prediction and a measurement of the same actions lane by lane,
    unless `by` says `timeline`. With `time_unit="unit"` times have no unit of seconds. `color` uses 256 terminal
    colours. A page has everything of the timelines, and their `extras`, whatever options other than `scale` say. Raises
    `UnknownNameError` for another suffix, `TimelineError` when there is nothing to draw.
    """
    if path is None:
        return _text(
            timeline, memory=memory, width=width, compare=compare, scale=scale, by=by, time_unit=time_unit, color=color
        )
    suffix = kind_of(path)
    if suffix.startswith(".timeline"):
        timeline.save(path)
        return str(path)
    if suffix.startswith(".json"):
        data = to_trace([timeline] if compare is None else [timeline, compare]).encode()
        data = gzip.compress(data, mtime=0) if suffix.endswith(".gz") else data
    elif suffix == ".html":
        from .page.html import to_html

        data = to_html([timeline] if compare is None else [timeline, compare], extras, time_unit, scale).encode()
    elif suffix == ".txt":
        data = _text(
            timeline, memory=memory, width=width, compare=compare, scale=scale, by=by, time_unit=time_unit, color=False
        ).encode()
    else:
        pixels = width or max(fitting_width(each) for each in (timeline, compare or timeline))
        build = partial(build_scene, timeline, compare=compare, memory=memory, scale=scale, by=by, time_unit=time_unit)
        data = picture_bytes(_picture(build, pixels), suffix)
    write_bytes(path, data)
    return str(path)


def svg(timeline: Timeline, *, width: int | None = None, time_unit: TimeUnit = "s") -> str:
    """The SVG of a timeline, as `draw` writes it. Raises `TimelineError` when there is nothing to draw."""
    build = partial(build_scene, timeline, time_unit=time_unit)
    return to_svg(_picture(build, width or fitting_width(timeline)))


def kind_of(path: str | Path) -> str:
    """The longest suffix in `SUFFIXES` that the file name has. Raises `UnknownNameError` for any other."""
    name = Path(path).name
    found = [suffix for suffix in SUFFIXES if name.endswith(suffix)]
    if not found:
        raise UnknownNameError("picture suffix", "".join(Path(path).suffixes) or name, SUFFIXES)
    return max(found, key=len)


def _text(
    timeline: Timeline,
    *,
    memory: bool,
    width: int | None,
    compare: Timeline | None,
    scale: Scale,
    by: By,
    time_unit: TimeUnit,
    color: bool,
) -> str:
    characters = max(width or TEXT_WIDTH, 40)
    columns = characters - MARGIN
    resolution = Resolution(
        columns, min_columns=1.0, bucket_columns=1, bucket_actions=2, num_ticks=max(2, columns // 12)
    )
    scene = build_scene(timeline, resolution, compare=compare, memory=memory, scale=scale, by=by, time_unit=time_unit)
    return to_text(scene, width=characters, color=color)


def _picture(build: Callable[[Resolution], Scene], width: float) -> Picture:
    """The picture of a scene; of more width than most pages have one half is larger type and one half finer time."""
    return enlarged(lambda pixels: lay_out(build(Resolution(int(plot_width(pixels)))), pixels), width, power=0.5)
