"""Why two ledgers differ: the first cause, sums by their parts, the words of a finding. Starts no run."""
