"""One network as numbers: shapes, parameters, rotary positions, and the config files that describe them. Knows no
layout and no machine."""
