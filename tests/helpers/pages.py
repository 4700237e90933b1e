"""Pages read back as their script reads them."""

from __future__ import annotations

import base64
import gzip
import json
import re
import struct
from typing import Any

import numpy as np


def content_of(document: str) -> bytes:
    """What is packed in a page."""
    (content,) = re.findall(r'<script type="application/octet-stream" id="content">([^<]*)</script>', document)
    return base64.b64decode(content)


def unpacked(document: str) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The header and the columns of a page."""
    data = gzip.decompress(content_of(document))
    (length,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + length])
    columns = [
        np.frombuffer(data, column["type"], column["length"], 4 + length + column["offset"])
        for column in header["columns"]
    ]
    return header, columns
