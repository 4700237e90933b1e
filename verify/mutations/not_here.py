"""Bugs of the catalog whose mechanism is not in this backend, each with the reason."""

from __future__ import annotations

from collections.abc import Mapping

NOT_HERE: Mapping[str, str] = {
    "DA04": "data are one text: there is no blend of several, whose shares could be rounded",
    "RC06": (
        "gradients are not offloaded: they stay on the device that computes them, and no copy to the host races "
        "their memory"
    ),
}
"""Entry of the catalog -> why it cannot be made here."""
