"""How fast a page of many spans is in a real browser: milliseconds of its script for a frame, and until the first.

`python benchmarks/page.py [--microbatches 1024] [--frames 60]`: the page of an interleaved schedule on 32 ranks is
opened in a headless Chromium, zoomed and moved. The browser's own drawing, here without a GPU, is not in these times.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from shardproof import build, draw, lower, run_schedule

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from helpers.chromium import PROGRAM, Chromium

MOVES = """(async (count) => {
  page.frames.length = 0;
  for (let i = 0; i < count; i++) {
    if (i < count / 2) page.view.zoom(0.8, 0.4 * page.view.end);
    else page.view.pan(0.1);
    page.redraw();
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  }
  return page.frames;
})"""


def processor_ms(page: Path) -> float:
    """Opens a page in a browser of its own: processor time of the page's thread until the first frame is drawn."""
    browser = Chromium()
    browser.call("Performance.enable", timeDomain="threadTicks")

    def now_s() -> float:
        metrics = browser.call("Performance.getMetrics")["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    before_s = now_s()
    browser.open(page)
    found = 1e3 * (now_s() - before_s)
    browser.close()
    return found


def first_paint_ms(page: Path, times: int = 5) -> float:
    """What of that the script takes: less the time of the same page without one, which is reading the file. The middle
    of several new browsers, in which nothing is compiled yet."""
    bare = page.with_name("bare.html")
    text = page.read_text(encoding="utf-8")
    begin, end = text.index("\n(() => {\n"), text.rindex("})();")
    bare.write_text(f"{text[:begin]}\n(() => {{ window.page = {{ frames: [0] }};{text[end:]}", encoding="utf-8")
    return median(map(processor_ms, [page] * times)) - median(map(processor_ms, [bare] * times))


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=1024)
    parser.add_argument("--frames", type=int, default=60)
    args = parser.parse_args()
    if PROGRAM is None:
        sys.exit("no Chromium on this machine (Debian: apt install chromium)")
    schedule = lower(build("Interleaved1F1B", pp=32, vpp=2, num_microbatches=args.microbatches))
    timeline = run_schedule(schedule, send_s=0.05)
    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder) / "page.html", perf_counter()
        draw(timeline, path, time_unit="unit")
        written_s = perf_counter() - start
        browser = Chromium()
        start = perf_counter()
        browser.open(path)
        opened_s, first = perf_counter() - start, browser.run("page.frames")[0]
        frames = sorted(browser.run(f"{MOVES}({args.frames})"))
        report = {
            "spans": len(timeline.spans),
            "file_bytes": path.stat().st_size,
            "written_s": round(written_s, 2),
            "opened_s": round(opened_s, 2),
            "script_before_first_paint_ms": round(first_paint_ms(path), 1),
            "first_frame_ms": first,
            "median_frame_ms": frames[len(frames) // 2],
            "95%_frame_ms": frames[int(0.95 * len(frames))],
            "largest_frame_ms": frames[-1],
        }
        browser.close()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
