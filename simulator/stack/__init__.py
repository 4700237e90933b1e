"""A software stack as data: what it fuses, casts, overlaps and costs the host, with sources. Prices nothing itself."""
