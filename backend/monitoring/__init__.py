"""What a run shows of its steps while it trains: metrics, lines, timers, text from the model. Changes no bit of it."""
