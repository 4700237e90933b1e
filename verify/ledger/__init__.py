"""What a run computed, as digests of tensors: writing, reading, comparing ledgers. Starts no run."""
