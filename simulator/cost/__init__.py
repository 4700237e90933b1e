"""An action of a schedule to seconds: its kernels and collectives, priced as one stack runs them.
Knows no order in time."""
