"""Images on the sheets of a PDF that a browser printed."""

from __future__ import annotations

import re
import zlib
from typing import NamedTuple

NUMBER = rb"(-?[\d.]+)"
MATRIX = NUMBER + rb" 0 0 " + NUMBER + rb" " + NUMBER + rb" " + NUMBER + rb" cm"


class Placed(NamedTuple):
    """An image of `dots` (across, down) between `top` and `bottom`, in points from the upper edge of its sheet."""

    dots: tuple[int, int]
    top: float
    bottom: float


def images_of(data: bytes) -> list[tuple[float, list[Placed]]]:
    """Of every sheet its height in points, and its images from the first drawn on. Reads what Skia writes: one scale
    and shift for the sheet, and one for each image."""
    objects = {int(found[1]): found for found in re.finditer(rb"(?s)(\d+) 0 obj\s*(.*?)endobj", data)}
    sheets = []
    for _, found in sorted(objects.items()):
        text = found[2]
        if not re.search(rb"/Type\s*/Page\b", text):
            continue
        height = float(re.search(rb"/MediaBox \[0 0 [\d.]+ ([\d.]+)\]", text)[1])  # type: ignore[index]
        named = {name: int(number) for name, number in re.findall(rb"/(X\d+) (\d+) 0 R", text)}
        contents = _stream(objects[int(re.search(rb"/Contents (\d+)", text)[1])][2])  # type: ignore[index]
        _, down, _, shift = (float(each) for each in re.search(MATRIX, contents).groups())  # type: ignore[union-attr]
        images = []
        for drawn in re.finditer(MATRIX + rb"(?:(?! cm)[\s\S])*?/(X\d+) Do", contents):
            _, tall, _, lower = (float(each) for each in drawn.groups()[:4])
            ends = sorted(height - (shift + down * y) for y in (lower, lower + tall))
            about = objects[named[drawn[5]]][2]
            dots = tuple(int(re.search(rb"/%s (\d+)" % name, about)[1]) for name in (b"Width", b"Height"))  # type: ignore[index]
            images.append(Placed((dots[0], dots[1]), *ends))
        sheets.append((height, images))
    return sheets


def _stream(text: bytes) -> bytes:
    """The unpacked content of an object."""
    return zlib.decompressobj().decompress(text.partition(b"stream")[2].lstrip(b"\r\n"))
