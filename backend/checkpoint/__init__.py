"""Checkpoints: all that training goes on from, saved by torch's distributed checkpointing so that any layout can read it."""
