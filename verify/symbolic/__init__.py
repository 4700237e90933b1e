"""Symbolic proof: the lowered program on expressions, compared with one device. Runs no torch."""
