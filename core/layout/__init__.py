"""Which rank holds what: grids of ranks, stages, chunks of sequences, microbatches, leaves of sums.
Knows no order in time."""
