"""SVG and PNG: well formed, complete, the same bytes every time."""

import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from helpers.plans import plan
from shardproof import draw, simulate
from shardproof.viz.picture import LEFT, Line, Rect, Text, lay_out, plot_width, text_width
from shardproof.viz.scene.palette import CURVES, FILLS, IDLE, fill, text_on
from shardproof.viz.scene.scene import Resolution, build_scene

SVG = "{http://www.w3.org/2000/svg}"


def svg_of(timeline, path, **options):
    draw(timeline, path, **options)
    return ElementTree.fromstring(path.read_text(encoding="utf-8"))


def test_svg_has_one_titled_rectangle_per_action(full, tmp_path):
    root = svg_of(full, tmp_path / "x.svg")
    titles = [rect.find(f"{SVG}title").text for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert len(titles) == 8 + 5
    assert "0B0 on rank 0, compute: 4 s to 6 s (2 s)" in titles
    assert "1SEND_B0 on rank 1, B>0: 4 s to 4.5 s (500 ms)" in titles


def test_svg_places_boxes_on_the_time_axis(tiny, tmp_path):
    root = svg_of(tiny, tmp_path / "x.svg", width=1000)
    scale = plot_width(1000) / 9
    (box,) = [rect for rect in root.iter(f"{SVG}rect") if rect.findtext(f"{SVG}title", "").startswith("1B1 ")]
    assert float(box.get("x")) == pytest.approx(LEFT + 5 * scale, abs=0.01)
    assert float(box.get("width")) == pytest.approx(2 * scale - 0.7, abs=0.01)  # less the hair between neighbours
    assert (box.get("fill"), root.get("width")) == (FILLS[1], "1000")


def test_even_the_shortest_message_is_seen(make_timeline, tmp_path):
    rows = [(0, "compute", "0F0", 0, 1), (0, "F>1", "0SEND_F0", 0.5, 0.5 + 1e-6)]
    root = svg_of(make_timeline(rows), tmp_path / "x.svg")
    (message,) = [rect for rect in root.iter(f"{SVG}rect") if rect.findtext(f"{SVG}title", "").startswith("0SEND_F0 ")]
    assert float(message.get("width")) == 1.2


def test_svg_needs_nothing_from_elsewhere(full, tmp_path):
    draw(full, tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text(encoding="utf-8")
    assert "href" not in text and "@import" not in text and "url(" not in text and "<script" not in text


def test_title_is_escaped(make_timeline, tmp_path):
    root = svg_of(make_timeline([(0, "compute", "0F0", 0, 1)], title='a < b & "c"'), tmp_path / "x.svg")
    assert root.findtext(f"{SVG}title") == 'a < b & "c"'


@pytest.mark.parametrize("suffix", [".svg", ".png", ".html", ".txt", ".json", ".json.gz", ".timeline.json.gz"])
def test_the_same_timeline_gives_the_same_bytes(full, tmp_path, suffix):
    first, second = tmp_path / f"first{suffix}", tmp_path / f"second{suffix}"
    draw(full, first)
    draw(full, second)
    assert first.read_bytes() == second.read_bytes() and first.stat().st_size > 100


def test_png_has_two_dots_per_pixel(full, tmp_path):
    draw(full, tmp_path / "x.png", width=900)
    data = (tmp_path / "x.png").read_bytes()
    picture = lay_out(build_scene(full, Resolution(int(plot_width(900)))), 900)
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", data[16:24]) == (1800, 2 * picture.height)


def test_paper_of_3840_pixels_has_larger_type_and_finer_time(full, tmp_path):
    """One half of what is more than 1,600 pixels: the root of 2.4."""
    for suffix in (".svg", ".png"):
        draw(full, tmp_path / f"x{suffix}", width=3840)
    head = (tmp_path / "x.svg").read_text().partition("\n")[2][:200]
    assert 'width="3840"' in head and 'viewBox="0 0 2478.71 ' in head
    assert struct.unpack(">I", (tmp_path / "x.png").read_bytes()[16:20]) == (7680,)


def test_png_shows_the_colours_of_forward_backward_and_idle(tiny, tmp_path):
    from matplotlib.image import imread

    draw(tiny, tmp_path / "x.png", width=900)
    pixels = (imread(tmp_path / "x.png")[..., :3] * 255).round().astype(int).reshape(-1, 3)
    found = {f"#{r:02x}{g:02x}{b:02x}" for r, g, b in pixels[::7].tolist()}
    assert {FILLS[0], FILLS[1], IDLE} <= found


def test_matplotlib_is_loaded_only_for_png(tmp_path):
    code = (
        "import sys; from shardproof import draw, Span, Timeline, Action\n"
        "t = Timeline.from_spans([Span(0, 'compute', Action.from_str('0F0'), 0.0, 1.0)], 'predicted')\n"
        f"draw(t); draw(t, {str(tmp_path / 'x.svg')!r}); draw(t, {str(tmp_path / 'x.json')!r})\n"
        "assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules\n"
        f"draw(t, {str(tmp_path / 'x.png')!r}); assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in "
        "sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def overlaps(a, b):
    return a[0] < b[2] - 0.01 and b[0] < a[2] - 0.01 and a[1] < b[3] - 0.01 and b[1] < a[3] - 0.01


def text_extent(text):
    width = text_width(text.text, text.size)
    left = text.x - {"start": 0.0, "middle": width / 2, "end": width}[text.anchor]
    return left, text.y - 0.7 * text.size, left + width, text.y


@pytest.mark.parametrize("width", [700, 1200])
@pytest.mark.parametrize("name", ["tiny", "full", "long"])
def test_texts_do_not_overlap_and_stay_on_the_paper(request, name, width):
    timeline = request.getfixturevalue(name)
    picture = lay_out(build_scene(timeline, Resolution(int(plot_width(width))), compare=timeline), width)
    extents = [text_extent(mark) for mark in picture.marks if isinstance(mark, Text)]
    assert all(left >= 0 and right <= picture.width and bottom <= picture.height for left, _, right, bottom in extents)
    assert not [(a, b) for i, a in enumerate(extents) for b in extents[:i] if overlaps(a, b)]


def test_labels_stay_inside_their_boxes(full):
    picture = lay_out(build_scene(full, Resolution(900)), 1100)
    rects = [mark for mark in picture.marks if isinstance(mark, Rect) and mark.title]
    for label in [
        mark for mark in picture.marks if isinstance(mark, Text) and mark.anchor == "middle" and mark.fill == "#ffffff"
    ]:
        left, top, right, bottom = text_extent(label)
        assert any(r.x <= left and right <= r.x + r.width and r.y <= top and bottom <= r.y + r.height for r in rects)


def test_curves_of_memory_that_would_hide_each_other_are_one_line_and_have_one_colour():
    """Ranks 0 and 3 of a DualPipe hold the same, so do ranks 1 and 2."""
    timeline = simulate(plan(pp=4, dp=1, microbatches=8, schedule="DualPipe")).timeline
    marks = lay_out(build_scene(timeline, Resolution(1000)), 1000).marks
    lines = [mark for mark in marks if isinstance(mark, Line) and mark.stroke in CURVES]
    texts = {mark.text.partition(",")[0]: mark.y for mark in marks if isinstance(mark, Text) and "iB" in mark.text}
    swatches = {mark.y: mark.fill for mark in marks if isinstance(mark, Rect) and mark.fill in CURVES}
    colors = [swatches[texts[f"rank {rank}"] - 5.0] for rank in range(4)]
    assert len(lines) == 2 and colors == [CURVES[0], CURVES[-1], CURVES[-1], CURVES[0]]


def test_memory_curve_is_drawn_to_scale(full):
    picture = lay_out(build_scene(full, Resolution(900)), 1100)
    (curve,) = [mark for mark in picture.marks if isinstance(mark, Line) and mark.stroke == CURVES[0]]
    scale = plot_width(1100) / 9
    levels = [y for _, y in curve.points]
    assert [x for x, _ in curve.points] == pytest.approx([LEFT + t * scale for t in (0, 2, 2, 6, 6, 9)])
    assert (levels[0] - levels[2]) == pytest.approx(2 * (levels[4] - levels[2]))  # 1 GiB against 3, and 2 against 3


def test_chunks_get_lighter_and_labels_keep_their_contrast():
    shades = [fill(0, chunk, 3) for chunk in range(3)]
    assert shades == ["#3b74b4", "#6c97c7", "#9dbada"]
    assert [text_on(shade) for shade in shades] == ["#ffffff", "#ffffff", "#1f2933"]


def test_a_second_makespan_is_marked_by_a_dashed_line(tiny, make_timeline):
    rows = [(s.global_rank, s.lane, str(s.action), 2 * s.start_s, 2 * s.end_s) for s in tiny.spans]
    picture = lay_out(
        build_scene(tiny, Resolution(900), compare=make_timeline(rows, source="measured"), by="timeline"), 1100
    )
    dashed = [mark.points[0][0] for mark in picture.marks if isinstance(mark, Line) and mark.dashed]
    assert dashed == pytest.approx([LEFT + plot_width(1100) / 2])
