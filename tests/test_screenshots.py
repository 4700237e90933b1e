"""The screenshots of docs/pictures.md: those that docs/make_screenshots.py takes, each shown there, none large."""

from __future__ import annotations

import importlib
import struct
from pathlib import Path

import pytest

import shardproof

DOCS = Path(shardproof.__file__).parent / "docs"
MOST_BYTES = 150_000


@pytest.fixture(scope="module")
def script():
    """The script as a module; it lies in the package's folder without being installed with it."""
    return importlib.import_module("shardproof.docs.make_screenshots")


def test_every_view_has_a_small_screenshot_that_the_page_of_pictures_shows(script):
    assert sorted(script.VIEWS) == sorted(path.stem for path in (DOCS / "pictures").glob("page_*.png"))
    shown = (DOCS / "pictures.md").read_text()
    for view in script.VIEWS:
        data = (DOCS / "pictures" / f"{view}.png").read_bytes()
        assert struct.unpack(">II", data[16:24]) == (script.WIDTH, script.HEIGHT)
        assert len(data) < MOST_BYTES and f"](pictures/{view}.png)" in shown
