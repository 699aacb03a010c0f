"""`paceline ledger verify`, its comparisons and `--repair`, and `paceline samples`."""
