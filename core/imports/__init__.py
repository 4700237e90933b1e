"""Other people's configurations -> the values of a plan, every setting accounted for. Executes nothing."""
