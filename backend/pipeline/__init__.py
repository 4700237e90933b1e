"""One rank's row of a schedule, executed: lanes, messages, bridges, overlap. Knows no model."""
