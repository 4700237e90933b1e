"""The page in a real browser: what a user points at, presses and reads."""

import base64
import importlib
import io
import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

import matplotlib.image
import numpy as np
import pytest

import shardproof
from helpers.chromium import PROGRAM, Chromium
from helpers.pdf import images_of
from helpers.plans import plan
from shardproof import build, draw, lower, run_schedule, simulate
from shardproof.core.base.findings import Finding
from shardproof.core.commands.cli import main
from shardproof.core.schedule import CATALOG
from shardproof.core.schedule.action import Kind
from shardproof.core.schedule.timeline import Timeline
from shardproof.core.schedule.waits import Cause, gaps_of, waits_of
from shardproof.simulator.engine.critical_path import critical_path
from shardproof.simulator.engine.graph import build_graph
from shardproof.viz.page.content import Extra
from shardproof.viz.page.html import schedules_to_html
from shardproof.viz.page.schedules import catalog
from shardproof.viz.scene import palette

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine (Debian: apt install chromium)")

GIB = 2**30
ROOT = Path(shardproof.__file__).parent
AWKWARD = """</script><script>document.title = "broken"</script> "quoted" & 'so' <b> {{content}}"""


@pytest.fixture(scope="module")
def browser():
    browser = Chromium()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def step():
    """A predicted step of three ranks, with messages, reductions and memory."""
    return simulate(plan(pp=3, dp=2, microbatches=6))


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page of timelines, and looks at the end that no script complained and nothing was asked of a network."""
    browser.errors.clear()
    browser.requests.clear()

    def opens(*timelines, view="", **options):
        path = tmp_path / "page.html"
        draw(timelines[0], path, compare=timelines[1] if len(timelines) > 1 else None, **options)
        browser.open(path, view)
        return browser

    yield opens
    assert browser.errors == []
    assert {address.partition(":")[0] for address in browser.requests} <= {"file", "about", "data"}


def details(browser):
    return browser.run("document.getElementById('details').textContent")


TOKENS = """(entry, header) => (i) =>
  `${entry.stage[i]}${header.kinds[entry.kind[i]]}${entry.microbatch[i] < 0 ? "" : entry.microbatch[i]}`"""

MIDDLE = """((wanted, rank, number) => {
  const entry = page.header.timelines[number], token = (TOKENS)(entry, page.header);
  const box = document.getElementById("canvas").getBoundingClientRect();
  for (const row of page.rows) {
    if (row.entry !== entry || entry.ranks[row.rank] !== rank) continue;
    for (const { track, y, height } of row.tracks) {
      const span = track.ref.find((each) => each >= 0 && token(each) === wanted);
      if (span === undefined) continue;
      const x = page.painter.x((entry.start[span] + entry.end[span]) / 2, page.view.seen(entry));
      return [box.left + x, box.top + page.painter.top + y - page.view.scroll + height / 2];
    }
  }
})""".replace("TOKENS", TOKENS)


def middle_of(browser, action, rank=0, timeline=0):
    """Where an action lies on the screen."""
    found = browser.run(f"{MIDDLE}({json.dumps(action)}, {rank}, {timeline})")
    assert found is not None, f"{action} is not on the page"
    return found


def test_pointing_at_an_action_says_what_it_is_and_a_click_what_it_waited_for(opened, step):
    browser = opened(step.timeline)
    x, y = middle_of(browser, "1B2", rank=2)
    browser.mouse("mouseMoved", x, y)
    browser.settle()
    tip = browser.run("document.getElementById('tip').textContent")
    assert tip.startswith("1B2: backward, ") and "on rank 2, lane compute" in tip and "waited last for" in tip
    browser.click(x, y)
    assert "1B2: backward" in details(browser) and "1RECV_B2 @2" in details(browser)
    browser.press("[")
    (chosen,) = browser.run("[page.view.chosen[1]]")
    entry = browser.run(f"page.header.timelines[0].kind[{chosen}]")
    assert entry in (int(Kind.RECV_B), int(Kind.F), int(Kind.B))
    browser.press("Escape")
    assert browser.run("page.view.chosen") is None


def test_pointing_at_memory_says_what_is_held_and_what_the_peak_is_made_of(opened, step):
    held = [each.components() for each in step.memory]
    browser = opened(step.timeline, extras=[Extra(step.report["capacity_bytes"], peaks=tuple(held))])
    left, y = browser.run(
        "(({ left, top }) => [left, top + 30 + page.rows[1].memory.y + 20])"
        "(document.getElementById('canvas').getBoundingClientRect())"
    )
    browser.mouse("mouseMoved", left + 700, y)
    browser.settle()
    tip = browser.run("document.getElementById('tip').textContent")
    assert tip.startswith("rank 2 holds ") and "at most" in tip and "then weights " in tip and "usable: " in tip


def test_memory_is_stacked_by_component_on_demand(opened, step):
    """Every sample's components add up to it, and between the ground and the curve the page has their colours."""
    held = tuple(each.components() for each in step.memory)
    parts = step.sample_components
    assert parts.sum(axis=1).tolist() == [each.num_bytes for each in step.memory_samples]
    browser = opened(step.timeline, extras=[Extra(peaks=held, samples=parts)])
    assert browser.run("page.rows[1].memory.parts.length") == 0
    browser.press("k")
    browser.settle()
    names = browser.run(
        "[...document.querySelectorAll('#legend > span:last-child > *')].map((each) => each.textContent)"
    )
    assert names == list(held[0])
    for sample in (0, 5, -1):
        place = [i for i, each in enumerate(step.memory_samples) if each.global_rank == 2][sample]
        within = browser.run(
            f"(({{ lo, hi }}) => {sample} < 0 ? hi - 1 : lo + {sample})(page.header.timelines[0].samples[1])"
        )
        found = browser.run(f"page.header.timelines[0].memory_parts.map((part) => part.bytes[{within}])")
        assert found == parts[place].tolist()
    row, at = "page.rows[1].memory", "page.painter.x(page.view.end * 0.5)"
    color = browser.run(
        f"(({{ data }}) => [...data].slice(0, 3))(document.getElementById('canvas').getContext('2d').getImageData("
        f"({at}) * devicePixelRatio, ({row}.y + {row}.height - 3 + 30 - page.view.scroll) * devicePixelRatio, 1, 1))"
    )
    assert "#" + "".join(f"{each:02x}" for each in color) == palette.COMPONENTS["weights"]
    browser.press("k")
    browser.settle()
    assert browser.run("page.rows[1].memory.parts.length") == 0


def test_an_idle_time_says_its_cause(opened, step):
    browser = opened(step.timeline)
    words = browser.run(
        "page.words(page.header.timelines[0], -1 - [...page.header.timelines[0].gap_cause].indexOf(1)).join('; ')"
    )
    assert words.startswith("idle for ") and ": waiting; for an action of another rank; from " in words
    assert "; for 1" in words or "; for 2" in words or "; for 0" in words


def test_the_critical_path_is_that_of_the_simulator(opened, step):
    browser = opened(step.timeline)
    browser.press("c")
    tokens = f"page.header.timelines[0].critical.map(({TOKENS})(page.header.timelines[0], page.header))"
    actions = step.run.graph.schedule.actions
    theirs = [str(actions[segment.action]) for segment in critical_path(step.run, step.prices).segments]
    # a message is a send and a receive here, and one segment there
    mine = [token for token in browser.run(tokens) if "RECV" not in token]
    assert mine == theirs and len(mine) > 10


@pytest.mark.parametrize(
    ("query", "expected"),
    [("4F7", 0), ("1F2", 1), ("SEND_F", 12), ("rank 2", None), ("stage 1", None), ("mb 3", None), ("nothing", 0)],
)
def test_search_finds_tokens_kinds_ranks_stages_and_microbatches(opened, step, query, expected):
    spans = step.timeline.spans
    if query == "rank 2":
        expected = int((spans.global_rank == 2).sum())
    elif query == "stage 1":
        expected = int((spans.actions.stage == 1).sum())
    elif query == "mb 3":
        expected = int((spans.actions.microbatch == 3).sum())
    browser = opened(step.timeline)
    browser.press("/")
    browser.call("Input.insertText", text=query)
    browser.settle()
    assert browser.run("document.getElementById('count').textContent") == f"{expected} found"
    browser.press("Enter")
    assert (browser.run("page.view.chosen") is not None) == (expected > 0)


def test_rows_fold_by_click_and_key_and_groups_leave_one_rank_of_a_stage(opened, full, make_timeline):
    browser = opened(full)
    tall = browser.run("page.rows.total")
    browser.click(30, browser.run("document.getElementById('canvas').getBoundingClientRect().top") + 42)
    assert browser.run("page.rows[0].folded") and browser.run("page.rows.total") < tall
    browser.press("f")
    browser.press("m")
    assert browser.run("page.rows.every((row) => row.memory === null)")
    browser.run("page.choose(0, page.tracks[0][1][0].lo)")
    for folded in ("false,true", "false,false"):
        browser.press("F", shift=True)
        assert browser.run("page.rows.map((row) => row.folded).join()") == folded
    replicas = make_timeline([(rank, "compute", "0F0", 0, 1 + rank) for rank in range(3)])
    browser = opened(replicas)
    browser.press("g")
    assert browser.run("page.rows.map((row) => row.label[0])") == ["rank 0 +2"]


def test_keys_move_and_zoom_and_the_address_keeps_the_view(opened, step):
    browser = opened(step.timeline)
    for key in ("w", "w", "ArrowRight", "e", "t", "Enter"):
        browser.press(key)
    state = "[page.view.lo, page.view.hi, page.view.shows.messages, page.view.theme, page.view.chosen]"
    browser.run("page.remember()")
    before, address = browser.run(state), browser.run("location.hash")
    assert before[1] - before[0] < step.timeline.makespan_s and before[4] is not None
    again = opened(step.timeline, view=address)
    after = again.run(state)
    assert after[:2] == pytest.approx(before[:2], rel=1e-6) and after[2:] == before[2:]
    again.press("Home")
    assert again.run("page.view.lo") == 0


def test_a_link_opened_where_the_page_is_open_already_shows_its_view_and_nothing_of_the_one_before(opened, step):
    browser = opened(step.timeline, view="#q=1F3&fold=0&at=0:3&path=1&t=0,0.001&show=causes&theme=dark")
    for address in ("#show=memory,messages&theme=light", "#t=0,0.002&q=rank 2&theme=dark", ""):
        browser.run(f"location.hash = {json.dumps(address)}")
        browser.settle()
        seen = browser.run("page.view.hash")
        assert seen == opened(step.timeline, view=address).run("page.view.hash")
        browser.run("page.view.hash = '#q=1F3&fold=0&at=0:3&path=1&t=0,0.001&show=causes&theme=dark'")


def test_only_the_first_button_moves_the_page(opened, step):
    browser = opened(step.timeline, view="#t=0.0001,0.0002")
    for button, buttons in (("right", 2), ("middle", 4), ("left", 1)):
        before = browser.run("page.view.lo")
        browser.mouse("mousePressed", 600, 300, button=button, buttons=buttons, clickCount=1)
        browser.mouse("mouseMoved", 640, 300, button=button, buttons=buttons)
        browser.settle()
        moved = browser.run("page.view.lo") != before
        # the menu of the right button takes the release, so nothing is heard of it
        browser.mouse("mouseMoved", 700, 300)
        after = browser.run("page.view.lo")
        browser.mouse("mouseMoved", 760, 300)
        assert (moved, browser.run("page.view.lo")) == (button == "left", after)


def test_an_address_that_says_nonsense_is_harmless(opened, step):
    browser = opened(step.timeline, view="#t=5,1&at=7:99999&fold=x&theme=pink&q=%E0%A4%A&show=&y=-3")
    assert browser.run("[page.view.lo, page.view.chosen, page.view.query, page.rows.length]") == [0, None, "", 3]


def slower(timeline, times):
    """The timeline as if measured, so many times as long."""
    spans = timeline.spans
    moved = type(spans)(
        spans.global_rank, spans.lane, spans.lanes, spans.actions, spans.start_s * times, spans.end_s * times
    )
    memory = tuple(replace(each, time_s=each.time_s * times) for each in timeline.memory)
    return Timeline(moved, "measured", memory, timeline.title)


def test_of_timelines_that_differ_fifty_fold_each_has_an_axis_of_its_own_and_a_key_puts_both_on_one(opened, full):
    browser = opened(full, slower(full, 50))
    notes = "document.getElementById('notes').textContent"
    assert "50 x predicted" in browser.run(notes) and "each on its own time axis" in browser.run(notes)
    both = [middle_of(browser, "1B0", rank=1, timeline=number) for number in (0, 1)]
    assert both[0][0] == pytest.approx(both[1][0]) and both[0][1] < both[1][1]
    browser.mouse("mouseMoved", *both[1])
    browser.settle()
    tip = browser.run("document.getElementById('tip').textContent")
    assert tip.startswith("1B0: backward, 100 s") and "predicted: 2 s from 2 s" in tip
    browser.click(*both[1])
    assert browser.run("page.view.chosen[0]") == 1
    browser.run("page.remember()")
    assert "own" in browser.run("location.hash").partition("show=")[2].partition("&")[0]
    browser.press("o")
    assert "own time axis" not in browser.run(notes)
    one, other = (middle_of(browser, "1B0", rank=1, timeline=number)[0] for number in (0, 1))
    left = browser.run("page.painter.x(0)")
    assert (other - left) / (one - left) == pytest.approx(50)


def test_timelines_of_about_the_same_length_share_an_axis_and_one_alone_has_no_choice(opened, full):
    browser = opened(full, slower(full, 2))
    assert browser.run("[page.view.own, document.getElementById('show-own').hidden]") == [False, False]
    assert opened(full, slower(full, 2), scale="own").run("page.view.own") is True
    assert opened(full, slower(full, 50), scale="time").run("page.view.own") is False
    browser = opened(full, view="#show=own")
    browser.press("o")
    assert browser.run("[page.view.own, document.getElementById('show-own').hidden]") == [False, True]
    assert "own time axis" not in browser.run("document.getElementById('notes').textContent")


def test_memory_ends_with_its_timeline_and_its_scale_does_not_show_what_is_far_away(opened, full):
    browser = opened(full, slower(full, 2), extras=[Extra(100 * GIB)] * 2, view="#show=memory&theme=light")
    left, y, width = browser.run(
        "(({ left, top }, { memory }) => [left + page.painter.x(0), "
        "top + page.painter.top + memory.y + 0.6 * memory.height, "
        "page.painter.plot])(document.getElementById('canvas').getBoundingClientRect(), page.rows[0])"
    )
    picture = matplotlib.image.imread(io.BytesIO(browser.screenshot()))[..., :3]
    held, beyond = (picture[int(y), int(left + share * width)] for share in (0.25, 0.75))
    assert held.min() < 0.9 and beyond.min() == 1.0


def test_two_timelines_lie_rank_by_rank_and_an_action_knows_the_other(opened, full):
    browser = opened(full, slower(full, 2))
    labels = browser.run("page.rows.map((row) => row.label.join(' '))")
    assert labels == ["rank 0 predicted", "rank 0 measured", "rank 1 predicted", "rank 1 measured"]
    assert "in the same order" in browser.run("document.getElementById('notes').textContent")
    words = browser.run("page.words(page.header.timelines[1], 0).join('; ')")
    assert "predicted: 1 s from 0 s, here +100.0%" in words


BELOW = """((number, rank = 0) => {
  const row = page.rows.find((each) => each.entry.number === number && each.rank === rank);
  const { track, y, height } = row.tracks[0];
  const at = Math.round(page.painter.top + y - page.view.scroll + height + 1);
  const copy = new OffscreenCanvas(page.painter.width, 1).getContext("2d", { willReadFrequently: true });
  copy.drawImage(page.painter.canvas, 0, -at);
  return { row, track, pixels: copy.getImageData(0, 0, page.painter.width, 1).data };
})"""

MARKED = """((number, rank) => {
  const { row, track, pixels } = (BELOW)(number, rank), token = (TOKENS)(row.entry, page.header);
  return [...track.ref.keys()].filter((i) => track.ref[i] >= 0).map((i) => {
    const x = Math.round(page.painter.x((track.start[i] + 3 * track.end[i]) / 4, page.view.seen(row.entry)));
    const [red, green, blue] = pixels.slice(4 * x), isMarked = red > 190 && blue < 90;
    return token(track.ref[i]) + (isMarked ? (green < 100 ? " longer" : " elsewhere") : "");
  }).filter((text) => !text.includes("STEP"));
})""".replace("BELOW", BELOW).replace("TOKENS", TOKENS)


def test_differences_of_two_timelines_are_marked_below_actions(opened):
    """Of the same schedule what takes longer, of two schedules what comes behind another action."""
    first = run_schedule(build("1F1B", pp=2, num_microbatches=3), 1, 1, 1)
    late = run_schedule(build("1F1B", pp=2, num_microbatches=3), 1, 1, 2)
    browser = opened(first, late, view="#show=")
    assert browser.run(f"{MARKED}(0)") == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    assert browser.run(f"{MARKED}(1)") == ["0F0", "0F1", "0B0 longer", "0F2", "0B1 longer", "0B2 longer"]
    legend = browser.run("document.getElementById('legend').textContent")
    assert "takes longer here" in legend and "only here, or behind another action" in legend
    browser = opened(first, run_schedule(build("GPipe", pp=2, num_microbatches=3), 1, 1, 1), view="#show=")
    assert browser.run(f"{MARKED}(0)") == ["0F0", "0F1", "0B0 elsewhere", "0F2 elsewhere", "0B1 elsewhere", "0B2"]
    words = browser.run("page.words(page.header.timelines[0], 2).join('; ')")
    assert words.endswith("there behind 0F2")
    browser = opened(first, run_schedule(build("ZBH1", pp=2, num_microbatches=3), 1, 1, 1), view="#show=")
    assert browser.run(f"{MARKED}(0, 1)")[:3] == ["1F0", "1B0 elsewhere", "1F1 elsewhere"]
    assert browser.run(f"{MARKED}(1, 1)")[:3] == ["1F0", "1I0 elsewhere", "1F1 elsewhere"]
    words = browser.run("page.words(page.header.timelines[0], page.tracks[0][1][0].ref[2]).join('; ')")
    assert "predicted B has no such action on this lane" in words


def test_two_timelines_of_one_source_have_letters(opened):
    """By letters, in the title, on rows, and in what is said of an action."""
    both = [run_schedule(build(name, pp=2, num_microbatches=3), 1, 1, 1) for name in ("1F1B", "GPipe")]
    browser = opened(*both, view="#show=")
    assert browser.run("document.getElementById('title').textContent") == "A: 1F1B / B: GPipe"
    assert browser.run("document.getElementById('notes').textContent").startswith("predicted A: ")
    assert browser.run("page.rows.map((row) => row.label.join(' '))")[:2] == [
        "rank 0 predicted A",
        "rank 0 predicted B",
    ]
    assert "predicted B: " in browser.run("page.words(page.header.timelines[0], 0).join('; ')")


def test_differences_are_marked_where_actions_are_narrower_than_a_pixel_too(opened):
    """Sums over each column: as dark as the share of it that differs."""
    schedule = build("1F1B", pp=2, num_microbatches=3000)
    browser = opened(run_schedule(schedule, 1, 1, 1), run_schedule(schedule, 2, 1, 1), view="#show=")
    shares = [browser.run(f"[...{BELOW}({number}).pixels]") for number in (0, 1)]
    first, second = (np.array(each).reshape(-1, 4)[200:1000, :3] for each in shares)
    assert (first == 255).all()
    # half of what a forward takes of every four units: a quarter of red on white
    assert second.mean(axis=0) == pytest.approx([244.5, 206.5, 201.8], abs=2)


def test_folded_rows_of_a_comparison_say_whose_they_are(opened, full):
    browser = opened(full, slower(full, 2), view="#show=&fold=0,1")
    browser.run(
        "(() => { const { context } = page.painter, fill = context.fillText.bind(context); window.texts = [];"
        "context.fillText = (text, ...more) => { texts.push(text); fill(text, ...more); }; page.redraw(); })()"
    )
    browser.settle()
    texts = browser.run("texts")
    assert (texts.count("predicted"), texts.count("measured")) == (2, 2)


def test_a_dense_lane_shows_the_mean_colour_of_each_column_and_draws_no_more_than_it_has_pixels(opened):
    timeline = run_schedule(lower(build("1F1B", pp=2, num_microbatches=6000)), send_s=0.0)
    browser = opened(timeline, time_unit="unit", view="#show=&theme=light")
    assert browser.run("page.painter.boxes") <= 2
    box = browser.run("(({ left, top }) => [left, top])(document.getElementById('canvas').getBoundingClientRect())")
    picture = matplotlib.image.imread(io.BytesIO(browser.screenshot()))[..., :3]
    plot = browser.run("page.painter.plot")
    y = int(box[1] + 30 + 12)
    colours = {
        kind: np.array([int(palette.fill(kind, 0, 1)[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        for kind in (Kind.F, Kind.B)
    }
    rank0 = timeline.select(0)
    for column in (300, 617, 900):
        lo, hi = (timeline.makespan_s * each / plot for each in (column, column + 1))
        mean = sum(
            colours[span.action.kind] * max(0.0, min(span.end_s, hi) - max(span.start_s, lo))
            for span in rank0
            if span.action.kind in colours
        ) / (hi - lo)
        assert picture[y, int(132 + column)] == pytest.approx(mean, abs=0.03)


def test_light_and_dark_have_their_own_ground(opened, step):
    browser = opened(step.timeline, view="#theme=light")
    light = matplotlib.image.imread(io.BytesIO(browser.screenshot()))[..., :3]
    browser.press("t")
    dark = matplotlib.image.imread(io.BytesIO(browser.screenshot()))[..., :3]
    assert light.mean() > 0.7 and dark.mean() < 0.45


def test_names_with_tags_and_quotes_are_only_text(opened, full):
    finding = Finding(AWKWARD, "error", AWKWARD, AWKWARD, AWKWARD, rank=0, action="0F0")
    browser = opened(replace(full, title=AWKWARD), extras=[Extra(findings=(finding,))])
    assert browser.run("document.getElementById('title').textContent") == AWKWARD
    assert browser.run("document.title") == AWKWARD and browser.run("document.querySelectorAll('script').length") == 2
    assert AWKWARD in browser.run("document.getElementById('findings').textContent")


def test_a_damaged_page_says_so(browser, full, tmp_path):
    path = tmp_path / "page.html"
    draw(full, path)
    path.write_text(path.read_text().replace('id="content">H4sI', 'id="content">AAAA'))
    browser.open(path)
    assert details(browser).startswith("The page cannot be shown: ")


@pytest.fixture(scope="module")
def all_schedules(browser, tmp_path_factory):
    """The page of the whole catalog, open, and its schedules."""
    found = catalog()
    path = tmp_path_factory.mktemp("pages") / "schedules.html"
    path.write_text(schedules_to_html(found, "Pipeline schedules"))
    return found, path


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.full)])
def test_sliders_put_every_schedule_into_the_engine_s_time(browser, all_schedules, count):
    found, path = all_schedules
    browser.errors.clear()
    browser.open(path)
    chosen = random.Random(count)
    names = set()
    for _ in range(count):
        at = chosen.randrange(len(found))
        lasts = {name: round(chosen.uniform(0.1, 3.0), 3) for name in "FIW"} | {"send": chosen.choice([0.0, 0.25, 0.1])}
        times = browser.run(f"page.sliders.settled({at}, {json.dumps(lasts)}).map((each) => [each.start, each.end])")
        schedule = found[at].schedule
        spans = run_schedule(schedule, lasts["F"], lasts["I"], lasts["W"], lasts["send"]).spans
        expected = np.empty((len(spans), 2))
        expected[build_graph(schedule).lane_order] = np.stack([spans.start_s, spans.end_s], axis=1)
        assert np.abs(np.array(times) - expected).max() <= 1e-9, (found[at][:4], lasts)
        names.add(found[at].name)
    assert len(names) > 10 and browser.errors == []


def test_every_cause_of_idle_time_has_colours_and_words():
    assert list(palette.CAUSES) == list(palette.CAUSE_WORDS) == list(get_args(Cause))


def test_idle_times_of_a_schedule_have_the_causes_that_python_finds(browser, all_schedules):
    found, path = all_schedules
    at = next(i for i, each in enumerate(found) if each[:4] == ("ZBVZeroBubble", 4, 2, 8))
    number = list(dict.fromkeys(each.name for each in found)).index("ZBVZeroBubble")
    browser.open(path, f"#schedule={number},4,2,8,&times=1,1.2,0.8,0.25")
    assert browser.run("page.header.timelines[0].source") == "ZBVZeroBubble"
    timeline = run_schedule(found[at].schedule, 0.5, 0.6, 0.4, 0.25)  # each of two chunks takes half
    expected = sorted(
        (gap.global_rank, gap.start_s, gap.end_s, gap.cause) for gap in gaps_of(timeline, waits_of(timeline))
    )
    causes = list(palette.CAUSES)
    gaps = browser.run(
        "(({ gap_rank, gap_start, gap_end, gap_cause }) => [...gap_rank].map((rank, i) => "
        "[rank, gap_start[i], gap_end[i], gap_cause[i]]))(page.header.timelines[0])"
    )
    mine = sorted((rank, start, end, causes[cause]) for rank, start, end, cause in gaps)
    assert len(mine) == len(expected) > 4
    for one, other in zip(mine, expected, strict=True):
        assert (one[0], one[3]) == (other[0], other[3]) and one[1:3] == pytest.approx(other[1:3])


def test_sliders_change_what_is_shown_and_the_address_keeps_them(browser, all_schedules):
    _, path = all_schedules
    browser.open(path)
    browser.run(
        """(() => {
          const list = document.getElementById("name-b");
          list.value = String(page.header.library.names.indexOf("ZBH1"));
          list.onchange();
          const slider = document.getElementById("time-W");
          slider.value = "0.5";
          slider.oninput();
        })()"""
    )
    browser.settle()
    state = "page.header.timelines.map((entry) => [entry.source, entry.makespan_s, entry.ranks.length])"
    shown = browser.run(state)
    assert (
        shown[1][0] == "ZBH1"
        and shown[1][1] == run_schedule(build("ZBH1", pp=4, num_microbatches=8), 1, 1, 0.5).makespan_s
    )
    browser.run("page.remember()")
    address = browser.run("location.hash")
    browser.open(path, address)
    assert browser.run(state) == shown
    browser.run("page.remember()")
    browser.run("location.hash = '#theme=dark'")  # a link without sliders, and at once the first one again
    browser.settle()
    assert browser.run("page.header.timelines.length") == 1
    browser.run(f"location.hash = {json.dumps(address)}")
    browser.settle()
    assert browser.run(state) == shown and browser.run("page.view.theme") == "light"


def test_the_page_says_of_every_schedule_what_the_page_of_schedules_says(browser, all_schedules):
    """Durations are of a quarter of the model, however many chunks a rank cuts that into."""
    _, path = all_schedules
    gallery = importlib.import_module("shardproof.docs.make_schedules")
    browser.open(path)
    for number, name in enumerate(CATALOG):
        schedule = gallery.example(name)
        sizes = {"name": number, "p": gallery.PP, "v": CATALOG[name].nearest_vpp(gallery.VPP), "m": 8}
        browser.run(f"(({{ sliders }}) => {{ sliders.wanted.a = {json.dumps(sizes)}; sliders.simulate(); }})(page)")
        entry = "({ source, makespan_s, memory_bytes }) => [source, makespan_s, Math.max(...memory_bytes)]"
        measured = gallery.measure(schedule, gallery.run(schedule))
        expected = [name, pytest.approx(measured.makespan), pytest.approx(measured.activations)]
        assert browser.run(f"({entry})(page.header.timelines[0])") == expected


def test_a_schedule_of_one_s_own_has_sliders_and_its_findings(browser, tmp_path, capsys):
    (tmp_path / "two.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert main(["draw", str(tmp_path / "two.csv"), "-o", str(tmp_path / "two.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_s"] == 9
    browser.open(tmp_path / "two.html")
    assert browser.run("[page.header.timelines[0].source, page.header.timelines[0].makespan_s]") == ["two", 9]
    assert browser.run("document.getElementById('sliders').hidden") is False
    assert browser.run("document.getElementById('size-p').disabled") is True
    (tmp_path / "all_held.csv").write_text("0F0,0F1,0F2,0B0,0B1,0B2\n")
    assert main(["draw", str(tmp_path / "all_held.csv"), "-o", str(tmp_path / "all_held.html")]) == 0
    browser.open(tmp_path / "all_held.html")
    said = browser.run("document.getElementById('findings').textContent")
    assert said == "warning: activation-growth at rank 0, step 2, 0F2"


def test_the_page_of_a_plan_has_what_verify_finds_in_it_at_its_actions(browser, tmp_path, capsys):
    plan = ["examples/tiny_tp2_pp2_dp2.toml", "--set", "schedule.name=GPipe", "--set", "batch.global=64"]
    plan[0] = str(ROOT / plan[0])
    assert main(["draw", *plan, "-o", str(tmp_path / "step.html")]) == 0
    main(["verify", *plan])
    found = [
        line.partition(": all ")[0] for line in capsys.readouterr().out.splitlines() if "activation-growth" in line
    ]
    browser.open(tmp_path / "step.html")
    said = browser.run("[...document.getElementById('findings').children].map((each) => each.textContent)")
    assert said == found and len(said) == 2
    browser.run("document.querySelectorAll('#findings button')[1].click()")
    assert details(browser).startswith("1F31: forward")


def test_the_legend_has_the_causes_that_occur_and_a_recording_s_unexplained_idle_time_is_called_so(opened, full):
    browser = opened(full)
    legend = browser.run("page.legendOfCauses.textContent")
    assert "idle: warm-up" in legend and "idle: replicas" in legend and "dp-sync" not in legend
    browser = opened(replace(full, source="measured"))
    legend = browser.run("page.legendOfCauses.textContent")
    assert "replicas" not in legend and "idle: not explained" in legend


def test_arrows_and_outlines_do_not_cross_the_names_of_ranks(opened, step):
    """Zoomed to where the chosen action began long before what is seen."""
    browser = opened(step.timeline)
    browser.run(
        "page.choose(0, 3), page.view.set(page.header.timelines[0].end[3] * 0.98, page.view.end), page.redraw()"
    )
    browser.settle()
    chosen = matplotlib.image.imread(io.BytesIO(browser.screenshot()))
    browser.run("page.view.chosen = null, page.redraw()")
    browser.settle()
    top = int(browser.run("document.getElementById('canvas').getBoundingClientRect().top")) + 31
    names = matplotlib.image.imread(io.BytesIO(browser.screenshot()))[top : top + 300, :128]
    assert (chosen[top : top + 300, :128] == names).all() and len(np.unique(names)) > 2


def test_rows_grow_where_there_is_room(opened, step):
    browser = opened(step.timeline)
    height = "page.rows[0].tracks[0].height"
    browser.size(1280, 2160)
    browser.settle()
    assert browser.run(height) == 48
    browser.size(1280, 400)
    browser.settle()
    assert browser.run(height) == 24
    browser.size(1280, 800)


@pytest.fixture(scope="module")
def tall():
    """More ranks than a sheet of paper has room for."""
    return run_schedule(lower(build("1F1B", pp=24, num_microbatches=4)), send_s=0.25)


@pytest.mark.parametrize("landscape", [False, True])
def test_print_has_every_rank_whole_and_the_axis_on_every_sheet(opened, tall, landscape):
    browser = opened(tall, view="#show=messages,collectives,memory,causes&theme=dark")
    browser.press("w")
    shown = "[page.view.theme, page.view.lo, page.painter.width, page.painter.height, page.rows.total]"
    before = browser.run(shown)
    data = base64.b64decode(browser.call("Page.printToPDF", landscape=landscape)["data"])
    sheets = images_of(data)
    assert len(sheets) == (4 if landscape else 2)
    ranks = []
    for height, (axis, *rows) in sheets:
        assert axis.dots == (1600, 60) and rows
        assert all(20 < each.top < each.bottom < height - 20 for each in (axis, *rows))
        assert all(one.bottom <= two.top + 0.5 for one, two in pairwise((axis, *rows)))
        ranks += rows
    assert len(ranks) == 24 and all(width == 1600 and down > 80 for (width, down), *_ in ranks)
    browser.settle()
    assert browser.run(shown) == before and browser.run("document.querySelectorAll('#paper img').length") == 0


def test_print_says_which_ranks_it_leaves_out(opened, full):
    browser = opened(full)
    browser.run("page.rows[0].y = 0, page.rows.total = 1e6")
    browser.run("(({ paper }) => { page.repaint = () => {}; paper.fill(); })(page)")
    assert browser.run("document.getElementById('paper').textContent").startswith("1 further ranks, from rank 1 on")


def test_letters_and_arrows_in_a_choice_of_schedules_are_the_choice_s_own(browser, tmp_path):
    (tmp_path / "page.html").write_text(schedules_to_html(catalog(["GPipe", "1F1B"]), "two"))
    browser.open(tmp_path / "page.html")
    browser.run("document.getElementById('name-a').focus()")
    theme = browser.run("page.view.theme")
    browser.press("t")
    assert browser.run("page.view.theme") == theme


def test_times_have_the_digits_that_show_a_short_action(opened):
    timeline = run_schedule(lower(build("1F1B", pp=2, num_microbatches=2)), send_s=1e-6)
    browser = opened(timeline)
    span = browser.run("[...page.header.timelines[0].kind].indexOf(page.header.kinds.indexOf('SEND_B'))")
    browser.run(f"page.choose(0, {span})")
    begin, end = details(browser).partition("from ")[2].partition(" on rank")[0].split(" to ")
    assert begin != end


def test_type_grows_on_wide_windows_and_names_of_ranks_keep_their_room(opened, step):
    browser = opened(step.timeline)
    font = "[page.painter.context.font, getComputedStyle(document.body).fontSize]"
    assert browser.run(font)[0].startswith("11px") and browser.run(font)[1] == "13px"
    browser.size(3840, 2160)
    browser.settle()
    size = browser.run("Number.parseFloat(page.painter.context.font)")
    assert size == pytest.approx(11 * 18 / 13, abs=1e-3) and browser.run(font)[1] == "18px"
    names = "['rank 2', 'peak 88.88 GiB'].map((name) => page.painter.context.measureText(name).width)"
    left = browser.run("page.painter.x(page.view.lo)")
    assert all(20 * 18 / 13 + width < left for width in browser.run(names))
    browser.size(1280, 800)


def test_on_a_dark_ground_an_optimizer_step_differs_from_the_ground_and_from_idle_time(opened, step):
    browser = opened(step.timeline, view="#theme=dark")
    shown = browser.run("page.paints.colors.css[page.paints.colors.kinds[page.header.kinds.indexOf('STEP')][0]]")
    swatches = "[...page.legendOfKinds.querySelectorAll('i')].map((each) => each.style.background)"
    color = "rgb({}, {}, {})".format(*(int(shown[at : at + 2], 16) for at in (1, 3, 5)))
    assert color in browser.run(swatches)
    for ground in ("#15191e", *(dark for _, dark in palette.CAUSES.values())):
        assert palette.contrast(shown, ground) > 3
    browser.press("t")
    assert color not in browser.run(swatches)


def test_what_is_said_of_an_action_of_two_timelines_is_seen_without_scrolling(opened, step):
    browser = opened(step.timeline, replace(step.timeline, source="measured"))
    x, y = middle_of(browser, "1B2", rank=2)
    browser.click(x, y)
    assert "predicted" in details(browser) or "measured" in details(browser)
    assert browser.run(
        "(({ scrollHeight, clientHeight }) => scrollHeight <= clientHeight)(document.getElementById('details'))"
    )


def test_every_colour_of_idle_time_is_in_the_legend_once_and_the_search_is_that_of_the_address(opened, step):
    browser = opened(step.timeline, view="#show=causes&q=4F7")
    swatches = browser.run("[...page.legendOfCauses.querySelectorAll('i')].map((each) => each.style.background)")
    assert len(swatches) == len(set(swatches)) > 2
    assert "idle: warm-up / end" in browser.run("page.legendOfCauses.textContent")
    assert browser.run("document.getElementById('search').value") == "4F7"
    browser.run("location.hash = '#q=SEND_F'")
    browser.settle()
    assert browser.run("document.getElementById('search').value") == "SEND_F"
