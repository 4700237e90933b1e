"""Processes: starting, feeding, ending ranks, here or under torchrun. Knows no model."""
