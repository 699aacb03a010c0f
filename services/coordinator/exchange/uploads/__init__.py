"""Groups on their way in: decoding, checks, and where their bytes go."""
