"""Static proof: rules over a lowered schedule, and the facts they need. Runs no torch."""
