"""What is said of steps on standard error: lines for those that parse them, a display on a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys

import pytest

from shardproof.backend import cli
from shardproof.backend.base.step_result import StepResult
from shardproof.backend.monitoring.lines import Lines
from shardproof.backend.monitoring.live import Live
from shardproof.backend.monitoring.metrics import row_of
from shardproof.backend.monitoring.prediction import Prediction


def result(step, **more):
    return StepResult(step, 4.5, 1.25, 0.1, 1000, learning_rate=3e-4, num_microbatches=8, **more)


def all_of(reading):
    """What a terminal that is closed at its other end has: it comes in pieces, and then is no terminal any more."""
    found = b""
    with contextlib.suppress(OSError):
        while piece := os.read(reading, 2**16):
            found += piece
    return found


def test_there_is_a_line_every_so_many_steps_for_held_out_losses_and_the_last():
    stream = io.StringIO()
    lines = Lines(7, 3, stream)
    for step in range(7):
        done = result(step, validation_loss=5.0 if step == 3 else None)
        lines.add(done, row_of(done, None, None, {"sample": {"prompt": "a\n", "text": "b"}} if step == 4 else {}))
    assert stream.getvalue().splitlines() == [
        "step 3/7  loss 4.5000  grad norm 1.250  10,000 tokens/s",
        "step 4/7  loss 4.5000  grad norm 1.250  10,000 tokens/s  validation loss 5.0000",
        r'sample: "a\n" goes on "b"',
        "step 6/7  loss 4.5000  grad norm 1.250  10,000 tokens/s",
        "step 7/7  loss 4.5000  grad norm 1.250  10,000 tokens/s",
    ]


def test_a_terminal_has_measured_and_predicted_seconds_memory_and_what_is_left():
    reading, writing = os.openpty()
    with os.fdopen(writing, "w") as terminal:
        live = Live("tiny on 2 ranks", 100, terminal)
        step = result(49, validation_loss=4.75)
        live.add(step, row_of(step, Prediction(0.05, 0.4, 1000, "measured"), 3 * 2**30, {}))
        live.close()
    shown = " ".join(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", all_of(reading).decode()).split())
    os.close(reading)
    for words in (
        "tiny on 2 ranks",
        "validation loss 4.7500",
        "50 of 100, 5 s left",
        "4.5000, gradient norm 1.250",
        "0.0003, 8 microbatches",
        "10,000 tokens/s, MFU 20.0%",
        "100 ms, predicted 50 ms",
        "3 GiB on rank 0",
    ):
        assert words in shown, shown


@pytest.mark.parametrize(
    ("no_color", "is_terminal", "display"), [("", True, "live"), ("1", True, "lines"), ("", False, "lines")]
)
def test_a_terminal_without_no_color_has_the_display(no_color, is_terminal, display, monkeypatch):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert cli._display() == display
