"""`paceline ledger verify`, its comparisons and repairs, and `paceline samples`."""
