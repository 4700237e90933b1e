"""Layouts in which every pair of features meets, and the command that proves them. No proof of its own: it calls `prove`."""
