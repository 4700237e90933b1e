"""What may be wrong in the order of calls, made in the process of one rank: each a fault that must be found."""

from __future__ import annotations

ORDER_CHANGES: dict = {}
