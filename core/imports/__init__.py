"""Other people's configurations -> the values of a plan, every setting accounted for; and plans in their words.
Executes nothing."""
