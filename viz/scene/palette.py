"""Colours of actions: restrained, distinguishable without red and green, and readable in grey because
their lightness differs.

Forward is blue and full backward bluish green, close to the Okabe-Ito set (Okabe & Ito 2008, "Color Universal Design");
messages take the hue of what they carry, receives paler than sends.
"""

from __future__ import annotations

from ...core.schedule.action import Kind

INK = "#1f2933"
MUTED = "#66727f"
RULE = "#c5ccd3"
GRID = "#e4e8ec"
IDLE = "#eef0f2"
PAPER = "#ffffff"

FILLS = {
    Kind.F: "#3b74b4",
    Kind.B: "#2f9a7c",
    Kind.I: "#a9ce64",
    Kind.W: "#d58c24",
    Kind.SEND_F: "#5f8fc6",
    Kind.RECV_F: "#bdd2ea",
    Kind.SEND_B: "#4dab90",
    Kind.RECV_B: "#b6dfd2",
    Kind.UNSHARD: "#c9709b",
    Kind.RESHARD: "#e3b7cb",
    Kind.REDUCE_GRAD: "#8a63ac",
    Kind.STEP: "#3f464e",
}
"""Fill of the first chunk; later chunks are mixed with white. OVERLAP_F_B has no colour of its own: its
halves are an F and a B."""

DARK_FILLS = {Kind.STEP: "#c3ccd5"}
"""Fills on a dark ground, of kinds that could hardly be seen on it."""

ANSI = {
    Kind.F: 67,
    Kind.B: 36,
    Kind.I: 149,
    Kind.W: 172,
    Kind.SEND_F: 68,
    Kind.RECV_F: 153,
    Kind.SEND_B: 72,
    Kind.RECV_B: 115,
    Kind.UNSHARD: 168,
    Kind.RESHARD: 182,
    Kind.REDUCE_GRAD: 97,
    Kind.STEP: 240,
}
"""The nearest entries of the terminal's 256 colours, and for later chunks the lighter ones of `ANSI_LATER`."""

ANSI_LATER = {Kind.F: 110, Kind.B: 115, Kind.I: 193, Kind.W: 222}

NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.SEND_F: "send activations",
    Kind.RECV_F: "receive activations",
    Kind.SEND_B: "send gradients",
    Kind.RECV_B: "receive gradients",
    Kind.UNSHARD: "gather parameters",
    Kind.RESHARD: "free parameters",
    Kind.REDUCE_GRAD: "reduce gradients",
    Kind.STEP: "optimizer step",
}
"""Legend text, in legend order."""

CURVES = ("#30246b", "#5b2f86", "#86398f", "#ad4688", "#cf5a78", "#e77a63", "#f29d55", "#e9bd4f")
"""Memory curves, first to last rank: one ramp, because ranks are ordered."""

COMPONENTS = {
    "weights": "#4b3aa0",
    "gradients": "#3b74b4",
    "optimizer": "#94b5dc",
    "activations": "#dda13a",
    "buffers": "#b9c0c8",
}
"""Memory by component: blues for what belongs to parameters, each lighter than the one before."""

LIMIT = "#b3400a"
"""The line of what a device has."""

CAUSES = {
    "warm-up": ("#dfe4e8", "#333b43"),
    "waiting": ("#f4d9bd", "#503a31"),
    "message": ("#d2e9fe", "#3f6376"),
    "dp-sync": ("#c6b5f7", "#563074"),
    "norm": ("#e5c3f7", "#382244"),
    "replicas": ("#f2faae", "#816327"),
    "end": ("#dfe4e8", "#333b43"),
}
"""Idle time by its cause (`core.schedule.waits.Cause`), on paper and on a dark ground: pale, because what runs is what
one looks at first."""


CAUSE_WORDS = {
    "warm-up": "before its first action",
    "waiting": "for an action of another rank",
    "message": "for a message under way",
    "dp-sync": "for gradients or weights of other replicas",
    "norm": "for the last rank's gradients, before the step",
    "replicas": "for other replicas at the same action",
    "end": "after its step, until the last rank ends",
}
"""What each of them is, in the words of `simulate`."""


def fill(kind: Kind, chunk: int = 0, num_chunks: int = 1) -> str:
    """Hex colour of an action; chunk 0 has the full colour and the last chunk is mixed half with white."""
    share = 0.5 * chunk / (num_chunks - 1) if num_chunks > 1 and kind in ANSI_LATER else 0.0
    return mix(FILLS[kind], share)


def mix(color: str, white: float) -> str:
    """A hex colour with a share of white in it.

    >>> mix("#000000", 0.5)
    '#808080'
    """
    return "#" + "".join(f"{round(value + (255 - value) * white):02x}" for value in _channels(color))


def text_on(color: str) -> str:
    """White where its contrast is 3 at least (WCAG 2.2), which is a relative luminance below 0.3, else ink."""
    return PAPER if _luminance(color) < 0.3 else INK


def contrast(one: str, other: str) -> float:
    """How far apart two colours are, from 1 to 21 (contrast ratio of WCAG 2.2; 3 is enough for a shape).

    >>> contrast("#ffffff", "#000000")
    21.0
    """
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(color: str) -> float:
    linear = [((c / 255 + 0.055) / 1.055) ** 2.4 if c > 10 else c / 255 / 12.92 for c in _channels(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def curve(index: int, count: int) -> str:
    """Colour of memory curve `index` of `count`, spread over the ramp."""
    return CURVES[round(index * (len(CURVES) - 1) / max(count - 1, 1)) if count > 1 else 0]


def ramp(share: float) -> str:
    """A colour of the ramp that memory curves have, from 0 to 1, dark to light.

    >>> ramp(0.0), ramp(1.0)
    ('#30246b', '#e9bd4f')
    """
    place = min(max(share, 0.0), 1.0) * (len(CURVES) - 1)
    low = min(int(place), len(CURVES) - 2)
    parts = zip(_channels(CURVES[low]), _channels(CURVES[low + 1]), strict=True)
    return "#" + "".join(f"{round(one + (other - one) * (place - low)):02x}" for one, other in parts)


def _channels(color: str) -> list[int]:
    return [int(color[i : i + 2], 16) for i in (1, 3, 5)]
