"""Graph and durations to begin and end times: longest paths, contention, bubbles, critical path. Knows
no device and no model."""
