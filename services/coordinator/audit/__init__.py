"""`paceline ledger verify`, its comparisons and `--repair`."""
