"""One rank's row of a schedule, executed: lanes, messages, bridges, overlap, the mesh. Knows no model."""
