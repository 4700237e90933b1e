"""The static rules as one table. Each entry carries its documentation, a hint, and the smallest schedule that breaks it."""

from .compute import COMPUTE_RULES, CYCLE_RULES, PLACEMENT_RULES
from .memory import MEMORY_RULES
from .messages import DEADLOCK_RULES, MESSAGE_RULES
from .rule import ActivationMemory, Rule, Violation
from .step import STEP_RULES
from .view import View

RULES: tuple[Rule, ...] = (*PLACEMENT_RULES, *COMPUTE_RULES, *CYCLE_RULES, *MEMORY_RULES, *MESSAGE_RULES, *STEP_RULES, *DEADLOCK_RULES)

__all__ = [
    "COMPUTE_RULES",
    "CYCLE_RULES",
    "DEADLOCK_RULES",
    "MEMORY_RULES",
    "MESSAGE_RULES",
    "PLACEMENT_RULES",
    "RULES",
    "STEP_RULES",
    "ActivationMemory",
    "Rule",
    "View",
    "Violation",
]
