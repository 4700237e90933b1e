"""A picture as the bytes of a file."""

from __future__ import annotations

from .picture import Picture
from .svg import to_svg


def picture_bytes(picture: Picture, suffix: str) -> bytes:
    """The file of a picture: SVG for `.svg`, else PNG, for which matplotlib is loaded."""
    if suffix == ".svg":
        return to_svg(picture).encode()
    from .figure import to_png

    return to_png(picture)
