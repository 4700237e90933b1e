"""Bytes on each rank over a step: weights, gradients, optimizer state, activations, buffers. Knows no seconds."""
