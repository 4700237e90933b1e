"""Hardware as numbers: devices, fabrics, clusters, and how they vary, each number with its source. Knows no
model and no software."""
