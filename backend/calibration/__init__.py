"""Measures this machine's kernels, collectives and messages for a cluster file. Predicts nothing."""
