"""Checks what runs on this machine, each in a process of its own, and the report of them that is sent back.
Proves no plan."""
