"""One rank whole: its stages, data, optimizer step and totals. Starts no process."""
