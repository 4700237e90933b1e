"""What holds of a kernel without a GPU: interpreted, its compiled code executed, assembled, its barriers explored.
Trains nothing."""
