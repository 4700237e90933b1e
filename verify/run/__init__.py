"""Both programs of a proof: the sharded run and the single-device reference, with formulas and bounds.
Judges nothing across runs."""
