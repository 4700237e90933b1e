"""The duration of one collective or message from its size and where its ranks lie. Knows no layer."""
