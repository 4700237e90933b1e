"""One plan simulated: equal or differing replicas, recorded durations, several modules; and why the step takes so long."""
