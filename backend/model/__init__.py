"""The decoder from those layers: attention, MLP, experts, norms, embedding, head. Knows no pipeline."""
