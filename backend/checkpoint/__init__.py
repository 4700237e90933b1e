"""All that training goes on from, saved so that any layout can read it, and checked when it is read.
Executes nothing it reads."""
