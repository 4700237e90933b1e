"""Which texts are URLs rather than names of files."""

from __future__ import annotations

import re

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_url(text: str) -> bool:
    """Whether a text names a place by a protocol.

    >>> is_url("s3://bucket/run"), is_url("runs/s3"), is_url("C://run")
    (True, False, False)
    """
    return _URL.match(text) is not None
