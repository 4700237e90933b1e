"""What runs on GPUs, in Triton: collectives through symmetric memory, exact sums and products. Knows no plan."""
