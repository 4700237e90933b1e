"""A stage's gradients: parameters, sums over microbatches, their parts, values that are not
finite. Knows no optimizer."""
