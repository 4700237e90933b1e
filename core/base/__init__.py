"""What everything stands on: errors, units, files, findings, options and bounds of numbers, digests, reduction
trees. Knows no model, no machine and no layout."""
