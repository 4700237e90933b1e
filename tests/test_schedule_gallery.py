"""docs/schedules.md is what docs/make_schedules.py makes of the catalog today, and what it measures
is what is published."""

from __future__ import annotations

import doctest
import importlib
from fractions import Fraction
from pathlib import Path

import pytest

import shardproof
from helpers.pages import content_of, unpacked
from shardproof import build
from shardproof.core.schedule import CATALOG
from shardproof.viz.page.html import document
from shardproof.viz.page.schedules import catalog

DOCS = Path(shardproof.__file__).parent / "docs"


@pytest.fixture(scope="module")
def gallery():
    """The script as a module; it lies in the package's folder without being installed with it."""
    return importlib.import_module("shardproof.docs.make_schedules")


def test_making_the_page_again_gives_the_same_bytes(gallery, tmp_path):
    made = {path.relative_to(tmp_path): path.read_bytes() for path in gallery.write(tmp_path)}
    stale = [
        str(name)
        for name, content in made.items()
        if not (DOCS / name).exists() or (DOCS / name).read_bytes() != content
    ]
    assert stale == [], "run python docs/make_schedules.py"
    retained = {path.relative_to(DOCS) for path in (DOCS / "pictures").glob("schedule-*.svg")}
    assert retained == made.keys() - {Path("schedules.md")}, "pictures of schedules that are no longer in the catalog"


@pytest.mark.parametrize("names", [("1F1B", "DualPipe"), pytest.param(tuple(CATALOG), marks=pytest.mark.full)], ids=len)
def test_the_page_with_sliders_has_the_script_and_the_schedules_of_today(gallery, names):
    committed = (DOCS / "pictures" / gallery.SLIDERS).read_text()
    assert document(gallery.SLIDERS_TITLE, content_of(committed)) == committed, "run python docs/make_schedules.py"
    header, columns = unpacked(committed)
    library = header["library"]
    entries = {(library["names"][each["name"]], each["p"], each["v"], each["m"]): each for each in library["entries"]}
    schedules = catalog(names)
    assert {each[:4] for each in schedules} == {key for key in entries if key[0] in names}
    for each in schedules:
        entry = entries[each[:4]]
        first, last = entry["first"], entry["first"] + sum(entry["lengths"])
        for name, at in library["columns"].items():
            assert columns[at][first:last].tolist() == getattr(each.schedule.actions, name).tolist()


def test_every_picture_is_below_60_kilobytes():
    sizes = {path.name: path.stat().st_size for path in (DOCS / "pictures").glob("schedule-*.svg")}
    assert max(sizes.values()) < 60_000, sizes


def test_every_schedule_of_the_catalog_has_its_source_and_no_other(gallery):
    assert gallery.PUBLISHED.keys() == CATALOG.keys()


@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 4), (4, 8), (6, 24)])
@pytest.mark.parametrize("name", CATALOG)
def test_bubble_and_activations_of_the_engine_are_the_published_ones(gallery, name, pp, num_microbatches):
    schedule = build(name, pp=pp, num_microbatches=num_microbatches, vpp=CATALOG[name].nearest_vpp(2))
    found, published = gallery.measure(schedule, gallery.run(schedule)), gallery.PUBLISHED[name]
    bubble = gallery.evaluate(published.bubble, schedule)
    assert found.bubble <= bubble if published.bubble_is_bound else found.bubble == bubble
    assert found.activations == gallery.evaluate(published.activations, schedule)


@pytest.mark.parametrize("costs", [(2, 2, 1), (4, 4, 3)], ids=str)
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "LoopedBFS", "ZBH1", "ZBH2", "DualPipe", "DualPipeV"])
def test_published_bubbles_hold_for_other_forwards_and_halves_of_the_backward(gallery, name, costs):
    schedule = gallery.example(name)
    found = gallery.measure(schedule, gallery.run(schedule, *costs))
    assert found.bubble == gallery.evaluate(gallery.PUBLISHED[name].bubble, schedule, *costs)


@pytest.mark.parametrize("name", CATALOG)
def test_the_work_of_a_rank_is_24_units_in_every_picture(gallery, name):
    timeline = gallery.run(gallery.example(name))
    assert [Fraction(timeline.busy_s(rank)) for rank in range(4)] == [24] * 4


def test_examples_in_the_script_hold(gallery):
    assert doctest.testmod(gallery).failed == 0
