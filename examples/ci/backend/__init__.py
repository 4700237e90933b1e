"""The project's own code: its transformer layer."""
