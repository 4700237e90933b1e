"""One plan simulated, whatever it says: equal or differing replicas, recorded durations, several modules.
Explains, and never searches."""
