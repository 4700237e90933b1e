"""Traces of profilers as timelines, by the actions that they name or by a schedule; what was measured in them."""
