"""The static rules as one table. Each entry carries its documentation, a hint, and the smallest
schedule that breaks it."""

from .buffers import BUFFER_RULES
from .collectives import COLLECTIVE_RULES
from .compute import COMPUTE_RULES, CYCLE_RULES, PLACEMENT_RULES
from .deadlock import DEADLOCK_RULES
from .layers import LAYER_RULES
from .memory import MEMORY_RULES
from .messages import MESSAGE_RULES
from .rule import Rule, Violation
from .step import STEP_RULES
from .view import View

RULES: tuple[Rule, ...] = (
    *PLACEMENT_RULES,
    *LAYER_RULES,
    *COMPUTE_RULES,
    *CYCLE_RULES,
    *MEMORY_RULES,
    *MESSAGE_RULES,
    *STEP_RULES,
    *DEADLOCK_RULES,
    *COLLECTIVE_RULES,
    *BUFFER_RULES,
)

__all__ = [
    "BUFFER_RULES",
    "COLLECTIVE_RULES",
    "COMPUTE_RULES",
    "CYCLE_RULES",
    "DEADLOCK_RULES",
    "LAYER_RULES",
    "MEMORY_RULES",
    "MESSAGE_RULES",
    "PLACEMENT_RULES",
    "RULES",
    "STEP_RULES",
    "Rule",
    "View",
    "Violation",
]
