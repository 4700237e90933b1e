"""A run's choices: sections, their keys and rules, reading and writing them, and the schedule that
they mean. Runs nothing."""
