"""The command line: verbs, options, the registry of rooms, exit codes. No knowledge of training."""
