"""The page as one file: its text, style and script with the packed content, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path

from ...core.base.errors import TimelineError
from ...core.schedule.timeline import Timeline
from ..scene.axis import TimeUnit
from ..scene.scene import Scale
from .content import Extra, packed, packed_schedules
from .schedules import Sized

SCRIPTS = (
    *("unpack.js", "view.js", "rows.js", "paint.js", "engine.js", "sliders.js", "print.js"),
    *("words.js", "input.js", "main.js"),
)
"""In the order in which they build on each other."""


def to_html(
    timelines: Sequence[Timeline], extras: Sequence[Extra] = (), time_unit: TimeUnit = "s", scale: Scale = "auto"
) -> str:
    """An HTML document of one timeline, or of two, which begin on one axis of time or on two as `scale` says; `extras`
    are those of the timelines, in order. Raises `TimelineError` when there is nothing to draw."""
    for each in timelines:
        if each.makespan_s <= 0:
            raise TimelineError(f"a {each.source} timeline without any span of positive length cannot be drawn.")
    given = [*extras, *(Extra() for _ in timelines[len(extras) :])]
    titles = dict.fromkeys(each.title for each in timelines if each.title)
    return document(" / ".join(titles) or "A training step", packed(timelines, given, time_unit, scale))


def schedules_to_html(schedules: Sequence[Sized], title: str) -> str:
    """An HTML document of schedules, whose reader chooses among them and how long actions last."""
    return document(title, packed_schedules(schedules))


def document(title: str, content: bytes) -> str:
    """The HTML of packed content."""
    parts = {
        "title": html.escape(title),
        "css": _own("page.css"),
        "content": base64.b64encode(content).decode(),
        "script": "".join(map(_own, SCRIPTS)),
    }
    # all at once: a title may have such a word too
    return re.sub(r"{{(\w+)}}", lambda found: parts[found[1]], _own("page.html"))


def _own(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
