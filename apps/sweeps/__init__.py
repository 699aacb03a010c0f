"""`paceline sweep`: a search over keys of a spec, whose trials are ordinary runs."""
