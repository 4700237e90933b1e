"""One plan's step put together: graph, prices, run, memory, report. Replicas are equal here."""
