"""Writes the screenshots of docs/pictures.md: every view of a page, in a real Chromium.

Run `python docs/make_screenshots.py` after a page's look changed (half a minute; it needs Chromium, torch and
matplotlib, which brings Pillow). Two of the pages show runs of this machine, a step of ours and one of torch's own
pipelining, whose times differ from run to run; `tests/test_screenshots.py` looks at what does not.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from shardproof.core.commands.cli import main as shardproof

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from helpers.chromium import PROGRAM, Chromium
from helpers.torch_runs import PIPELINE, run

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT = 1280, 800
LANES = "messages,collectives,causes"

BIG = str(ROOT / "examples" / "llama70b_512.toml")
SMALL = ["--model", "llama3-8b", "--cluster", "dgx-h100", "--devices", "32", "--tp", "2", "--pp", "4", "--dp", "4"]
SMALL += ["--global-batch", "32", "--sequence", "4096"]
FOREIGN = """\
[model]
preset = "gpt2"
[cluster]
preset = "dgx-h100"
num_devices = 2
[layout]
pp = 2
[batch]
global = 4
micro = 1
sequence = 1024
[schedule]
name = "1F1B"
"""
"""What torch's run is compared with: its schedule is that of the run, its model is not."""


def overview(browser: Chromium, pages: Path) -> None:
    """A large step."""
    browser.open(pages / "big.html", f"#show={LANES},memory&theme=light")


def overview_dark(browser: Chromium, pages: Path) -> None:
    """The same on a dark ground."""
    overview(browser, pages)
    browser.press("t")


def memory(browser: Chromium, pages: Path) -> None:
    """Its memory by component."""
    overview(browser, pages)
    browser.press("k")


def zoomed(browser: Chromium, pages: Path) -> None:
    """An action of it that was searched."""
    browser.open(pages / "big.html", f"#show={LANES}&theme=light")
    _search(browser, "20F17")


def causes(browser: Chromium, pages: Path) -> None:
    """What led to an action and what it held up, in a step of four stages."""
    browser.open(pages / "small.html", f"#show={LANES}&theme=light")
    _search(browser, "3B2")
    browser.press("0")


def compared(browser: Chromium, pages: Path) -> None:
    """A prediction and a measurement."""
    browser.open(pages / "compared.html", "#theme=light")
    browser.press("m")
    _search(browser, "0B2")
    browser.press("0")


def trace(browser: Chromium, pages: Path) -> None:
    """A run of torch, and a plan that is much faster."""
    browser.open(pages / "foreign.html", "#theme=light")
    browser.press("m")


def schedules(browser: Chromium, _pages: Path) -> None:
    """Two schedules with sliders."""
    browser.open(ROOT / "docs" / "pictures" / "schedules.html", "#show=messages,memory,causes&theme=light")
    _choose(browser, "name-a", "1F1B")
    _choose(browser, "name-b", "ZBH2")


_SHOWN = (overview, overview_dark, memory, zoomed, causes, compared, trace, schedules)
VIEWS = {f"page_{show.__name__}": show for show in _SHOWN}
"""What a screenshot is called, and what shows it by the keys that a reader would press."""


def _search(browser: Chromium, query: str) -> None:
    """Finds an action, chooses the first, and goes back to the picture with all others in their full colours."""
    browser.press("/")
    browser.call("Input.insertText", text=query)
    browser.press("Enter")
    browser.run("document.getElementById('search').value = ''")
    browser.run("document.getElementById('search').dispatchEvent(new Event('input'))")
    browser.run("document.getElementById('canvas').focus({ focusVisible: false })")


def _choose(browser: Chromium, select: str, name: str) -> None:
    """An entry of a list of schedules."""
    browser.run(
        f"((list) => {{ list.value = page.header.library.names.indexOf('{name}'); list.onchange(); }})"
        f"(document.getElementById('{select}'))"
    )


def make_pages(folder: Path) -> None:
    """The pages that are shown, by the commands that write them. Raises `RuntimeError` where one of them fails."""
    runs = str(folder / "run.timeline.json")
    byte_lm = str(ROOT / "examples" / "byte_lm.toml")
    (folder / "foreign.toml").write_text(FOREIGN)
    (folder / "torch").mkdir()
    traces, _ = run(folder / "torch", "1F1B", 2, PIPELINE)
    for command in (
        ["draw", BIG, "-o", str(folder / "big.html")],
        ["draw", *SMALL, "-o", str(folder / "small.html")],
        ["train", byte_lm, "--set", "train.steps=6", "-o", runs],
        ["draw", byte_lm, "--compare", runs, "-o", str(folder / "compared.html")],
        ["draw", str(traces), "--compare", str(folder / "foreign.toml"), "-o", str(folder / "foreign.html")],
    ):
        if code := shardproof(command):
            raise RuntimeError(f"shardproof {' '.join(command)}: exit code {code}.")


@contextmanager
def opened() -> Iterator[Chromium]:
    """A browser for as long as it is needed."""
    browser = Chromium(WIDTH, HEIGHT)
    try:
        yield browser
    finally:
        browser.close()


def write(folder: Path) -> Iterator[Path]:
    """Writes the screenshots into a folder. Raises `RuntimeError` where there is no Chromium, or a page complains."""
    if PROGRAM is None:
        raise RuntimeError("no Chromium on this machine. Debian: apt install chromium.")
    with tempfile.TemporaryDirectory() as name, opened() as browser:
        make_pages(Path(name))
        for view, show in VIEWS.items():
            show(browser, Path(name))
            browser.settle()
            path = folder / f"{view}.png"
            # not fewer colours: those that are rare, such as of a legend, would become others
            Image.open(io.BytesIO(browser.screenshot())).convert("RGB").save(path, optimize=True)
            yield path
        if browser.errors:
            raise RuntimeError(f"the pages complain: {browser.errors}")


if __name__ == "__main__":
    for path in write(Path(__file__).parent / "pictures"):
        print(path, f"{path.stat().st_size:,} bytes", flush=True)
