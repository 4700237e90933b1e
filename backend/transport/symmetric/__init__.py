"""Ranks of one host through memory that they all map: a heap, groups and channels on it, and who may use it."""
