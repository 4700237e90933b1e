"""What every rank needs and no rank owns: environment, autograd helpers, recorders, results of a step.
Opens no communicator."""
