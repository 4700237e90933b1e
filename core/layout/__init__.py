"""Which rank holds what, where it lies, what it sends to whom: grids and maps of ranks, stages,
chunks of sequences, microbatches, leaves of sums. Knows no order in time."""
