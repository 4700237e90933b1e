"""Pretended CUDA: a training step on devices "cuda" of a machine without any, with real numbers, and what it gave to
streams. For tests and the doctor."""
