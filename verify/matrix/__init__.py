"""Layouts in which every pair of features meets, and the command that proves them. It proves by `prove` alone."""
