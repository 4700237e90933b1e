"""A picture as SVG text: written by hand, the same bytes for the same picture, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from xml.sax.saxutils import escape, quoteattr

from .picture import Line, Mark, Picture, Rect, Text
from .scene import palette

FONTS = "Inter, 'Segoe UI', 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"


def to_svg(picture: Picture) -> str:
    """An SVG 1.1 document. Rectangles with a hover title are elements of their own; runs of others of
    one colour are one path."""
    width, height = _number(picture.width), _number(picture.height)
    wide, high = (_number(length * picture.scale) for length in (picture.width, picture.height))
    head = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="{FONTS}">\n<title>{escape(picture.title)}</title>\n'
        f'<rect width="{width}" height="{height}" fill="{palette.PAPER}"/>\n'
    )
    return head + "".join(f"{element}\n" for element in _elements(picture.marks)) + "</svg>\n"


def _elements(marks: Iterable[Mark]) -> Iterator[str]:
    def run(mark: Mark) -> str:
        return mark.fill if isinstance(mark, Rect) and not mark.title else ""

    for fill, group in groupby(marks, key=run):
        if fill:
            outlines = "".join(_outline(mark) for mark in group if isinstance(mark, Rect))
            yield f'<path d="{outlines}" fill="{fill}" shape-rendering="crispEdges"/>'
        else:
            yield from (_element(mark) for mark in group)


def _outline(rect: Rect) -> str:
    return f"M{_number(rect.x)} {_number(rect.y)}h{_number(rect.width)}v{_number(rect.height)}h{_number(-rect.width)}z"


def _element(mark: Mark) -> str:
    if isinstance(mark, Rect):
        place = (
            f'x="{_number(mark.x)}" y="{_number(mark.y)}" width="{_number(mark.width)}" height="{_number(mark.height)}"'
        )
        return f'<rect {place} fill="{mark.fill}"><title>{escape(mark.title)}</title></rect>'
    if isinstance(mark, Text):
        return _text(mark)
    return _line(mark)


def _text(mark: Text) -> str:
    anchor = "" if mark.anchor == "start" else f' text-anchor="{mark.anchor}"'
    weight = ' font-weight="600"' if mark.bold else ""
    place = f'x="{_number(mark.x)}" y="{_number(mark.y)}" font-size="{_number(mark.size)}"'
    # Labels on boxes must not catch the pointer, or the box's title would not show under them.
    return f'<text {place} fill={quoteattr(mark.fill)}{anchor}{weight} pointer-events="none">{escape(mark.text)}</text>'


def _line(mark: Line) -> str:
    points = " ".join(f"{_number(x)},{_number(y)}" for x, y in mark.points)
    if mark.fill:
        return f'<polygon points="{points}" fill="{mark.fill}"/>'
    dashes = ' stroke-dasharray="4 3"' if mark.dashed else ""
    return (
        f'<polyline points="{points}" fill="none" stroke="{mark.stroke}" stroke-width="{_number(mark.width)}"{dashes}/>'
    )


def _number(value: float) -> str:
    """Hundredths of a pixel, without needless zeros."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
