"""Ranks that differ: slow devices, jitter, failures, and what they cost. Changes no price of a healthy device."""
