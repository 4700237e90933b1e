"""Optimizers on a rank's shards: AdamW, SGD and Muon, with their state on the device or in host memory. Knows no
stage."""
