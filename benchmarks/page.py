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


def first_paint(browser: Chromium, path: Path) -> tuple[float, float]:
    """Opens a page: milliseconds that its functions took until the first frame was drawn, by the browser's profiler,
    and processor time of everything that the page's thread did until then, reading the file included."""
    browser.call("Performance.enable", timeDomain="threadTicks")
    browser.call("Profiler.enable")
    browser.call("Profiler.setSamplingInterval", interval=200)

    def processor_s() -> float:
        metrics = browser.call("Performance.getMetrics")["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    before_s = processor_s()
    browser.call("Profiler.start")
    browser.open(path)
    profile = browser.call("Profiler.stop")["profile"]
    nodes = {node["id"]: node["callFrame"]["functionName"] for node in profile["nodes"]}
    times = zip(profile["samples"], profile["timeDeltas"], strict=True)
    script_us = sum(length for node, length in times if nodes[node] not in ("(program)", "(idle)", "(root)"))
    return script_us / 1e3, 1e3 * (processor_s() - before_s)


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
        script_ms, processor_ms = first_paint(browser, path)
        opened_s, first = perf_counter() - start, browser.run("page.frames")[0]
        frames = sorted(browser.run(f"{MOVES}({args.frames})"))
        report = {
            "spans": len(timeline.spans),
            "file_bytes": path.stat().st_size,
            "written_s": round(written_s, 2),
            "opened_s": round(opened_s, 2),
            "script_before_first_paint_ms": round(script_ms, 1),
            "processor_before_first_paint_ms": round(processor_ms, 1),
            "first_frame_ms": first,
            "median_frame_ms": frames[len(frames) // 2],
            "95%_frame_ms": frames[int(0.95 * len(frames))],
            "largest_frame_ms": frames[-1],
        }
        browser.close()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
