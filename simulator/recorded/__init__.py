"""Durations taken from recorded steps instead of the model. Measures nothing itself."""
