"""The project's own pictures."""
