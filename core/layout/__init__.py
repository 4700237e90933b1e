"""Which rank holds what: the mesh, stages, chunks of sequences, microbatches, leaves of sums. Knows no order in time."""
