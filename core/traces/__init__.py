"""Traces of profilers as timelines, by the actions that they name or by a schedule, and what was measured in them.
Knows no plan."""
