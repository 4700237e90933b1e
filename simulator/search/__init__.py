"""Many plans: what fits, lower bounds, the fastest layout, sensitivity. Every answer is a whole simulation."""
